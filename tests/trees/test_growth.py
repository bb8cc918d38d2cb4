"""Trees that grow level by level are those that grow node by node, and are read as they must be."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from growing import Path, grow, rank_paths, texts, trees
from outpace.errors import OptionError
from outpace.trees import (
    Children,
    DynamicBuilder,
    SequoiaBuilder,
    StaticBuilder,
    chain,
    cut,
    from_ranks,
    k_ary,
    static,
)
from outpace.trees.dynamic import DynamicGrowth
from outpace.types import Tree

# --- shapes that are known before -----------------------------------------------------------


def drawn(path: Path, rank: int, node: int) -> int:
    """A token that tells by what it was drawn: text, rank and noise."""
    return random.Random(f"{path} {rank} {node}").randrange(10**6)


def row(path: Path, rank: int) -> list[float]:
    """And the row that it was drawn from."""
    return [float(random.Random(str(path)).randrange(10**6)), float(rank)]


def behind(path: Path, width: int, nodes) -> Children:
    tokens = [drawn(path, rank, nodes[rank]) for rank in range(width)]
    return Children(torch.tensor(tokens), q=torch.tensor([row(path, r) for r in range(width)]))


def node_by_node(tree: Tree) -> tuple[list[int], list[list[float]]]:
    """The twin: each node for itself, behind its own parent."""
    tokens: list[int] = []
    rows: list[list[float]] = []
    for node, path in enumerate(rank_paths(tree)):
        above = texts(tree, tokens)
        parent = tree.parents[node]
        text = above[parent] if parent >= 0 else ()
        tokens.append(drawn(text, path[-1], node))
        rows.append(row(text, path[-1]))
    return tokens, rows


def assert_grows(builder, budgets, wanted: list[Tree], heat=1.0) -> None:
    growth = builder.begin(budgets, [heat] * len(budgets))
    grown = grow(growth, behind, len(budgets))
    assert grown.trees == tuple(wanted)
    for b, tree in enumerate(wanted):
        tokens, rows = node_by_node(tree)
        assert grown.tokens[b, : len(tree)].tolist() == tokens
        assert grown.q[b, : len(tree)].tolist() == rows
        leaves = set(range(len(tree))) - set(tree.parents)
        assert {n for n, place in enumerate(grown.rows[b]) if place < 0} == leaves


@given(trees(least=1), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_static_tree_grows_as_it_does_node_by_node(tree, budgets):
    """In any order, cut to ragged budgets."""
    assert_grows(StaticBuilder(tree), budgets, [cut(tree, budget) for budget in budgets])


@given(st.lists(trees(), min_size=2, max_size=2), st.lists(st.booleans(), min_size=1, max_size=4))
def test_trees_of_a_batch_may_differ(both, hot):
    builder = SequoiaBuilder()
    builder.trees = tuple(both)
    growth = builder.begin([9] * len(hot), [float(h) for h in hot])
    wanted = [both[h] for h in hot]
    if not any(map(len, wanted)):
        assert growth is None
        return
    grown = grow(growth, behind, len(hot))
    for b, tree in enumerate(wanted):
        assert grown.trees[b] == tree
        assert grown.tokens[b, : len(tree)].tolist() == node_by_node(tree)[0]


def test_chains_are_said_to_be_some():
    begin = StaticBuilder(from_ranks([[0, 0, 0], [1]])).begin
    assert begin([3, 2], [1.0, 1.0]).chains is None
    assert StaticBuilder(chain(3)).begin([3, 2], [1.0, 1.0]).chains == [3, 2]


def test_an_empty_tree_is_refused():
    with pytest.raises(OptionError, match="the tree has no nodes: plain decoding is without tree"):
        StaticBuilder(chain(0))


def test_sequoias_tree_must_have_been_measured():
    with pytest.raises(OptionError, match=r"not known yet: measure it by .*fit_tree"):
        SequoiaBuilder().begin([3], [0.0])


def mask_without_the_parent(honest):
    def mask(tree, place):
        seen = honest(tree, place).clone()
        for i, node in enumerate(place):
            if node < len(tree) and tree.parents[node] in place:
                seen[i, place.index(tree.parents[node])] = False
        return seen

    return mask


def mask_of_another_node(honest):
    return lambda tree, place: honest(tree, [*place[1:], *place[:1]])


def in_reverse(honest):
    """Children of a node in another order."""
    return lambda tree, nodes: [children[::-1] for children in honest(tree, nodes)]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_mask", mask_without_the_parent),
        ("_mask", mask_of_another_node),
        ("_children", in_reverse),
    ],
)
def test_a_plan_that_is_wrong_in_one_place_is_found(monkeypatch, name, broken):
    def run():
        static._plan.cache_clear()
        tree = k_ary([2, 2, 1])
        assert_grows(StaticBuilder(tree), [3, 2], [tree, cut(tree, 2)])

    run()
    monkeypatch.setattr(static, name, broken(getattr(static, name)))
    with pytest.raises(AssertionError):
        run()
    monkeypatch.undo()
    static._plan.cache_clear()


def test_noise_of_another_node_is_found(monkeypatch):
    """The control: every row draws with the noise of the first one's children."""
    honest = static.StaticGrowth.nodes.fget
    wrong = property(lambda self: honest(self)[:, :1].expand_as(honest(self)))
    monkeypatch.setattr(static.StaticGrowth, "nodes", wrong)
    with pytest.raises(AssertionError):
        assert_grows(StaticBuilder(k_ary([2, 2])), [2], [k_ary([2, 2])])


