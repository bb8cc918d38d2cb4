"""The best tree: by enumeration of all trees, and by the recursion as it was published."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.errors import OptionError
from outpace.trees import (
    Costs,
    best_tree,
    chain,
    chances,
    choose,
    cut,
    expected_tokens,
    from_ranks,
    k_ary,
    ranks,
    widths,
)
from outpace.types import Tree

Rates = list[list[float]]
Solver = Callable[[Rates, int, int], tuple[Tree, float]]
NEAR = 1e-9


# --- twins -----------------------------------------------------------------------------------

Nested = tuple  # a node is the tuple of its children


@cache
def forests(nodes: int) -> tuple[Nested, ...]:
    """Every ordered forest of so many nodes."""
    if not nodes:
        return ((),)
    return tuple(
        (first, *others)
        for below in range(nodes)
        for first in forests(below)
        for others in forests(nodes - 1 - below)
    )


def paths_in(forest: Nested, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The ranks on the way to each node."""
    for rank, below in enumerate(forest):
        yield (*before, rank)
        yield from paths_in(below, (*before, rank))


@cache
def all_paths(nodes: int) -> list[list[tuple[int, ...]]]:
    return [list(paths_in(forest)) for forest in forests(nodes)]


def worth(paths: list[tuple[int, ...]], rates: Rates) -> float:
    """1 + the sum of products of rates on the way to each node; -inf if a rank has no rate."""
    total = 1.0
    for path in paths:
        rows = [rates[min(depth, len(rates) - 1)] for depth in range(len(path))]
        if any(rank >= len(row) for rank, row in zip(path, rows, strict=True)):
            return -math.inf
        total += math.prod(row[rank] for rank, row in zip(path, rows, strict=True))
    return total


def enumerated(rates: Rates, nodes: int, depth: int) -> tuple[int, float]:
    """Of all trees of a size, or of the next smaller one that fits, the most expected tokens."""
    for size in range(nodes, -1, -1):
        fitting = [p for p in all_paths(size) if max(map(len, p), default=0) <= depth]
        most = max((worth(paths, rates) for paths in fitting), default=-math.inf)
        if most > -math.inf:
            return size, most
    raise AssertionError


def published(rates: list[float], nodes: int, depth: int) -> float:
    """Sequoia's recursion as in the paper: T[m][l][b] of m nodes with the root, l levels with
    the root's, and b children of the root."""

    @cache
    def t(m: int, levels: int, b: int) -> float:
        if levels < 1 or m < 1 or (m == 1) != (b == 0):
            return -math.inf
        if b == 0:
            return 1.0
        if b == 1:
            below = best(m - 1, levels - 1)
            return 1 + rates[0] * below if below > -math.inf else below
        shares = [y for y in range(1, m) if best(m - y, levels - 1) > -math.inf]
        worths = (t(y, levels, b - 1) + rates[b - 1] * best(m - y, levels - 1) for y in shares)
        return max(worths, default=-math.inf)  # y: the root and its first b - 1 children

    @cache
    def best(m: int, levels: int) -> float:
        return max(t(m, levels, b) for b in range(len(rates) + 1))

    return best(nodes + 1, depth + 1)


