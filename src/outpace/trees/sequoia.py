"""Sequoia: the tree that promises most tokens, and the one that promises most tokens per second.

Chen et al., "Sequoia: scalable and robust speculative decoding", 2024. Whether a node is
accepted, given that its parent is, depends on which child it is (the paper's positional
acceptance); so a tree's expected tokens are 1 + the sum over its nodes of the product of the
rates on the way, and a dynamic programme finds the best tree of a size and a depth.

Where we deviate: rates may differ by depth, too; sizes count nodes without the root; and the
programme goes over children from the last rank to the first (the best forest of m nodes below
the children from rank b on) where the paper fixes how many children the root has. Therefore one
table per depth holds the best trees of all sizes. Where rates never rise with rank, the m nodes
of the largest products are as good; measured rates may.

Rates: `rates[d][b]` is the probability that of the children of an accepted node at depth d (0 is
the root) the one of rank b is accepted. It is marginal: siblings exclude each other, so that a
row sums to 1 at most. Below the last row that row holds. No child has a rank beyond its row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..types import Tree, check_whole_number
from .times import along, check_points
from .topology import chain, check_nodes, ranks, tree_of

Rates = Sequence[Sequence[float]]
_Floats = NDArray[np.float64]

_ROUNDING = 1e-6
"""By which a row's sum may exceed 1."""


def chances(tree: Tree, rates: Rates) -> tuple[float, ...]:
    """Each node's probability to be accepted: the product of the rates on the way.

    Raises:
        OptionError: rates are not probabilities, or a node has a rank that they do not have.
    """
    rows = _checked(rates)
    found: list[float] = []
    for parent, depth, rank in zip(tree.parents, tree.depths, ranks(tree), strict=True):
        row = rows[min(depth, len(rows)) - 1]
        if rank >= len(row):
            raise OptionError(
                f"the tree has {rank + 1} children of one node at depth {depth}, and there are "
                f"rates of {len(row)}: give more rates, or a narrower tree"
            )
        found.append(row[rank] * (1.0 if parent < 0 else found[parent]))
    return tuple(found)


def expected_tokens(tree: Tree, rates: Rates) -> float:
    """What a round with this tree emits on average, the target's own token included.

    Raises:
        OptionError: as in `chances`.
    """
    return 1 + math.fsum(chances(tree, rates))


def best_tree(rates: Rates, nodes: int, depth: int) -> tuple[Tree, float]:
    """The tree of most expected tokens, of a size and at most a depth, and how many they are.

    It is numbered level by level. It has fewer nodes only if there is no room for more: rates
    have finitely many ranks. Of equally good trees the one whose first children have more.

    With D the depth, R the most ranks and N the nodes it takes O(D R N²) steps, vectorised,
    and O(D R N) memory.

    Raises:
        OptionError: rates are not probabilities, or nodes or depth cannot be.
    """
    check_nodes(nodes)
    depth = _checked_depth(depth)
    return _Tables(_checked(rates), nodes).best(nodes, depth)