# --- shapes that follow the draft ------------------------------------------------------------

V = 4


@cache
def law(seed: int, kind: str):
    """The draft's row behind a text: smooth, or of small whole weights, so that there are ties and
    zeros, or often certain."""

    @cache
    def row(path: Path) -> tuple[float, ...]:
        source = random.Random(f"{seed} {path}")
        while True:
            weights = [
                {"smooth": source.random(), "tied": source.randint(0, 2)}.get(
                    kind, float(source.random() < 0.3)
                )
                for _ in range(V)
            ]
            if any(weights):
                return tuple(w / sum(weights) for w in weights)

    return row


def likeliest(row, width: int) -> list[int]:
    return sorted(range(V), key=lambda token: -row[token])[:width]


def likely(row):
    def behind(path: Path, width: int, nodes) -> Children:
        assert nodes is None
        tokens = likeliest(row(path), width)
        masses = [math.log(row(path)[t]) if row(path)[t] else -math.inf for t in tokens]
        return Children(torch.tensor(tokens), torch.tensor(masses, dtype=torch.float64))

    return behind


def worth(row, path: Path) -> float:
    return math.prod(row(path[:i])[token] for i, token in enumerate(path))


def re_ranked(row, budget, nodes, width, branches, gain=0.0) -> set[Path]:
    """The twin: EAGLE-2's expansion and re-ranking, OPT-Tree's end."""
    level, found, before = [()], [], 0.0
    for _ in range(budget):
        children = [(*p, t) for p in level for t in likeliest(row(p), branches)]
        found += children
        level = sorted(children, key=lambda p: -worth(row, p))[:width]
        best = sorted((worth(row, p) for p in found), reverse=True)
        expected = sum(best[:nodes])
        if gain and expected - before <= gain:
            break
        before = expected
    return {p for p in sorted(found, key=lambda p: -worth(row, p))[:nodes] if worth(row, p) > 0}


def kept(builder, row, budgets) -> list[set[Path]]:
    growth = builder.begin(budgets, [0.0] * len(budgets))
    grown = grow(growth, likely(row), len(budgets))
    assert grown.q is None
    found = [texts(t, grown.tokens[b].tolist()) for b, t in enumerate(grown.trees)]
    for paths, tree in zip(found, grown.trees, strict=True):
        assert len(set(paths)) == len(paths) == len(tree)
    return [set(paths) for paths in found]


sizes = {
    "nodes": st.integers(1, 9),
    "depth": st.integers(1, 4),
    "width": st.integers(1, 4),
    "branches": st.integers(1, V),
}
budgets_of = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(st.integers(0, 999), st.fixed_dictionaries(sizes), st.sampled_from([0.0, 0.3]), budgets_of)
def test_the_worthiest_nodes_stay(seed, options, gain, budgets):
    """Each sequence for itself, whatever budgets the others have."""
    row = law(seed, "smooth")
    found = kept(DynamicBuilder(**options, gain=gain), row, budgets)
    narrow = options["width"] if options["width"] <= options["nodes"] else options["nodes"]
    few = min(options["branches"], options["nodes"])
    for budget, paths in zip(budgets, found, strict=True):
        depth = min(budget, options["depth"])
        nodes = math.ceil(options["nodes"] * depth / options["depth"])
        assert paths == re_ranked(row, depth, nodes, narrow, few, gain)