def likeliest(rates: Rates, nodes: int, depth: int) -> float:
    """Where no rate rises with rank: the nodes of the largest products, one after another."""
    waiting = [(-rates[0][0], (0,))]
    total = 1.0
    for _ in range(nodes):
        chance, path = heapq.heappop(waiting)
        total -= chance
        row = rates[min(len(path), len(rates)) - 1]
        if path[-1] + 1 < len(row):
            sibling = chance / row[path[-1]] * row[path[-1] + 1]
            heapq.heappush(waiting, (sibling, (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            below = rates[min(len(path), len(rates) - 1)]
            heapq.heappush(waiting, (chance * below[0], (*path, 0)))
    return total


# --- rates -----------------------------------------------------------------------------------


@st.composite
def rate_rows(draw, most_rows=1, least_ranks=1):
    """Rows of rates that sum to 1 at most, in any order."""
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        parts = draw(st.lists(st.floats(0, 1), min_size=least_ranks, max_size=4))
        share = draw(st.floats(0, 1)) / max(sum(parts), 1e-3)
        rows.append([part * min(share, 1) for part in parts])
    return rows


def falling(seed: int, rows: int, count: int) -> Rates:
    """Rates that fall with rank."""
    source = random.Random(seed)
    found = []
    for _ in range(rows):
        parts = sorted((source.random() ** 3 + 1e-3 for _ in range(count)), reverse=True)
        found.append([0.9 * part / sum(parts) for part in parts])
    return found


# --- the best tree ---------------------------------------------------------------------------


def assert_best(solver: Solver, rates: Rates, nodes: int, depth: int) -> None:
    """The tree is one of its size and depth, is worth what it says, and none is worth more."""
    tree, tokens = solver(rates, nodes, depth)
    size, most = enumerated(rates, nodes, depth)
    assert len(tree) == size
    assert tree.depth <= depth
    assert tokens == pytest.approx(expected_tokens(tree, rates), abs=NEAR)
    assert tokens == pytest.approx(most, abs=NEAR)


@given(rate_rows(), st.integers(1, 7), st.integers(1, 7))
def test_it_is_the_best_of_all_trees(rates, nodes, depth):
    assert_best(best_tree, rates, nodes, depth)


@given(rate_rows(most_rows=4), st.integers(1, 7), st.integers(1, 7))
def test_it_is_the_best_where_rates_differ_by_depth(rates, nodes, depth):
    assert_best(best_tree, rates, nodes, depth)


@given(rate_rows(least_ranks=2), st.integers(1, 14), st.integers(1, 6))
def test_of_one_row_it_is_as_good_as_the_published_recursion(rates, nodes, depth):
    tree, tokens = best_tree(rates, nodes, depth)
    if len(tree) == nodes:
        assert tokens == pytest.approx(published(rates[0], nodes, depth), abs=NEAR)
    else:
        assert published(rates[0], nodes, depth) == -math.inf


@pytest.mark.parametrize(("nodes", "depth", "rows", "count"), [(64, 8, 1, 8), (256, 16, 5, 32)])
def test_large_trees_are_as_good_as_the_likeliest_nodes(nodes, depth, rows, count):
    for seed in range(3):
        rates = falling(seed, rows, count)
        tree, tokens = best_tree(rates, nodes, depth)
        assert len(tree) == nodes
        assert tokens == pytest.approx(likeliest(rates, nodes, depth))
        assert tokens == pytest.approx(expected_tokens(tree, rates))


def test_the_published_recursion_by_hand():
    assert published([0.5, 0.25], 1, 1) == 1.5
    assert published([0.5, 0.25], 2, 1) == 1.75
    assert published([0.5, 0.25], 3, 2) == 2.0  # two children, and one below the first
    assert published([0.5, 0.25], 3, 1) == -math.inf


EXAMPLES = [
    ([[0.6, 0.3]], 5, 2),
    ([[0.1, 0.6], [0.5, 0.4]], 6, 3),
    ([[0.4, 0.3, 0.2], [0.9], [0.1, 0.8]], 7, 3),
    ([[0.45, 0.45]], 4, 4),
]


def forgets_the_depth(rates, nodes, depth):
    return best_tree(rates, nodes, nodes)


def takes_them_as_conditional(rates, nodes, depth):
    """As if a child's rate were of the rounds in which no sibling before it was accepted."""
    rows = []
    for row in rates:
        left = list(itertools.accumulate((1 - rate for rate in row), lambda a, b: a * b))
        rows.append([rate * before for rate, before in zip(row, [1.0, *left], strict=False)])
    return best_tree(rows, nodes, depth)


def knows_the_roots_rates_alone(rates, nodes, depth):
    return best_tree(rates[:1], nodes, depth)


def skips_the_root(rates, nodes, depth):
    return best_tree(rates[1:] or rates, nodes, depth)


def is_greedy(rates, nodes, depth):
    """The likeliest nodes one by one, though rates may rise with rank."""
    tree = chain(0)
    for _ in range(nodes):
        paths = [list(path) for path in rank_paths(tree)]
        more = [p for p in leaves_to_add(paths, rates) if len(p) <= depth]
        if not more:
            break
        tree = from_ranks([*paths, max(more, key=lambda p: worth([tuple(p)], rates))])
    return tree, expected_tokens(tree, rates)


def rank_paths(tree: Tree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, ranks(tree), strict=True):
        found.append((*(() if parent < 0 else found[parent]), rank))
    return found


def leaves_to_add(paths: list[list[int]], rates: Rates) -> Iterator[list[int]]:
    for path in [[], *paths]:
        rank = sum(p[:-1] == path for p in paths)
        if rank < len(rates[min(len(path), len(rates) - 1)]):
            yield [*path, rank]


@pytest.mark.parametrize(("rates", "nodes", "depth"), EXAMPLES)
def test_the_examples(rates, nodes, depth):
    assert_best(best_tree, rates, nodes, depth)


@pytest.mark.parametrize(
    "broken",
    [
        forgets_the_depth,
        takes_them_as_conditional,
        knows_the_roots_rates_alone,
        skips_the_root,
        is_greedy,
    ],
)
def test_a_broken_one_is_found(broken):
    def all_pass() -> None:
        for example in EXAMPLES:
            assert_best(broken, *example)

    with pytest.raises(AssertionError):
        all_pass()


@given(rate_rows(most_rows=3, least_ranks=2), st.integers(1, 12), st.integers(1, 6))
def test_more_nodes_and_more_depth_are_never_worse(rates, nodes, depth):
    tokens = best_tree(rates, nodes, depth)[1]
    assert best_tree(rates, nodes + 1, depth)[1] >= tokens - NEAR
    assert best_tree(rates, nodes, depth + 1)[1] >= tokens - NEAR


@given(rate_rows(most_rows=3), st.integers(1, 20), st.integers(1, 6), st.integers(0, 6))
def test_it_is_numbered_level_by_level(rates, nodes, depth, at):
    tree, _ = best_tree(rates, nodes, depth)
    paths = rank_paths(tree)
    assert paths == sorted(paths, key=lambda path: (len(path), path))
    assert cut(tree, at).parents == tree.parents[: len(cut(tree, at))]


def test_a_draft_that_is_always_right_is_a_chain():
    assert best_tree([[1.0, 0.0, 0.0]], 5, 5) == (chain(5), 6.0)
    tree, tokens = best_tree([[1.0, 0.0, 0.0]], 8, 5)
    assert (len(tree), tokens) == (8, 6.0)
    assert best_tree([[1.0]], 8, 5) == (chain(5), 6.0)  # no more fit


def test_of_equals_the_first_children_have_more():
    assert best_tree([[0.5, 0.5]], 5, 2)[0] == from_ranks([[0, 0], [0, 1], [1, 0]])


def test_all_that_fits():
    assert best_tree([[0.3, 0.2], [0.4, 0.2, 0.1]], 512, 2)[0] == k_ary([2, 3])


def test_expected_tokens_by_hand():
    rates = [[0.5, 0.25], [0.4, 0.2]]
    tree = from_ranks([[0, 1, 0], [0, 0], [1]])
    assert chances(tree, rates) == pytest.approx([0.5, 0.25, 0.2, 0.1, 0.04])
    assert expected_tokens(tree, rates) == pytest.approx(2.09)
    assert expected_tokens(chain(0), rates) == 1


# --- costs and the choice --------------------------------------------------------------------

FLAT = Costs(draft={1: 0.1}, target={1: 1.0, 8: 1.1, 16: 2.0})


def test_costs_by_hand():
    costs = Costs(draft={2: 1.0, 4: 3.0}, target={1: 10.0, 11: 20.0, 21: 15.0})
    assert [costs.draft_seconds(rows) for rows in (1, 2, 3, 4, 6)] == [1, 1, 2, 3, 5]
    assert [costs.target_seconds(rows) for rows in (1, 6, 16, 21, 100)] == [10, 15, 17.5, 15, 15]
    tree = k_ary([3, 2, 1])  # the root, 3 nodes of depth 1, 6 of depth 2; 15 nodes
    assert costs.round_seconds(tree) == 1 + 2 + 5 + costs.target_seconds(16)
    assert costs.round_seconds(from_ranks([[0], [1, 0], [2]])) == 1 + 1 + costs.target_seconds(5)
    assert costs.round_seconds(chain(0)) == 10


def rate_of(tree: Tree, rates: Rates, costs: Costs) -> float:
    """Tokens per second over plain decoding's; draft passes by the definition."""
    inner = set(tree.parents)
    seconds = costs.target_seconds(len(tree) + 1)
    for depth in range(tree.depth):
        fed = [n for n in inner if (tree.depths[n] if n >= 0 else 0) == depth]
        seconds += costs.draft_seconds(len(fed))
    return expected_tokens(tree, rates) / seconds * costs.target_seconds(1)


def slow(points: list[float]) -> dict[int, float]:
    """Seconds that never fall, for rows 1, 2, 4, 8."""
    return dict(zip((1, 2, 4, 8), itertools.accumulate(points), strict=True))


SECONDS = st.lists(st.floats(0.01, 1), min_size=4, max_size=4)


@given(rate_rows(most_rows=2), SECONDS, st.floats(0, 0.5), st.integers(1, 6), st.integers(1, 6))
def test_with_one_price_of_draft_passes_it_is_the_best_of_all_trees(
    rates, target, draft, nodes, depth
):
    costs = Costs({1: draft}, slow(target))
    sizes = {n for n in (1, 2, 3, 4, 6) if n <= nodes} | {nodes}
    every = [
        from_ranks(paths)
        for most in range(1, depth + 1)
        for size in {enumerated(rates, size, most)[0] for size in sizes}
        for paths in all_paths(size)
        if max(map(len, paths)) <= most and worth(paths, rates) > -math.inf
    ]
    most = max([1.0, *(rate_of(tree, rates, costs) for tree in every)])
    found = choose(rates, costs, nodes, depth)
    assert found.speedup == pytest.approx(most)
    assert found.tokens == pytest.approx(expected_tokens(found.tree, rates))
    assert found.speedup == pytest.approx(rate_of(found.tree, rates, costs))
    assert len(found.tree) or found == (chain(0), 1, 1)


@given(rate_rows(most_rows=2), SECONDS, SECONDS, st.integers(1, 20), st.integers(1, 4))
def test_it_is_the_quickest_of_the_best_trees(rates, target, draft, nodes, depth):
    costs = Costs(slow(draft), slow(target))
    sizes = {n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= nodes} | {nodes}
    every = [best_tree(rates, n, d)[0] for n in sizes for d in range(1, depth + 1)]
    most = max([1.0, *(rate_of(tree, rates, costs) for tree in every)])
    assert choose(rates, costs, nodes, depth).speedup == pytest.approx(most)


def test_free_rows_take_the_whole_budget_and_dear_ones_none():
    rates = [[0.5, 0.2, 0.1]]
    free = Costs(draft={1: 0.0}, target={1: 1.0})
    assert choose(rates, free, 24, 8)[:2] == best_tree(rates, 24, 8)
    assert choose([[0.0]], free, 24, 8) == (chain(0), 1.0, 1.0)  # not better
    dear = Costs(draft={1: 1.0}, target={1: 1.0})
    assert choose(rates, dear, 24, 8) == (chain(0), 1.0, 1.0)
    steep = Costs(draft={1: 0.0}, target={1: 1.0, 2: 2.0})
    assert choose(rates, steep, 24, 8).tree is chain(0)


def test_a_size_that_is_given_is_the_only_one():
    rates = [[0.7, 0.2]]
    found = choose(rates, FLAT, 64, 6, nodes=5)
    assert len(found.tree) == 5
    assert found.speedup > 1
    assert found.speedup < choose(rates, FLAT, 64, 6).speedup
    slower = choose(rates, FLAT, 64, 6, nodes=64)
    assert len(slower.tree) == 64
    assert slower.speedup < 1  # it was asked for
    assert len(choose(rates, FLAT, 64, 2, nodes=64).tree) == 6  # no more fit


def test_dear_draft_passes_make_wide_trees_and_dear_rows_chains():
    rates = [[0.6, 0.2, 0.1, 0.05]]
    quick = choose(rates, Costs({1: 0.001}, {1: 1.0, 5: 1.02, 6: 9}), 16, 8)
    late = choose(rates, Costs({1: 0.3}, {1: 1.0, 5: 1.02, 6: 9}), 16, 8)
    assert len(widths(quick.tree)) > len(widths(late.tree)) >= 1


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([], "rates of a depth are missing"),
        ([[0.5], []], "rates of a depth are missing"),
        ([[0.5], [1.5]], "rates of depth 1 are not probabilities"),
        ([[-0.1]], "not probabilities"),
        ([[math.nan]], "not probabilities"),
        ([[0.8, 0.8]], "rates of depth 0 sum to 1.6: at most one child"),
        ([0.5, 0.2], "not rows of numbers"),
        ([["a"]], "not rows of numbers"),
    ],
)
def test_rates_that_cannot_be_are_refused(rates, message):
    calls = [
        lambda: best_tree(rates, 4, 2),
        lambda: expected_tokens(chain(1), rates),
        lambda: choose(rates, FLAT, 4, 2),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=message):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_tree([[0.5]], 0, 2), "nodes must be a whole number >= 1"),
        (lambda: best_tree([[0.5]], 513, 2), "at most 512"),
        (lambda: best_tree([[0.5]], 5, 0), "depth must be a whole number >= 1"),
        (lambda: choose([[0.5]], FLAT, 513, 2), "at most 512"),
        (lambda: choose([[0.5]], FLAT, 8, 0), "depth must be a whole number >= 1"),
        (lambda: choose([[0.5]], FLAT, 8, 2, nodes=9), "nodes=9 is more than most_nodes=8"),
        (lambda: choose([[0.5]], FLAT, 8, 2, nodes=0), "nodes must be a whole number"),
        (lambda: expected_tokens(k_ary([3]), [[0.5, 0.2]]), "3 children of one node at depth 1"),
        (lambda: Costs({}, {1: 1.0}), "no draft pass was measured"),
        (lambda: Costs({1: 1.0}, {}), "no target pass was measured"),
        (lambda: Costs({0: 1.0}, {1: 1.0}), "rows of a draft pass must be a whole number >= 1"),
        (lambda: Costs({1: -1.0}, {1: 1.0}), "a draft pass of 1 rows cannot take -1.0 seconds"),
        (lambda: Costs({1: 1.0}, {4: math.inf}), "a target pass of 4 rows cannot take inf"),
        (lambda: Costs({1: 1.0}, {4: 0.0}), "a target pass takes no time"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(OptionError, match=message):
        call()
