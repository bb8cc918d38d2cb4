"""Token recycling: the table holds what the target said last, and fills the likeliest tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins_of_text import (
    CYCLE,
    DOUBTFUL,
    TARGET,
    V,
    assert_as_plain,
    assert_as_plain_can_fail,
    assert_survives_a_failed_prefill,
    paths,
    proposed,
    ragged,
    started,
    texts,
)

from outpace.drafters import recycling
from outpace.drafters.base import Context
from outpace.drafters.recycling import WIDTH, RecyclingDrafter
from outpace.engine import Engine
from outpace.errors import OptionError
from outpace.models import MarkovModel

RATES = (0.5, 0.17, 0.09)
UNKNOWN = -1


def ranks(drafter: RecyclingDrafter, depth: int) -> list[tuple[int, ...]]:
    """For each node of the shape, which successors lead to it."""
    tree = drafter._shape(depth).tree
    siblings = [tree.parents[:i].count(parent) for i, parent in enumerate(tree.parents)]
    return paths(siblings, tree)


# --- the table ------------------------------------------------------------------------------


class Watched(RecyclingDrafter):
    """Says after every round what the table should hold: of a target of order 2."""

    rounds = 0

    def start(self, target, cache):
        super().start(target, cache)
        self._target, self._twin = target, self._table.tolist()

    def draft(self, contexts, budgets, warp, noise):
        draft = super().draft(contexts, budgets, warp, noise)
        self._drafted = {
            c.slot: (([0, *c.tokens])[-2:], draft.tokens[b].tolist(), draft.trees[b])
            for b, c in enumerate(contexts)
        }
        return draft

    def observe(self, commits):
        super().observe(commits)
        table = self._target.table
        for commit in commits:
            (before, root), tokens, tree = self._drafted[commit.slot]
            block, rows = [root, *tokens[: len(tree)]], [(before, root)]
            rows += [(block[p + 1], t) for p, t in zip(tree.parents, block[1:], strict=True)]
            assert list(commit.block) == block
            for previous, token in rows:
                best = table[previous, token].topk(min(WIDTH, len(table))).indices.tolist()
                self._twin[token][: len(best)] = best
        assert self._table.tolist() == self._twin
        self.rounds += 1


class KeepsTheFirst(Watched):
    """Of equal tokens in a block."""

    def observe(self, commits):
        super().observe(commits)
        for commit in commits:
            for token, row in reversed(list(zip(commit.block, commit.top, strict=True))):
                self._table[token, : len(row)] = row.numpy()
        assert self._table.tolist() == self._twin


class LearnsWhatWasAccepted(Watched):
    """Rejected rows are not looked at."""

    def observe(self, commits):
        before = self._table.copy()
        super().observe(commits)
        for commit in commits:
            kept = {commit.block[i] for i in (0, *(node + 1 for node in commit.path))}
            for token in set(commit.block) - kept:
                self._table[token] = before[token]
        assert self._table.tolist() == self._twin


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [V, 5])
def test_the_table_holds_what_the_target_said_last(temperature, vocab_size):
    """Behind accepted and rejected tokens of all requests; all there is of a small vocabulary."""
    drafter = Watched(nodes=12)
    engine = Engine(MarkovModel.random(vocab_size, 2, 1), drafter, 4)
    texts(engine, ragged(temperature, vocab_size))
    assert drafter.rounds > 10
    assert (drafter._table != UNKNOWN).any(1).all()
    assert (drafter._table[:, vocab_size:] == UNKNOWN).all()


@pytest.mark.parametrize("kind", [KeepsTheFirst, LearnsWhatWasAccepted])
def test_a_wrong_table_is_found_out(kind):
    with pytest.raises(AssertionError):
        texts(Engine(TARGET, kind(nodes=12), 4), ragged(1.0))


def test_a_new_engine_begins_with_an_empty_table():
    drafter = RecyclingDrafter(24)
    texts(Engine(TARGET, drafter, None), ragged(0.0))
    context = Context(0, [1], 1)
    assert proposed(drafter, context, 3)[0]
    started(drafter)
    assert proposed(drafter, context, 3)[0] == []


# --- the shape ------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 7, 24, 60])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_shape_has_the_nodes_that_are_reached_most_likely(nodes, depth):
    """No other set of so many has a likelier one."""

    def chances(some) -> list[float]:
        return sorted((math.prod(recycling._RATES[r] for r in path) for path in some), reverse=True)

    everything = [()]
    for _ in range(depth):
        everything += [(*path, r) for path in everything for r in range(WIDTH)]
    shape = ranks(RecyclingDrafter(nodes), depth)
    likeliest = chances(set(everything) - {()})[:nodes]
    assert len(set(shape)) == len(shape) == len(likeliest)
    assert chances(shape) == pytest.approx(likeliest)
    assert [round(rate, 2) for rate in recycling._RATES[:3]] == list(RATES)


@settings(max_examples=60)
@given(st.integers(1, 512), st.integers(0, 30))
def test_no_shape_is_larger_or_deeper_than_asked(nodes, depth):
    drafter = RecyclingDrafter(nodes)
    tree = drafter._shape(depth).tree
    assert len(tree) <= nodes
    assert tree.depth <= depth
    assert len(tree) == nodes or depth < 4
    assert max((r for path in ranks(drafter, depth) for r in path), default=0) < WIDTH


@pytest.mark.parametrize("nodes", [0, -1, 2.5, True])
def test_a_tree_without_nodes_is_refused(nodes):
    with pytest.raises(OptionError, match=f"nodes must be a whole number >= 1, not {nodes}"):
        RecyclingDrafter(nodes)


def test_a_tree_that_no_pass_takes_is_refused():
    with pytest.raises(OptionError, match=r"nodes=513 .* at most 512"):
        RecyclingDrafter(513)


# --- the tree -------------------------------------------------------------------------------


def twin(table: list[list[int]], shape: list[tuple[int, ...]], root: int) -> list[tuple[int, ...]]:
    """Paths that are known from the root to their end."""
    found = []
    for path in shape:
        tokens = [root]
        for rank in path:
            tokens.append(table[tokens[-1]][rank])
            if tokens[-1] == UNKNOWN:
                break
        else:
            found.append(tuple(tokens[1:]))
    return found


def check(seed: int, nodes: int, budget: int, known: float, kind=RecyclingDrafter) -> None:
    """A table of which a part is known."""
    random = np.random.default_rng(seed)
    drafter = started(kind(nodes))
    table = np.stack([random.permutation(V)[:WIDTH] for _ in range(V)])
    table[random.random(table.shape) > known] = UNKNOWN
    drafter._table[:] = table
    for root in range(V):
        drafted = paths(*proposed(drafter, Context(0, [3, root], 1), budget))
        assert drafted == twin(table.tolist(), ranks(drafter, budget), root)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_the_tree_is_filled_from_the_table(seed, nodes, budget, known):
    """What is not known is left out, and all behind it."""
    check(seed, nodes, budget, known)


class ReadsTheLastRow(RecyclingDrafter):
    """What follows an unknown token is what follows the last one of the vocabulary."""

    def _fill(self, shape, root):
        honest, self._table = self._table, np.where(self._table < 0, V - 1, self._table)
        try:
            return super()._fill(shape, root)
        finally:
            self._table = honest


class ForgetsRanks(RecyclingDrafter):
    """Siblings are in another order than their successors."""

    def _fill(self, shape, root):
        honest, self._table = self._table, self._table[:, ::-1].copy()
        try:
            return super()._fill(shape, root)
        finally:
            self._table = honest


@pytest.mark.parametrize("kind", [ReadsTheLastRow, ForgetsRanks])
def test_a_tree_that_is_filled_wrongly_is_found_out(kind):
    with pytest.raises(AssertionError):
        check(0, 24, 4, 0.8, kind)


# --- in an engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("nodes", [1, 24, 100])
def test_texts_are_those_of_plain_decoding(temperature, nodes):
    assert_as_plain(lambda: RecyclingDrafter(nodes), temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_smaller_than_the_table_is_wide(temperature):
    assert_as_plain(RecyclingDrafter, temperature, MarkovModel.random(5, 2, 0))


def test_other_draws_are_found_out():
    assert_as_plain_can_fail(RecyclingDrafter)


def test_near_ties_are_decided_as_plain_decoding_does():
    assert_as_plain(RecyclingDrafter, 0.0, DOUBTFUL)


def test_a_failed_prefill_is_survived():
    assert_survives_a_failed_prefill(RecyclingDrafter)


def test_what_the_target_said_of_one_text_helps_another():
    """Texts of a chain without memory: once every token has been seen, all is accepted."""
    drafter = RecyclingDrafter(24)
    engine = Engine(CYCLE, drafter, None)
    texts(engine, ragged(0.0)[-1:])
    known = torch.from_numpy(drafter._table[:, 0].astype(np.int64))
    assert torch.equal(known, CYCLE.table.argmax(-1))
    before = engine.stats.rounds
    ((prompt, params),) = ragged(0.0)[-1:]
    texts(engine, [(prompt[:1], params)])
    depth = drafter._shape(drafter.k).tree.depth
    assert engine.stats.rounds - before == -(-params.max_new_tokens // (depth + 1))


def test_where_rows_cost_time_the_tree_is_small():
    assert started(RecyclingDrafter())._nodes == 8
    assert started(RecyclingDrafter(30))._nodes == 30
