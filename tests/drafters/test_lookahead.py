"""Lookahead: windows whose guesses stay at their places, pools of what target and text said."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import (
    CYCLE,
    DOUBTFUL,
    TARGET,
    assert_as_plain,
    assert_as_plain_can_fail,
    assert_survives_a_failed_prefill,
    paths,
    proposed,
    ragged,
    texts,
)

from outpace import SamplingParams
from outpace.drafters import lookahead
from outpace.drafters.base import Context
from outpace.drafters.lookahead import LookaheadDrafter
from outpace.engine import Engine
from outpace.errors import OptionError
from outpace.models import MarkovModel

Gram = tuple[int, ...]
FIRST_ORDER = MarkovModel.random(40, 1, 0)
BEST = FIRST_ORDER.table.argmax(-1).tolist()


def window(rows: list[list[int]], columns: int) -> list[Gram]:
    """Paths to the guesses, level by level: up to a column, then its own levels."""
    return [
        (*rows[0][1 : column + 1], *(row[column] for row in rows[1 : level + 1]))
        for level in range(len(rows))
        for column in range(columns)
        if level or column
    ]


class Checked(lookahead._State):
    """A state that compares itself with a twin in plain lists after every call.

    Attributes:
        written: n-grams from windows, and whether every round until then emitted one token.
            Each has its key before it, but those of the first column, whose key is the root.
    """

    def __init__(self, context, n, window, guesses):
        self.pool: dict[int, list[Gram]] = {}
        self.of_text: list[Gram] = []
        self.written: list[tuple[Gram, bool]] = []
        self.slow, self.learning, self.proposals, self.answers = True, False, 0, []
        super().__init__(context, n, window, guesses)

    def propose(self, budget):
        tokens, tree = super().propose(budget)
        self.proposals += 1
        text, n = self._context.tokens, self._levels + 1
        assert self.of_text == [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        self._compare()
        grams = [gram[:budget] for gram in reversed(self.pool.get(text[-1], []))]
        beginnings = dict.fromkeys(gram[: i + 1] for gram in grams for i in range(len(gram)))
        columns = min(self._window, budget - self._levels + 2) if budget >= n - 1 else 0
        expected = [*beginnings, *window([list(row) for row in self._rows], columns)]
        assert paths(tokens, tree) == expected
        assert tree.depth <= budget
        self._columns = columns
        return tokens, tree

    def learn(self, commit):
        root, emitted = self._seen - 1, len(self._context.tokens) - self._seen
        guessed: dict[int, set[int]] = {}
        for level, row in enumerate(self._rows):
            for column, token in enumerate(row):
                guessed.setdefault(root + level + column, set()).add(token)
        columns = self._columns if len(commit.block) > 1 else 0
        for column in range(columns):
            row = len(commit.block) - columns + column
            guessed.setdefault(root + self._levels + column, set()).add(int(commit.top[row, 0]))
        self.learning, self.column, self.root = True, 0, commit.block[:1]
        self.slow = self.slow and emitted == 1
        super().learn(commit)
        self.learning = False
        self._compare()
        kept = columns - max(emitted, 1) + 1 if columns else self._window - emitted
        for level, row in enumerate(self._rows):
            assert len(row) == self._window
            for column in range(kept):
                assert row[column] in guessed[root + emitted + level + column]

    def _add(self, key, gram):
        assert len(gram) == self._levels
        if self.learning:
            assert self.column or [key] == self.root
            self.written.append(((key, *gram) if self.column else gram, self.slow))
            self.column += 1
        else:
            self.of_text.append((key, *gram))
        known = [g for g in self.pool.get(key, []) if g != gram]
        self.pool[key] = [*known, gram][-self._guesses :]
        super()._add(key, gram)

    def _compare(self):
        assert {key: list(grams) for key, grams in self._pool.items()} == self.pool
        assert all(len(grams) <= self._guesses for grams in self._pool.values())


@pytest.fixture
def states(monkeypatch):
    """Puts a kind of state into drafters, and lists all there were."""
    made: list[Checked] = []

    def use(kind):
        def make(*args):
            made.append(kind(*args))
            return made[-1]

        monkeypatch.setattr(lookahead, "_State", make)
        return made

    return use


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("target", [TARGET, CYCLE, FIRST_ORDER], ids=["second", "cycle", "first"])
@pytest.mark.parametrize("sizes", [(5, 7, 7), (3, 1, 1), (4, 3, 2)], ids=str)
def test_windows_and_pools_are_what_they_should_be(states, target, sizes, temperature):
    """What is proposed, where guesses stand, and what n-grams are kept, in a ragged batch."""
    made = states(Checked)
    for k in (None, sizes[0] - 1):
        texts(Engine(target, LookaheadDrafter(*sizes), k), ragged(temperature, target.vocab_size))
    assert len(made) == 16
    assert sum(state.proposals for state in made) > 100
    assert any(state.written for state in made)


class KeepsAll(Checked):
    """No n-gram is dropped."""

    def _add(self, key, gram):
        before = list(self._pool.get(key, ()))
        super()._add(key, gram)
        self._pool[key].update(dict.fromkeys(before))


class StandsStill(Checked):
    """Columns stay where they are, however many tokens were emitted."""

    def _move(self, emitted, answers):
        super()._move(min(emitted, 1), answers)


class ForgetsThePrompt(Checked):
    def _learn_text(self):
        self._learned = max(self._learned, self._context.prompt_length)
        super()._learn_text()


class OldestFirst(Checked):
    """Of the pool's n-grams."""

    def _grams(self, budget):
        return super()._grams(budget)[::-1]


