"""SuffixDecoding: the likeliest tree of continuations, of this text and of past outputs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import (
    CYCLE,
    DOUBTFUL,
    SEP,
    TARGET,
    Tokens,
    V,
    assert_as_plain,
    assert_as_plain_can_fail,
    assert_survives_a_failed_prefill,
    followed,
    matched,
    paths,
    proposed,
    ragged,
    started,
    texts,
)

from outpace import SamplingParams
from outpace.drafters.base import Context
from outpace.drafters.memory import LENGTHS, Memory
from outpace.drafters.suffix import SuffixDrafter
from outpace.engine import Engine
from outpace.errors import OptionError
from outpace.models import MarkovModel

Path = tuple[int, ...]


@dataclass
class Forest:
    """All continuations behind matches of n tokens and more, by what they are estimated at."""

    nodes: dict[Path, Fraction]
    most: int

    def total(self, some) -> Fraction:
        return sum((self.nodes[path] for path in some), Fraction(0))

    @property
    def best(self) -> Fraction:
        """The sum of the likeliest: what comes before a node is no less likely, so it is there."""
        return self.total(sorted(self.nodes, key=self.nodes.__getitem__)[-self.most :])

    def chains(self, path: Path = ()) -> list[list[Path]]:
        """What going down to the likeliest child may give, whichever of equal ones is taken."""
        below = [p for p in self.nodes if p[:-1] == path and len(p) <= self.most]
        likeliest = [p for p in below if self.nodes[p] == max(self.nodes[q] for q in below)]
        return [[p, *rest] for p in likeliest for rest in self.chains(p)] or [[]]


def forests(text: Tokens, past: Tokens, budget: int, nodes: int, factor: float, least: float):
    """One for each length of a match, in the text and in past outputs."""
    found = []
    for index in (text, past):
        lengths = [matched(index, at, text, 64) for at in range(len(index))]
        for n in {n for n in lengths if n}:
            places = [at for at in range(len(index)) if lengths[at] >= n]
            runs = [run for at in places if (run := followed(index, at, budget))]
            most = min(nodes, max(1, int(factor * n)))
            found.append(Forest(likely(runs, (), Fraction(1), least), most))
    return [forest for forest in found if forest.nodes]


def likely(
    runs: list[Tokens], path: Path, estimate: Fraction, least: float
) -> dict[Path, Fraction]:
    """Nodes behind a path, of outputs that go on there."""
    behind = [run for run in runs if len(run) > len(path)]
    nodes: dict[Path, Fraction] = {}
    for token in {run[len(path)] for run in behind}:
        some = [run for run in behind if run[len(path)] == token]
        part = estimate * len(some) / len(behind)
        if part >= least:
            nodes |= {(*path, token): part} | likely(some, (*path, token), part, least)
    return nodes


def check_tree(drafted: list[Path], trees: list[Forest]) -> None:
    """A draft is the likeliest part of one of the trees, and none has a likelier."""
    assert len(set(drafted)) == len(drafted)
    best = max((tree.best for tree in trees), default=0)
    for tree in trees:
        if len(drafted) <= tree.most and tree.nodes.keys() >= set(drafted):
            estimates = [tree.nodes[path] for path in drafted]
            if abs(sum(estimates) - best) < 1e-9 and estimates == sorted(estimates)[::-1]:
                return
    assert best == 0
    assert not drafted


def check_chain(drafted: list[Path], trees: list[Forest]) -> None:
    """The same where drafts may not branch."""
    sums = [tree.total(drafted) for tree in trees for chain in tree.chains() if chain == drafted]
    least = [min(tree.total(chain) for chain in tree.chains()) for tree in trees]
    assert max(sums, default=0) >= max(least, default=0) - 1e-9
    assert bool(sums) or not drafted


def check(
    seed: int, alphabet: int, budget: int, longest: int, kind=SuffixDrafter, **options
) -> None:
    """A text grows while others of some length end: drafts of it after every few tokens."""
    random, past, memory = Random(seed), Tokens(), Memory(64)
    drafter = started(kind(memory=memory, **options), V, 64)

    def some(most: int) -> Tokens:
        return [random.randrange(alphabet) for _ in range(random.randint(1, most))]

    context = Context(2, some(longest), 0)
    drafter.open(context)
    for _ in range(6):
        for other in (some(longest), some(longest), some(longest)):
            memory.add(other, 0)
            past = [*past, *other, SEP][-64:]
        text = list(context.tokens)
        sizes = {name: options[name] for name in ("nodes", "factor", "least")}
        trees = forests(text, past, budget, **sizes) if budget else []
        drafted = paths(*proposed(drafter, context, budget))
        (check_tree if options.get("branching", True) else check_chain)(drafted, trees)
        context.tokens.extend(some(6))


OPTIONS = {
    "nodes": st.integers(1, 12),
    "factor": st.sampled_from([0.3, 1.0, 2.0, 4.7]),
    "least": st.sampled_from([0.0713, 0.1517, 0.3171, 1.0]),  # no node is at the limit but at 1
    "branching": st.booleans(),
}


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from([4, 30]),
    st.fixed_dictionaries(OPTIONS),
)
def test_a_draft_is_the_likeliest_tree_of_continuations(seed, alphabet, budget, longest, options):
    check(seed, alphabet, budget, longest, **options)


class ForgetsThePast(SuffixDrafter):
    def _best(self, index, tail, budget, best):
        return best if index is self.memory.past else super()._best(index, tail, budget, best)


class ForgetsTheText(SuffixDrafter):
    def _best(self, index, tail, budget, best):
        return super()._best(index, tail, budget, best) if index is self.memory.past else best


class CountsNothing(SuffixDrafter):
    """Every continuation is as frequent as any other."""

    def _guess(self, followed, most):
        return super()._guess([list(run) for run in {tuple(run) for run in followed}], most)


class IgnoresTheMatch(SuffixDrafter):
    """Short matches draft as far as long ones."""

    def _guess(self, followed, most):
        return super()._guess(followed, self._nodes)


class TakesTheFirst(SuffixDrafter):
    """The longest match decides."""

    def _best(self, index, tail, budget, best):
        return best if best[0] else super()._best(index, tail, budget, best)


@pytest.mark.parametrize(
    "kind", [ForgetsThePast, ForgetsTheText, CountsNothing, IgnoresTheMatch, TakesTheFirst]
)
@pytest.mark.parametrize("branching", [True, False])
def test_a_wrong_tree_is_found_out(kind, branching):
    options = {"nodes": 8, "factor": 2.0, "least": 0.0713, "branching": branching}

    def several(kind):
        for seed in range(6):
            check(seed, 4, 3, 4 + 20 * (seed % 2), kind, **options)

    several(SuffixDrafter)
    with pytest.raises(AssertionError):
        several(kind)


# --- one by one -----------------------------------------------------------------------------


def drafted(outputs: list[Tokens], text: Tokens, budget: int = 4, **options) -> list[Path]:
    drafter = started(SuffixDrafter(**{"factor": 2.0, "branching": True} | options))
    for output in outputs:
        drafter.memory.add(output, 0)
    context = Context(0, text, len(text))
    drafter.open(context)
    return paths(*proposed(drafter, context, budget))


def test_a_long_match_drafts_far_and_a_short_one_hardly():
    output = list(range(1, 10))
    assert drafted([output], [1]) == [(2,), (2, 3)]
    assert drafted([output], [1, 2, 3], 9) == [tuple(range(4, 5 + i)) for i in range(6)]
    assert drafted([output], [1, 2, 3], 9, factor=0.1) == [(4,)]
    assert drafted([output], [1, 2, 3], 9, nodes=3) == [(4,), (4, 5), (4, 5, 6)]


def test_what_is_frequent_comes_first_and_what_is_rare_is_left_out():
    outputs = [[1, 2], [1, 3], [1, 3], [1, 4], *[[1, 3]] * 2]
    assert drafted(outputs, [1], factor=4) == [(3,), (4,), (2,)]
    assert drafted(outputs, [1], factor=4, least=0.2) == [(3,)]
    assert drafted(outputs, [1], factor=4, branching=False) == [(3,)]


def test_outputs_that_ended_do_not_count_against_what_followed():
    outputs = [[1, 2], [1, 2], [1, 2, 3]]
    assert drafted(outputs, [1], least=0.9) == [(2,), (2, 3)]


def test_of_equal_trees_the_texts_own_is_taken():
    assert drafted([[1, 6, 7, 8]], [1, 5, 1], 2, factor=4) == [(5,), (5, 1)]
    assert drafted([[5, 1, 6, 7]], [5, 1, 5, 1], 2, factor=4) == [(5,), (5, 1)]


@pytest.mark.parametrize(("newest", "expected"), [(64, {6}), (45, {5, 6})])
def test_only_the_newest_places_are_counted(newest, expected):
    outputs = [[1, 5]] * 100 + [[1, 6]] * newest
    assert {path[0] for path in drafted(outputs, [1])} == expected


def test_matches_longer_than_any_that_is_indexed_are_told_apart():
    """Both places match twelve tokens; one of them matches all twenty."""
    tail = [*range(12), 0, 2, 4, 6, 8, 10, 1, 3]
    assert len(tail) - 3 > LENGTHS[0]
    outputs = [[*tail, 7, 7, 7, 7], *[[9, *tail[3:], 5, 5, 5, 5]] * 5]
    assert drafted(outputs, tail)[0] == (7,)
    assert drafted(outputs, [0, *tail[3:]])[0] == (5,)


def test_an_output_is_drafted_from_when_it_is_complete():
    drafter = started(SuffixDrafter(factor=2.0, branching=True))
    first, second = Context(0, [1, 2], 2), Context(1, [1, 2], 2)
    drafter.open(first)
    first.tokens.extend([3, 4, 5])
    drafter.open(second)
    assert proposed(drafter, second, 3)[0] == []
    drafter.close(0)
    assert proposed(drafter, second, 3)[0] == [3, 4, 5]
    assert proposed(drafter, second, 0)[0] == []
    drafter.close(1)  # it has no output, and adds none
    assert drafter.memory.past.count == 6


def test_a_draft_waits_for_who_adds_to_the_memory():
    drafter = started(SuffixDrafter(factor=2.0, branching=True))
    context, found = Context(0, [1], 1), []
    drafter.open(context)
    thread = threading.Thread(target=lambda: found.append(proposed(drafter, context, 2)[0]))
    with drafter.memory.reading() as past:
        thread.start()
        thread.join(0.05)
        assert not found
        past.extend([1, 2, 3, SEP])
    thread.join()
    assert found == [[2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, r"nodes must be a whole number >= 1, not 0 \(of a tree\)"),
        ({"factor": 0}, r"factor must be above 0, not 0 \(nodes per matched token\)"),
        ({"factor": float("inf")}, "factor must be above 0, not inf"),
        ({"factor": float("nan")}, "factor must be above 0, not nan"),
        ({"least": 0.0}, r"least must be in \(0, 1\], not 0.0 \(a probability\)"),
        ({"least": 1.5}, r"least must be in \(0, 1\], not 1.5"),
        ({"capacity": 0}, "capacity must be a whole number >= 1, not 0"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        SuffixDrafter(**{"factor": 2.0, "branching": True} | options)


# --- in an engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [{}, {"branching": False}, {"nodes": 40, "factor": 9.0, "least": 0.01}]
)
def test_texts_are_those_of_plain_decoding(temperature, options):
    assert_as_plain(
        lambda: SuffixDrafter(**{"factor": 2.0, "branching": True} | options), temperature
    )


def test_other_draws_are_found_out():
    assert_as_plain_can_fail(SuffixDrafter)


def test_near_ties_are_decided_as_plain_decoding_does():
    assert_as_plain(SuffixDrafter, 0.0, DOUBTFUL)


def test_a_failed_prefill_is_survived():
    assert_survives_a_failed_prefill(SuffixDrafter)


WIDE = MarkovModel.random(60, 1, 0, sharpness=0.3)
HOT = SamplingParams(temperature=1.0, seed=5, max_new_tokens=60, eos_token_ids=())


def per_pass(engine: Engine, params: SamplingParams = HOT) -> float:
    """Tokens per pass of one request more."""
    before = engine.stats.rounds
    texts(engine, [([1, 2, 3], params)])
    return params.max_new_tokens / (engine.stats.rounds - before)


def test_the_same_request_again_is_drafted_from_what_it_gave_before():
    engine = Engine(WIDE, SuffixDrafter(), None)
    assert per_pass(engine) < 1.5
    assert per_pass(engine) > 4
    assert per_pass(engine, HOT.with_seed(6)) < 1.5


def test_engines_that_share_a_memory_learn_from_each_other():
    memory = Memory(1000)
    engines = [Engine(WIDE, SuffixDrafter(memory=memory), None) for _ in range(2)]
    assert per_pass(engines[0]) < 1.5
    assert per_pass(engines[1]) > 4
    assert per_pass(Engine(WIDE, SuffixDrafter(), None)) < 1.5
    with pytest.raises(OptionError, match="vocabulary of 60 tokens"):
        Engine(TARGET, SuffixDrafter(memory=memory))


def test_a_file_outlives_the_engine(tmp_path):
    file = str(tmp_path / "outputs")
    assert per_pass(Engine(WIDE, SuffixDrafter(file=file), None)) < 1.5
    assert per_pass(Engine(WIDE, SuffixDrafter(file=file), None)) > 4


def test_a_memory_that_is_too_small_forgets():
    engine = Engine(WIDE, SuffixDrafter(capacity=64), None)
    per_pass(engine)
    per_pass(engine, HOT.with_seed(6))
    assert per_pass(engine) < 1.5


def test_a_text_that_repeats_itself_is_drafted_far():
    engine = Engine(CYCLE, SuffixDrafter(), None)
    texts(engine, [([0], ragged(0.0)[-1][1])])
    assert engine.stats.tokens_per_pass > 2
