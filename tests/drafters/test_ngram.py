"""Prompt lookup: the longest run first, its most recent place first, nothing on a miss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import (
    CYCLE,
    DOUBTFUL,
    V,
    assert_as_plain,
    assert_as_plain_can_fail,
    assert_survives_a_failed_prefill,
    begins,
    ends,
    followed,
    paths,
    proposed,
    ragged,
    started,
    texts,
)

from outpace.drafters.base import Context
from outpace.drafters.ngram import NgramDrafter
from outpace.engine import Engine
from outpace.errors import OptionError
from outpace.types import Shape

PLACES = 32


def twin(text: list[int], longest: int, branches: int, budget: int) -> list[list[int]]:
    """Distinct continuations of the longest run that stood before, the most recent first."""
    for n in range(min(longest, len(text)), 0, -1):
        found: list[list[int]] = []
        for at in ends(text, text[-n:])[1 : 1 + PLACES]:
            tokens = followed(text, at, budget)
            if tokens and tokens not in found:
                found.append(tokens)
        if found:
            return found[:branches]
    return []


def check(text: list[int], prompt: int, longest: int, branches: int, budget: int, kind) -> None:
    """Drafts behind a prompt and while a text grows, by one token and by several."""
    drafter = started(kind(longest, branches), max_len=64)  # where many hashes are equal
    context = Context(3, text[:prompt], prompt)
    drafter.open(context)
    while True:
        drafted = paths(*proposed(drafter, context, budget))
        expected = twin(list(context.tokens), longest, branches, budget)
        assert set(drafted) == begins(expected)
        assert len(drafted) == len(set(drafted))
        if expected:
            assert list(drafted[budget - 1]) == expected[0]  # it comes first
        if len(context.tokens) == len(text):
            break
        context.tokens.extend(text[len(context.tokens) :][: 1 + len(context.tokens) % 3])
    drafter.close(3)


TEXTS = st.sampled_from([1, 2, 4, V]).flatmap(
    lambda n: st.lists(st.integers(0, n - 1), min_size=1, max_size=PLACES + 1)
)


@settings(max_examples=150)
@given(TEXTS, st.integers(1, PLACES + 1), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_a_draft_is_what_followed_the_longest_run(text, prompt, longest, branches, budget):
    check(text, min(prompt, len(text)), longest, branches, budget, NgramDrafter)


class ShortestFirst(NgramDrafter):
    def __init__(self, longest, branches):
        super().__init__(longest, branches)
        self._lengths = range(1, longest + 1)


class FirstPlaceOnly(NgramDrafter):
    """Branches are forgotten."""

    def __init__(self, longest, branches):
        super().__init__(longest, 1)


class TakesEveryHash(NgramDrafter):
    """What is found is not compared."""

    def open(self, context, features=()):
        super().open(context)
        self._texts[context.slot].matched = lambda at, text, most: most


class ReadsNoFurther(NgramDrafter):
    """What was emitted is not looked up."""

    def draft(self, contexts, budgets, warp, noise):
        known = [
            Context(c.slot, c.tokens[: self._texts[c.slot].count], c.prompt_length)
            for c in contexts
        ]
        return super().draft(known, budgets, warp, noise)


@pytest.mark.parametrize("kind", [ShortestFirst, FirstPlaceOnly, TakesEveryHash, ReadsNoFurther])
def test_a_wrong_lookup_is_found_out(kind):
    text = [1, 2, 0, 3, 2, 1, 0, 1, 2, 3, 0, 2, 1, 2, *range(V), 5, 2, 7, 2]
    check(text, 5, 3, 2, 4, NgramDrafter)
    with pytest.raises(AssertionError):
        check(text, 5, 3, 2, 4, kind)


def drafted(text: list[int], budget: int = 3, **options) -> list[tuple[int, ...]]:
    drafter = started(NgramDrafter(**{"branches": 2} | options))
    context = Context(0, text, len(text))
    drafter.open(context)
    return paths(*proposed(drafter, context, budget))


def test_the_longest_run_decides_and_the_most_recent_place_comes_first():
    text = [1, 2, 3, 7, 7, 9, 3, 8, 8, 8, 1, 2, 3]
    assert drafted(text, longest=3)[-1] == (7, 7, 9)
    assert drafted(text, longest=1) == [(8,), (8, 8), (8, 8, 8), (7,), (7, 7), (7, 7, 9)]
    assert drafted(text, longest=1, branches=1) == [(8,), (8, 8), (8, 8, 8)]


def test_equal_beginnings_are_one():
    text = [3, 1, 2, 5, 0, 3, 1, 4, 5, 0, 3]
    assert drafted(text, longest=1) == [(1,), (1, 4), (1, 4, 5), (1, 2), (1, 2, 5)]


def test_nothing_is_proposed_on_a_miss_or_without_budget():
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1]) == []
    assert drafted([1, 2, 1, 2], budget=0) == []
    assert drafted([1, 2, 1, 2], budget=1) == [(1,)]


@pytest.mark.parametrize(("ago", "expected"), [(20, {5, 6}), (40, {6})])
def test_places_long_ago_are_not_looked_at(ago, expected):
    text = [0, 5, *[0, 6] * ago, 0]
    assert {path[0] for path in drafted(text, 1, longest=1)} == expected


def test_branches_make_a_tree_and_one_branch_a_chain():
    assert NgramDrafter(branches=2).proposes is Shape.TREE
    assert NgramDrafter().proposes is Shape.CHAIN


@pytest.mark.parametrize("name", ["longest", "branches"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "2", True])
def test_an_option_that_cannot_be_is_refused(name, value):
    with pytest.raises(OptionError, match=f"{name} must be a whole number >= 1, not {value!r}"):
        NgramDrafter(**{name: value})


# --- in an engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"longest": 1, "branches": 5}, {"branches": 1}])
def test_texts_are_those_of_plain_decoding(temperature, options):
    assert_as_plain(lambda: NgramDrafter(**{"branches": 2} | options), temperature)


def test_other_draws_are_found_out():
    assert_as_plain_can_fail(NgramDrafter)


def test_near_ties_are_decided_as_plain_decoding_does():
    assert_as_plain(NgramDrafter, 0.0, DOUBTFUL)


def test_a_text_that_repeats_itself_is_drafted_to_its_end():
    engine = Engine(CYCLE, NgramDrafter(), 8)
    texts(engine, [([start], ragged(0.0)[-1][1]) for start in (0, 5)])
    assert engine.stats.tokens_per_pass > 2
    assert set(engine.stats.alpha) == {1.0}


def test_a_slot_is_used_again():
    """Nothing of an earlier text is proposed to a later one."""
    drafter = started(NgramDrafter())
    for text, expected in (([1, 2, 3, 1], [2, 3, 1]), ([4, 5, 1], []), ([4, 5, 4], [5, 4, 5])):
        context = Context(0, text, len(text))
        drafter.open(context)
        assert proposed(drafter, context, 3)[0] == expected
        drafter.close(0)


def test_a_failed_prefill_is_survived():
    assert_survives_a_failed_prefill(NgramDrafter)