class IgnoresTheBudget(Checked):
    def _grams(self, budget):
        return super()._grams(99)


@pytest.mark.parametrize(
    "kind", [KeepsAll, StandsStill, ForgetsThePrompt, OldestFirst, IgnoresTheBudget]
)
def test_a_wrong_window_or_pool_is_found_out(states, kind):
    states(kind)
    with pytest.raises(AssertionError):
        texts(Engine(TARGET, LookaheadDrafter(4, 5, 2), None), ragged(0.0))


# --- what the window writes -----------------------------------------------------------------


def grams(states, temperature: float, n: int = 5) -> list[tuple[Gram, bool]]:
    made = states(Checked)
    texts(Engine(FIRST_ORDER, LookaheadDrafter(n, 7, 7), None), ragged(temperature, 40))
    return [gram for state in made for gram in state.written]


def is_said(gram: Gram) -> bool:
    """Whether each token is the target's likeliest behind the one before."""
    return all(BEST[a] == b for a, b in pairwise(gram))


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_n_gram_ends_with_what_the_target_says(states, temperature, n):
    written = grams(states, temperature, n)
    assert len(written) > 200
    assert all(BEST[gram[-2]] == gram[-1] for gram, _ in written)


def test_an_n_gram_is_what_the_target_says_throughout(states):
    """As long as rounds emit one token each."""
    written = [gram for gram, slow in grams(states, 1.0) if slow]
    assert len(written) > 200
    assert all(is_said(gram) for gram in written)


class TurnsRound(Checked):
    """N-grams from windows are written backwards."""

    def _add(self, key, gram):
        super()._add(key, gram[::-1] if self.learning else gram)


def test_what_the_target_does_not_say_is_found_out(states):
    made = states(TurnsRound)
    texts(Engine(FIRST_ORDER, LookaheadDrafter(5, 7, 7), None), ragged(1.0, 40))
    assert not all(is_said(gram) for state in made for gram, slow in state.written if slow)


def test_an_n_gram_is_what_the_target_says_whatever_was_emitted(states):
    assert all(is_said(gram) for gram, _ in grams(states, 0.0))


def test_guesses_stay_at_their_places_when_nothing_is_emitted(states):
    states(Checked)
    texts(Engine(DOUBTFUL, LookaheadDrafter(5, 7, 7), None), ragged(0.0))


# --- one by one -----------------------------------------------------------------------------


