"""Token recycling: what the target thought likely behind a token, it may think so again.

Luo et al., "Turning trash into treasure: accelerating inference of large language
models with token recycling", 2024. A table keeps, for every token, the target's
likeliest successors when it was last scored, accepted or not; every row of a pass
rewrites one entry, and all requests share it. A tree of a fixed shape is
filled from the table.

The shape is not the paper's: of all nodes it has those that are reached most
likely if the first successor is right with probability 0.5, the next ones with
0.17, 0.09 and so on, and a deeper token as a shallow one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..trees import check_nodes
from ..types import Shape, Tree
from .base import CertainDrafter, Commit, Context

WIDTH = 8
"""Successors that are kept of each token."""

_RATES = tuple(0.5 / (rank + 1) ** 1.55 for rank in range(WIDTH))

_UNKNOWN = -1


class RecyclingDrafter(CertainDrafter):
    """Drafts a tree from a table of what the target last found likely behind each token.

    Args:
        nodes: of the tree; by default 8 where the target runs on a CPU, which pays for
            every row of a pass, and 60 elsewhere.
    """

    name = "recycling"
    proposes = Shape.TREE
    tops = WIDTH
    k = most = 6
    remembers = True

    def __init__(self, nodes: int | None = None) -> None:
        if nodes is not None:
            check_nodes(nodes)
        self._given, self._nodes = nodes, nodes or 0
        self._shapes: dict[int, _Shape] = {}
        self._table: np.ndarray[tuple[int, int], np.dtype[np.int32]]

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        self._nodes = self._given or (8 if target.device.type == "cpu" else 60)
        self._shapes = {}
        self._table = np.full((target.vocab_size, WIDTH), _UNKNOWN, np.int32)

    def forget(self) -> None:
        self._table.fill(_UNKNOWN)

    def propose(self, context: Context, budget: int) -> tuple[list[int], Tree]:
        return self._fill(self._shape(budget), context.tokens[-1])

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.top is not None:  # the last of equal tokens in a block is what stays
                self._table[list(commit.block), : commit.top.shape[1]] = commit.top.numpy()

    def _shape(self, depth: int) -> _Shape:
        if depth not in self._shapes:
            self._shapes[depth] = _Shape(self._nodes, depth)
        return self._shapes[depth]

    def _fill(self, shape: _Shape, root: int) -> tuple[list[int], Tree]:
        """Nodes whose successor is not known yet are left out, and all behind them."""
        successor, tokens = self._table.item, [root]
        for parent, rank in shape.steps:  # for so few nodes faster than by level
            before = tokens[parent]
            tokens.append(_UNKNOWN if before == _UNKNOWN else successor(before, rank))
        found = tokens[1:]
        if _UNKNOWN not in found:
            return found, shape.tree
        kept = [i for i, token in enumerate(found) if token != _UNKNOWN]
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return [found[i] for i in kept], Tree(tuple(place[shape.tree.parents[i]] for i in kept))


class _Shape:
    """The likeliest nodes of a tree of some depth, and how it is filled.

    Attributes:
        steps: per node the row before it, and its rank; row 0 is the root, row i + 1 node i.
    """

    def __init__(self, nodes: int, depth: int) -> None:
        open_ = [(-_RATES[0], 0, -1, 0)] if depth else []  # minus its chance, level, parent, rank
        parents: list[int] = []
        self.steps: list[tuple[int, int]] = []
        while open_ and len(parents) < nodes:
            chance, level, parent, rank = heapq.heappop(open_)
            node = len(parents)
            parents.append(parent)
            self.steps.append((parent + 1, rank))
            if rank + 1 < WIDTH:
                sibling = chance / _RATES[rank] * _RATES[rank + 1]
                heapq.heappush(open_, (sibling, level, parent, rank + 1))
            if level + 1 < depth:
                heapq.heappush(open_, (chance * _RATES[0], level + 1, node, 0))
        self.tree = Tree(tuple(parents))