@given(st.integers(0, 999), st.sampled_from(["tied", "certain"]), st.integers(1, 7), budgets_of)
def test_ancestors_stay_and_impossible_tokens_do_not(seed, kind, nodes, budgets):
    """Of equally worthy nodes any, but never one without what is before it."""
    row = law(seed, kind)
    for paths in kept(DynamicBuilder(nodes, 3, 4, V), row, budgets):
        assert paths
        assert all(worth(row, path) > 0 for path in paths)
        assert all(path[:-1] in paths for path in paths if len(path) > 1)


def subtrees(row, nodes: int, depth: int):
    """Every set of so many nodes that has all ancestors."""
    every = [p for d in range(1, depth + 1) for p in itertools.product(range(2), repeat=d)]
    for some in itertools.combinations(every, nodes):
        if all(len(p) == 1 or p[:-1] in some for p in some):
            yield some


@pytest.mark.parametrize("seed", range(6))
def test_they_have_the_largest_expected_length_of_all_trees(seed):
    source = law(seed, "smooth")

    def row(path):
        first, second = source(path)[:2]
        return (first / (first + second), second / (first + second), 0.0, 0.0)

    for nodes in (1, 3, 5):
        (found,) = kept(DynamicBuilder(nodes, 3, 9, V), row, [3])
        best = max(sum(worth(row, p) for p in some) for some in subtrees(row, nodes, 3))
        assert sum(worth(row, p) for p in found) == pytest.approx(best)


def test_a_sequence_that_gains_little_ends_and_the_others_go_on():
    """Whether one goes on must not follow from what others say, which knows of noise that it may
    be judged by."""
    flat = law(0, "smooth")
    builder = DynamicBuilder(6, 4, 4, 4, 0.6)
    (alone,) = kept(builder, flat, [4])
    rows = [flat, lambda path: (1.0, 0.0, 0.0, 0.0)]
    growth = builder.begin([4, 4], [0.0, 0.0])
    grown = grow(growth, [likely(row) for row in rows], 2)
    paths = [set(texts(t, grown.tokens[b].tolist())) for b, t in enumerate(grown.trees)]
    assert paths[0] == alone
    assert max(map(len, alone)) < 4 == max(map(len, paths[1]))


def test_rows_that_are_no_numbers_give_no_nodes():
    def broken(path: Path, width: int, nodes) -> Children:
        masses = [math.nan, 0.0, *[-1.0] * (width - 2)] if not path else [math.nan] * width
        return Children(torch.arange(width), torch.tensor(masses))

    growth = DynamicBuilder(5, 3, 3, 4).begin([3, 1], [0.0, 0.0])
    grown = grow(growth, broken, 2)
    assert [set(texts(t, grown.tokens[b].tolist())) for b, t in enumerate(grown.trees)] == [
        {(1,), (2,), (3,)},
        {(1,), (2,)},  # a third of the depth, and of the nodes
    ]


def test_what_is_more_than_certain_by_rounding_keeps_its_ancestors():
    def rounded(path: Path, width: int, nodes) -> Children:
        return Children(torch.arange(width), torch.tensor([1e-7, *[-0.1] * (width - 1)]))

    grown = grow(DynamicBuilder(2, 3, 2, 2).begin([3], [1.0]), rounded, 1)
    assert texts(grown.trees[0], grown.tokens[0].tolist()) == [(0,), (0, 0)]


class ByOwnMass(DynamicGrowth):
    """Ranks nodes by their own probability, whatever is before them."""

    def add(self, children):
        block = super().add(children)
        self._worth[-1] = children.masses.double().flatten(1)
        return block


class OfAnother(DynamicGrowth):
    """Takes the mask of a node for that of the next."""

    def _row_of(self, candidates):
        return super()._row_of(candidates).roll(1, 1)


class ReadsTheWorst(DynamicGrowth):
    """Goes on behind the least likely nodes."""

    def _block(self, best):
        last = sum(t.shape[1] for t in self._tokens) - 1
        first = last + 1 - self._tokens[-1].shape[1]
        return super()._block(first + last - best)


@pytest.mark.parametrize("broken", [ByOwnMass, OfAnother, ReadsTheWorst])
def test_a_growth_that_is_wrong_in_one_place_is_found(monkeypatch, broken):
    def run():
        for seed in range(8):
            row = law(seed, "smooth")
            found = kept(DynamicBuilder(6, 4, 3, 3), row, [4])
            assert found == [re_ranked(row, 4, 6, 3, 3)]

    run()
    monkeypatch.setattr("outpace.trees.dynamic.DynamicGrowth", broken)
    with pytest.raises((AssertionError, KeyError)):
        run()