def drafted(tokens: list[int], budget: int, **options) -> list[Gram]:
    drafter = LookaheadDrafter(**{"n": 5, "window": 7, "guesses": 7} | options)
    context = Context(0, tokens, len(tokens))
    drafter.open(context)
    return paths(*proposed(drafter, context, budget))


def test_what_the_prompt_says_is_drafted():
    prompt = [1, 2, 3, 4, 5, 6, 1, 7, 8, 9, 10, 6, 1]
    expected = [(7,), (7, 8), (7, 8, 9), (2,), (2, 3), (2, 3, 4)]
    assert drafted(prompt, 3) == expected
    assert drafted(prompt, 3, guesses=1) == expected[:3]
    assert drafted(prompt, 2) == [(7,), (7, 8), (2,), (2, 3)]
    assert drafted(prompt, 1) == [(7,), (2,)]
    assert drafted(prompt, 0) == []
    assert drafted([11], 3) == drafted([1, 2, 3, 4, 5], 3) == []


@settings(max_examples=60)
@given(st.integers(3, 8), st.integers(1, 9), st.integers(0, 20))
def test_a_window_is_as_wide_as_the_budget_lets_it(n, columns, budget):
    """With the drafter's own K it is whole."""
    drafts = drafted([3], budget, n=n, window=columns)
    depth = max(map(len, drafts), default=0)
    assert depth == (min(budget, columns + n - 3) if budget >= n - 1 else 0)
    whole = drafted([3], LookaheadDrafter(n, columns).k, n=n, window=columns)
    assert len(whole) == columns * (n - 1) - 1


def test_a_pool_has_a_bound(monkeypatch):
    monkeypatch.setattr(lookahead, "_KEYS", 5)
    state = lookahead._State(Context(0, list(range(30)), 30), 3, 2, 2)
    state.propose(2)
    assert len(state._pool) == 5
    assert list(state._pool)[-1] == 27  # the last one with two tokens behind it


@pytest.mark.parametrize(("name", "least"), [("n", 3), ("window", 1), ("guesses", 1)])
def test_an_option_that_cannot_be_is_refused(name, least):
    for value in (least - 1, -1, 3.5, True):
        with pytest.raises(OptionError, match=f"{name} must be a whole number >= {least}, not"):
            LookaheadDrafter(**{name: value})


# --- in an engine ---------------------------------------------------------------------------


def test_k_is_as_deep_as_what_the_target_is_drafted_for():
    """On a CPU, where less is proposed."""
    for k in (None, "auto"):
        assert Engine(MarkovModel.random(4, 1, 0), LookaheadDrafter(), k).k == 2
        assert Engine(MarkovModel.random(4, 1, 0), LookaheadDrafter(6), k).k == 5
    assert Engine(MarkovModel.random(4, 1, 0), LookaheadDrafter(), 7).k == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [(5, 7, 7), (3, 1, 1), (4, 12, 2)], ids=str)
def test_texts_are_those_of_plain_decoding(temperature, sizes):
    assert_as_plain(lambda: LookaheadDrafter(*sizes), temperature)


def test_other_draws_are_found_out():
    assert_as_plain_can_fail(LookaheadDrafter)


def test_near_ties_are_decided_as_plain_decoding_does():
    assert_as_plain(LookaheadDrafter, 0.0, DOUBTFUL)


def test_a_failed_prefill_is_survived():
    assert_survives_a_failed_prefill(LookaheadDrafter)


def test_a_text_that_repeats_itself_is_drafted_far():
    params = SamplingParams(max_new_tokens=60, eos_token_ids=())
    fresh, known = (
        Engine(CYCLE, LookaheadDrafter(5, 7, 7), None),
        Engine(CYCLE, LookaheadDrafter(5, 7, 7), None),
    )
    (cycle,) = texts(fresh, [([0], params)])
    assert fresh.stats.tokens_per_pass > 2
    texts(known, [(cycle, params)])
    assert known.stats.tokens_per_pass > 4
    assert known.stats.alpha[0] > 0.9
