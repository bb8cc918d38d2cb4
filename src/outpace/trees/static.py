"""Trees whose shape is known before anything is drafted.

A node's children are the first ones of its row: the likeliest, or those that were drawn
first. The shape may be any (Cai et al., "Medusa", 2024, section 2.3.2, finds one by
hand; Chen et al., "Sequoia", 2024, by dynamic programming).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError
from ..types import Draw, SamplingParams, Shape, Tree
from .growth import Block, Children, Grown, check_draw
from .topology import ancestor_mask, check_nodes, cut

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Level:
    """What one level of drawing needs of a batch.

    Attributes:
        width: children to draw behind each row, at most.
        nodes: `[B, F, width]` the node of each, N where there is none.
        read: `[B, F']` nodes to read next, N for padding; none behind the last level.
    """

    width: int
    nodes: Tensor
    read: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the trees of a batch grow together.

    Attributes:
        levels: from the root on.
        depths: `[B, R]` of all that is read.
        mask: `[B, R, R]`.
        rows: for each sequence the row where a node is read, -1 for leaves.
    """

    trees: tuple[Tree, ...]
    size: int
    levels: tuple[_Level, ...]
    depths: Tensor
    mask: Tensor
    rows: tuple[tuple[int, ...], ...]


class StaticBuilder:
    """One shape for all drafts, as far as they may go.

    Args:
        tree: level by level, a node's children side by side.
        draw: how they come about; see `Builder`.

    Raises:
        OptionError: it is no tree that a pass takes, or draw is none of these.
    """

    weighs = False

    def __init__(self, tree: Tree, draw: Draw = "without") -> None:
        if not isinstance(tree, Tree):
            raise OptionError(f"{tree!r} is no outpace Tree: parse_tree makes one of ranks")
        if not len(tree):
            raise OptionError("the tree has no nodes: plain decoding is without tree and drafter")
        self.tree, self.draw = tree, check_draw(draw)
        self.nodes, self.depth = check_nodes(len(tree)), tree.depth
        self.shape = tree.shape

    def begin(self, budgets: Sequence[int], temperatures: Sequence[float]) -> StaticGrowth:
        return StaticGrowth(tuple(cut(self.tree, budget) for budget in budgets))


class SequoiaBuilder:
    """Sequoia's trees: those of most tokens per second, by what was measured.

    There is one for requests at temperature 0, and one for those above. Which they are is
    set once, before anything is drafted: by `outpace.planner.fit_tree`, which `load` does.

    Args:
        nodes: of the trees; None for as many as pay, up to `most`.
        depth: of the longest path, at most.
        temperature: at which the tree for requests above 0 is measured.
        draw: how children come about; see `Builder`.

    Attributes:
        trees: at temperature 0 and above; empty as long as nothing was measured.

    Raises:
        OptionError: a number that cannot be, or draw is none of these.
    """

    weighs = False
    shape = Shape.TREE
    most = 64

    def __init__(
        self,
        nodes: int | None = None,
        depth: int = 8,
        temperature: float = 0.8,
        draw: Draw = "without",
    ) -> None:
        self.size = None if nodes is None else check_nodes(nodes)
        self.nodes, self.depth = self.size or self.most, check_nodes(depth, "depth")
        self.temperature, self.draw = temperature, check_draw(draw)
        if not SamplingParams(temperature=temperature).temperature:
            raise OptionError("temperature must be a number > 0: at 0 it is measured anyway")
        self.trees: tuple[Tree, ...] = ()

    def begin(self, budgets: Sequence[int], temperatures: Sequence[float]) -> StaticGrowth | None:
        if not self.trees:
            raise OptionError(
                "Sequoia's tree is not known yet: measure it by outpace.planner.fit_tree(engine)"
            )
        chosen = (self.trees[t > 0] for t in temperatures)
        trees = tuple(cut(tree, budget) for tree, budget in zip(chosen, budgets, strict=True))
        return StaticGrowth(trees) if any(map(len, trees)) else None