@dataclass(frozen=True)
class Costs:
    """What passes cost, as measured: seconds by rows.

    Between measured points they are interpolated; beyond the last they go on as between the
    last two (but never fall), and below the first they are the first's.

    Attributes:
        draft: a draft pass over so many rows of one level.
        target: a target pass over so many rows, the root's included.
        step: a step of a chain, where that is not what a draft pass over one row costs.

    Raises:
        OptionError: there are no points, or they are not rows and seconds.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]
    step: float | None = None

    def __post_init__(self) -> None:
        check_points("draft", self.draft)
        check_points("target", self.target)
        if not all(self.target.values()):
            raise OptionError("a target pass takes no time: give measured seconds")

    def draft_seconds(self, rows: int) -> float:
        return along(self.draft, rows)

    def target_seconds(self, rows: int) -> float:
        return along(self.target, rows)

    def round_seconds(self, tree: Tree) -> float:
        """A draft pass per level, over the nodes that have children, and the target's pass.

        The first feeds the root, and the one of depth d the inner nodes of depth d.
        """
        if tree.is_chain and self.step is not None:
            return self.step * len(tree) + self.target_seconds(len(tree) + 1)
        inner = Counter(tree.depths[node] if node >= 0 else 0 for node in set(tree.parents))
        drafting = sum(self.draft_seconds(rows) for rows in inner.values())
        return drafting + self.target_seconds(len(tree) + 1)


class Choice(NamedTuple):
    """A tree, its expected tokens per round, and what it promises over plain decoding.

    Attributes:
        speedup: expected tokens per second ÷ plain decoding's.
    """

    tree: Tree
    tokens: float
    speedup: float


def choose(
    rates: Rates,
    costs: Costs,
    most_nodes: int,
    most_depth: int,
    nodes: int | None = None,
) -> Choice:
    """The tree that promises most tokens per second; the empty one if none beats plain decoding.

    Of a given size it is the best one, whether it beats plain decoding or not.

    As in the paper, the best tree of every size and depth is found first, and then the sizes
    and depths are compared by time. So where a draft pass costs more with more rows, a tree
    of fewer tokens but fewer inner nodes may be missed. Sizes are 1, 2, 3, 4, 6, 8, 12, 16, ...
    and the largest.

    With D depths, S rows of rates, R ranks and N nodes it takes O(min(S, D) D R N²) steps.

    Args:
        most_nodes, most_depth: bounds of the tree.
        nodes: the only size to look at, or as many of them as fit.

    Raises:
        OptionError: rates are not probabilities, or a bound cannot be.
    """
    check_nodes(most_nodes)
    most_depth = _checked_depth(most_depth)
    sizes = _sizes(most_nodes) if nodes is None else (nodes,)
    for size in sizes:
        check_nodes(size)
    if sizes[-1] > most_nodes:
        raise OptionError(f"nodes={nodes} is more than most_nodes={most_nodes}: raise that")
    tables = _Tables(_checked(rates), sizes[-1])
    best = Choice(chain(0), 1.0, 1.0 if nodes is None else 0.0)
    lengths = range(1, min(most_depth, most_nodes) + 1) if nodes is None else (nodes,)
    for length in lengths if costs.step is not None else ():  # it costs less than its levels
        if length <= most_depth:
            best = _better(best, chain(length), expected_tokens(chain(length), rates), costs)
    for size in sizes:
        room = len(tables.best(size, most_depth)[0])
        for depth in range(1, min(most_depth, size) + 1):
            tree, tokens = tables.best(size, depth)
            if nodes is not None and len(tree) < room:
                continue
            best = _better(best, tree, tokens, costs)
    return best


def _better(best: Choice, tree: Tree, tokens: float, costs: Costs) -> Choice:
    """The best so far, or this tree."""
    speedup = tokens * costs.target_seconds(1) / costs.round_seconds(tree)
    return Choice(tree, tokens, speedup) if speedup > best.speedup else best


def _sizes(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return tuple(sorted({most, *(size for size in powers + between if size <= most)}))


@dataclass(frozen=True)
class _Table:
    """The best forests below an accepted node, by how many nodes they have.

    Attributes:
        tokens: `[N + 1]` expected accepted nodes of exactly m; -inf where m do not fit.
        takes: `[R, N + 1]` of m nodes below the children from a rank on, how many that
            child's subtree takes, itself included.
    """

    tokens: _Floats
    takes: NDArray[np.int64]


@dataclass
class _Tables:
    """Tables of up to `nodes` nodes, by row of rates and by how many levels are left."""

    rates: Sequence[Sequence[float]]
    nodes: int
    known: dict[tuple[int, int], _Table] = field(default_factory=dict)

    def best(self, nodes: int, depth: int) -> tuple[Tree, float]:
        """The best tree of exactly so many nodes, or of as many as fit."""
        depth = min(depth, nodes)
        for levels in range(depth + 1):  # the deepest nodes first
            self._table(depth - levels, levels)
        tokens = self._table(0, depth).tokens
        while tokens[nodes] == -math.inf:
            nodes -= 1
        return self._tree(nodes, depth), 1 + float(tokens[nodes])

    def _table(self, depth: int, levels: int) -> _Table:
        """Below a node at `depth`, with so many levels left."""
        row = min(depth, len(self.rates) - 1)
        if (row, levels) not in self.known:
            self.known[row, levels] = self._filled(depth, levels)
        return self.known[row, levels]

    def _filled(self, depth: int, levels: int) -> _Table:
        tokens = np.full(self.nodes + 1, -math.inf)
        tokens[0] = 0
        if not levels:
            return _Table(tokens, np.zeros((0, self.nodes + 1), np.int64))
        below = self._table(depth + 1, levels - 1).tokens[:-1]
        fits = below > -math.inf
        with_node, unless = 1 + np.where(fits, below, 0), np.where(fits, 0, -math.inf)
        row = self.rates[min(depth, len(self.rates) - 1)][: self.nodes]
        takes = np.zeros((len(row), self.nodes + 1), np.int64)
        for rank in reversed(range(len(row))):
            tokens, takes[rank] = _shared(row[rank] * with_node + unless, tokens)
        return _Table(tokens, takes)

    def _tree(self, nodes: int, depth: int) -> Tree:
        """What the tables took, level by level."""
        parents: list[int] = []
        level = [(-1, nodes)]  # of the nodes of a depth, how many are below each
        for at in range(depth):
            following = []
            for parent, below in level:
                takes = self._table(at, depth - at).takes
                rank = 0
                while below:
                    taken = int(takes[rank, below])
                    following.append((len(parents), taken - 1))
                    parents.append(parent)
                    below -= taken
                    rank += 1
            level = following
        return tree_of(parents)


def _shared(child: _Floats, later: _Floats) -> tuple[_Floats, NDArray[np.int64]]:
    """The best shares of m nodes between a child's subtree and its later siblings', for all m.

    Args:
        child: `[N]` what the subtree is worth with 1 to N nodes.
        later: `[N + 1]` what the later siblings are worth with 0 to N.

    Returns:
        `[N + 1]` what they are worth together, and how many the subtree takes. There are no
        later siblings without the child, so 0 nodes are nothing.
    """
    count = len(child)
    padded = np.concatenate([np.full(count - 1, -math.inf), later[:-1]])
    # Row m - 1 holds what is left for the siblings if the child takes N, N - 1, ..., 1 of m.
    left = np.lib.stride_tricks.sliding_window_view(padded, count)
    worth = left + child[::-1]
    best = worth.argmax(1)  # the first of equals: the child takes more
    together = np.concatenate([[0.0], worth[np.arange(count), best]])
    return together, np.concatenate([[0], count - best])


def _checked(rates: Rates) -> list[list[float]]:
    """As numbers.

    Raises:
        OptionError: they are not rows of marginal probabilities.
    """
    try:
        rows = [[float(rate) for rate in row] for row in rates]
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"rates are not rows of numbers ({error}): give one row per depth, one rate per rank"
        ) from error
    if not rows or not all(rows):
        raise OptionError("rates of a depth are missing: give a row of one rate or more")
    for depth, row in enumerate(rows):
        if not all(0 <= rate <= 1 for rate in row):
            raise OptionError(f"rates of depth {depth} are not probabilities: {row}")
        if math.fsum(row) > 1 + _ROUNDING:
            raise OptionError(
                f"rates of depth {depth} sum to {math.fsum(row):.4g}: at most one child is "
                "accepted, so give each rank's share of all rounds that got there"
            )
    return rows


def _checked_depth(depth: int) -> int:
    return check_whole_number("depth", depth, 1, "of a tree")
