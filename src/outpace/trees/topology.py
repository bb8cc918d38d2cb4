"""Shapes of drafts and what a forward pass needs to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..types import Tree


@lru_cache(maxsize=256)
def chain(length: int) -> Tree:
    """The tree without branches."""
    return Tree(tuple(range(-1, length - 1)))


@lru_cache(maxsize=1024)
def ancestor_mask(tree: Tree, rows: int) -> Tensor:
    """`[rows, rows]` bool: row i may look at row j. Row 0 is the root, row i + 1 node i.

    Rows past the tree are padding; each sees itself alone, so no row is empty.
    """
    mask = torch.eye(rows, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        mask[node + 1] |= mask[parent + 1]
    return mask


def block_mask(trees: Sequence[Tree], rows: int) -> Tensor | None:
    """Ancestor masks `[B, rows, rows]` of a batch; None when all are chains (causal)."""
    if all(tree.is_chain for tree in trees):
        return None
    return torch.stack([ancestor_mask(tree, rows) for tree in trees])


def block_positions(
    starts: Sequence[int], trees: Sequence[Tree], rows: int, end: int | None = None
) -> Tensor:
    """`[B, rows]` int64: the position of each row, the root's being `starts`; at most `end`."""
    places = [
        [start + offset for offset in _offsets(tree, rows)]
        for start, tree in zip(starts, trees, strict=True)
    ]
    if end is not None and max(starts) + rows > end:
        places = [[min(at, end) for at in row] for row in places]
    return torch.tensor(places)


@lru_cache(maxsize=1024)
def _offsets(tree: Tree, rows: int) -> tuple[int, ...]:
    return (0, *tree.depths, *range(len(tree) + 1, rows))