class StaticGrowth:
    """A draft of given trees, one per sequence. See `Growth`."""

    def __init__(self, trees: tuple[Tree, ...]) -> None:
        self._plan = _plan(trees)
        self._at = 0
        self._tokens: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._block: Tensor | None = None

    @property
    def width(self) -> int:
        return self._plan.levels[self._at].width

    @property
    def nodes(self) -> Tensor:
        nodes = self._plan.levels[self._at].nodes
        return torch.where(nodes < self._plan.size, nodes, 0)

    @property
    def chains(self) -> list[int] | None:
        trees = self._plan.trees
        return [len(tree) for tree in trees] if all(tree.is_chain for tree in trees) else None

    def add(self, children: Children) -> Block | None:
        plan, level = self._plan, _levels_on(self._plan.trees, children.tokens.device)[self._at]
        batch, size = len(plan.trees), plan.size
        at = level.nodes.flatten(1)  # [B, F m]
        if not self._tokens:
            self._tokens.append(children.tokens.new_zeros(batch, size + 1))
        tokens = self._tokens[0].scatter_(1, at, children.tokens.flatten(1))
        if children.q is not None:
            rows = children.q.flatten(1, 2)  # [B, F m, V]
            if not self._rows:
                self._rows.append(rows.new_zeros(batch, size + 1, rows.shape[-1]))
            index = at.unsqueeze(-1).expand_as(rows)
            self._rows[0].scatter_(1, index, rows)
        self._at += 1
        if self._at == len(plan.levels):
            return None
        read = tokens.gather(1, level.read)
        done = 0 if self._block is None else self._block.shape[1]
        self._block = read if self._block is None else torch.cat([self._block, read], 1)
        end = self._block.shape[1]
        return Block(self._block, plan.depths[:, :end], plan.mask[:, :end, :end], done)

    def grown(self) -> Grown:
        plan = self._plan
        q = self._rows[0][:, : plan.size] if self._rows else None
        return Grown(self._tokens[0][:, : plan.size], q, plan.trees, plan.rows)


@lru_cache(maxsize=256)
def _plan(trees: tuple[Tree, ...]) -> _Plan:
    size = max(map(len, trees))
    inner = [_inner(tree) for tree in trees]
    deepest = max(tree.depth for tree in trees)
    levels, read, depths = [], [], []
    frontier = [[-1] for _ in trees]
    for depth in range(1, deepest + 1):
        below = [_children(tree, nodes) for tree, nodes in zip(trees, frontier, strict=True)]
        frontier = [
            [node for node in nodes if tree.depths[node] == depth]
            for tree, nodes in zip(trees, inner, strict=True)
        ]
        width = max(len(some) for lists in below for some in lists)
        slots = [_padded([_padded(c, width, size) for c in lists], 0, []) for lists in below]
        rows = max(map(len, slots))
        nodes = [_padded(lists, rows, [size] * width) for lists in slots]
        wide = max(map(len, frontier))
        read.append([_padded(nodes, wide, size) for nodes in frontier])
        depths.append(torch.full((len(trees), wide), depth))
        levels.append(_Level(width, torch.tensor(nodes), _indices(read[-1], wide)))
    places = [[node for level in read for node in level[b]] for b in range(len(trees))]
    return _Plan(
        trees,
        size,
        tuple(levels),
        torch.cat(depths, 1) if depths else torch.zeros(len(trees), 0, dtype=torch.int64),
        torch.stack([_mask(tree, place) for tree, place in zip(trees, places, strict=True)]),
        tuple(
            tuple(place.index(node) if node in place else -1 for node in range(len(tree)))
            for tree, place in zip(trees, places, strict=True)
        ),
    )


@lru_cache(maxsize=256)
def _levels_on(trees: tuple[Tree, ...], device: torch.device) -> tuple[_Level, ...]:
    """A plan's levels, with what they hold on a device."""
    return tuple(
        _Level(level.width, level.nodes.to(device), level.read.to(device))
        for level in _plan(trees).levels
    )


def _inner(tree: Tree) -> list[int]:
    """Nodes that have children."""
    return sorted({parent for parent in tree.parents if parent >= 0})


def _children(tree: Tree, nodes: Sequence[int]) -> list[list[int]]:
    """Of each of these nodes."""
    return [[c for c, parent in enumerate(tree.parents) if parent == node] for node in nodes]


def _padded(items: list[T], count: int, padding: T) -> list[T]:
    return items + [padding] * (count - len(items))


def _mask(tree: Tree, place: Sequence[int]) -> Tensor:
    """`[R, R]` for the nodes of a tree in these places; others are padding."""
    rows = torch.tensor([node + 1 if node < len(tree) else len(tree) + 1 for node in place])
    whole = F.pad(ancestor_mask(tree, len(tree) + 1), (0, 1, 0, 1))
    seen = whole[rows.unsqueeze(1), rows] if len(place) else torch.zeros(0, 0, dtype=torch.bool)
    return seen | torch.eye(len(place), dtype=torch.bool)


def _indices(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
