"""The index of runs: what it finds is what a search through plain lists finds."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import SEP, Tokens, ends, followed, matched

from outpace.drafters.occurrences import SEPARATOR, Occurrences

LENGTHS = (5, 3, 2, 1)
SIZES = st.lists(st.sampled_from([0, 1, 2, 5, 40, 63, 64, 65, 128, 150, 300]), max_size=6)
SEEDS = st.integers(0, 2**32)


def written(seed: int, alphabet: int, sizes: list[int], capacity: int, kind=Occurrences):
    """An index and the text that it was given in pieces of these sizes."""
    random, text, index = Random(seed), [], kind(LENGTHS, capacity)
    for size in sizes:
        piece = [random.randrange(alphabet) for _ in range(size)]
        index.extend(piece)
        text += piece
    return index, text


def place(index: Occurrences, at: int) -> int:
    """A position in the ring as one in the whole text."""
    last = index.count - 1
    return last - ((last - at) & (index.capacity - 1))


def found(index: Occurrences, text: Tokens, run: Tokens, positions) -> Tokens:
    """Positions in the text, newest first, at which the run does end in what is held."""
    all_ = [place(index, at) for at in positions]
    assert all_ == sorted(set(all_), reverse=True)
    assert len(all_) <= index.capacity
    first = max(0, len(text) - index.capacity)
    assert all(first <= at < len(text) for at in all_)
    held = [at for at in all_ if at - len(run) + 1 >= first]
    return [at for at in held if index.matched(at & (index.capacity - 1), run, 99) == len(run)]


def check(seed: int, alphabet: int, sizes: list[int], kind=Occurrences) -> None:
    """Look-ups of the last run, and of runs from anywhere, after every piece."""
    random = Random(seed)
    for count in range(len(sizes) + 1):
        index, text = written(seed, alphabet, sizes[:count], 100, kind)
        assert index.count == len(text)
        first, everything = max(0, len(text) - index.capacity), index.capacity
        for n in LENGTHS:
            if len(text) < n:
                assert list(index.behind(n, everything)) == []
                continue
            tail = text[-n:]
            behind = list(index.behind(n, everything))
            earlier = [at for at in found(index, text, tail, behind) if at < len(text) - 1]
            assert earlier == ends(text, tail, first)[1:]
            assert list(index.behind(n, 3)) == behind[:3]
            start = random.randrange(len(text) - n + 1)
            for run in (tail, text[start : start + n], [alphabet] * n):
                after = list(index.after(run, everything))
                assert found(index, text, run, after) == ends(text, run, first)
                assert list(index.after(run, 3)) == after[:3]


@settings(max_examples=120)
@given(SEEDS, st.integers(1, 4), SIZES)
def test_what_is_found_is_what_stands_there(seed, alphabet, sizes):
    """Rings that wrap up to 13 times, pieces that are hashed one by one and at once."""
    check(seed, alphabet, sizes)


def parts(index: Occurrences):
    """All that an index holds."""
    chains = [(c.newest, c.older, c.hash) for c in index._chains.values()]
    return index.count, index.tokens, chains


def check_bulk(seed: int, alphabet: int, sizes: list[int], kind=Occurrences) -> None:
    index, text = written(seed, alphabet, sizes, 100, kind)
    single = Occurrences(LENGTHS, 100)
    for token in text:
        single.extend([token])
    assert parts(index) == parts(single)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 50), SIZES)
def test_many_tokens_at_once_make_the_same_index(seed, alphabet, sizes):
    """To the last entry of every array."""
    check_bulk(seed, alphabet, sizes)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 5), SIZES)
def test_an_index_that_keeps_all_is_a_ring_that_is_never_full(seed, alphabet, sizes):
    text, ring = Occurrences(LENGTHS), Occurrences(LENGTHS, 2048)
    random = Random(seed)
    for size in sizes:
        piece = [random.randrange(alphabet) for _ in range(size)]
        text.extend(piece)
        ring.extend(piece)
        assert text.count == ring.count < text.capacity <= max(64, 2 * text.count)
        for n in LENGTHS:
            tail = list(ring.tokens[max(0, ring.count - n) : ring.count])
            where = [
                [at for at in index.behind(n, 9999) if index.matched(at, tail, n) == n]
                for index in (text, ring)
            ]
            assert where[0] == where[1]
            for at in where[0][:5]:
                assert text.continuation(at, 9) == ring.continuation(at, 9)


def test_a_run_that_stood_a_whole_ring_ago_is_not_found_at_the_texts_own_end():
    index = Occurrences((1,), 64)
    index.extend([7, *range(100, 163), 7])
    assert [at for at in index.behind(1, 9) if index.matched(at, [7], 1)] == []


# --- the same checks find what is wrong -----------------------------------------------------


class FollowsWhatWasOverwritten(Occurrences):
    """A chain is followed without asking how old its positions are."""

    def _follow(self, chain, at, most, *_):
        for _ in range(most):
            if at < 0:
                return
            yield at
            at = chain.older[at]


class ForgetsWhatWasBefore(Occurrences):
    """Hashes of many tokens at once begin anew."""

    def _append_many(self, new):
        held, start = self.tokens[:], self.count
        self.tokens[:] = array("i", [SEPARATOR]) * self.capacity
        super()._append_many(new)
        for i in range(self.capacity - len(new)):
            at = (start + len(new) + i) & self._mask
            self.tokens[at] = held[at]


class LeavesOutTheNewest(Occurrences):
    """The newest place of a run is lost."""

    def _follow(self, *which):
        yield from list(super()._follow(*which))[1:]


@pytest.mark.parametrize(
    "kind", [FollowsWhatWasOverwritten, ForgetsWhatWasBefore, LeavesOutTheNewest]
)
def test_a_wrong_index_is_found_out(kind):
    with pytest.raises(AssertionError):
        check(0, 2, [300, 40, 150], kind)


def test_a_wrong_bulk_path_is_found_out():
    with pytest.raises(AssertionError):
        check_bulk(0, 3, [40, 100], ForgetsWhatWasBefore)


# --- matches and what follows them ----------------------------------------------------------


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 3), st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_matches_of_separated_texts_end_where_a_text_begins(seed, alphabet, sizes):
    """Also where the ring's oldest token lies behind its newest."""
    random, index, text = Random(seed), Occurrences(LENGTHS, 128), Tokens()
    for size in sizes:
        piece = [*(random.randrange(alphabet) for _ in range(size)), SEP]
        index.extend(piece)
        text += piece
    mask, first = index.capacity - 1, max(0, len(text) - index.capacity)
    tail = [random.randrange(alphabet) for _ in range(40)]
    for at in range(first, len(text)):
        n = index.matched(at & mask, tail, 30)
        assert n == min(at - first + 1, matched(text, at, tail, 30))
        assert SEP not in text[at - n + 1 : at + 1]
        assert index.matched(at & mask, tail, 2) == min(n, 2)
        most = random.randrange(20)
        assert index.continuation(at & mask, most) == followed(text, at, most)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 3), SIZES, st.integers(0, 70))
def test_a_text_that_grows_goes_on_to_repeat_itself(seed, alphabet, sizes, most):
    index, text = written(seed, alphabet, sizes, 100)
    for at in range(max(0, len(text) - index.capacity), len(text)):
        assert index.continuation(at & (index.capacity - 1), most) == followed(text, at, most)


def test_a_period_is_continued():
    index = Occurrences((1,), 64)
    index.extend([9, 1, 2, 3])
    assert index.continuation(0, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert index.continuation(2, 3) == [3, 3, 3]
    assert index.continuation(3, 3) == []  # nothing stands behind the end
    assert index.continuation(0, 0) == []


def test_nothing_is_continued_or_matched_across_a_separator():
    index = Occurrences((2, 1), 64)
    index.extend([1, 2, 3, SEP, 4, 5, SEP])
    assert index.continuation(0, 9) == [2, 3]
    assert index.continuation(2, 9) == []
    assert index.matched(4, [2, 3, 4], 9) == 1
    assert list(index.after([3, 4], 9)) == []


def test_the_capacity_is_rounded_up_and_costs_the_same_per_token():
    assert [Occurrences((1,), n).capacity for n in (1, 64, 65, 1000)] == [64, 64, 128, 1024]
    for lengths in ((1,), LENGTHS):
        for capacity in (64, 4096):
            index = Occurrences(lengths, capacity)
            assert index.bytes_per_token == 4 + 8 * len(lengths)
            index.extend(range(3 * capacity))
            assert index.bytes_per_token == 4 + 8 * len(lengths)
