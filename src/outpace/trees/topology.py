"""Shapes of drafts and what a forward pass needs to know of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..types import Tree


@lru_cache(maxsize=256)
def chain(length: int) -> Tree:
    """The tree without branches."""
    return Tree(tuple(range(-1, length - 1)))


def merged(paths: Iterable[Sequence[int]]) -> tuple[list[int], Tree]:
    """The tokens and shape of the tree with these paths, in which equal beginnings are one."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        at = -1
        for token in path:
            node = children.get((at, token))
            if node is None:
                node = children[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = node
    return tokens, tree_of(parents)


def tree_of(parents: Sequence[int]) -> Tree:
    """The tree with these parents; the one of `chain` where it has no branches."""
    straight = list(parents) == list(range(-1, len(parents) - 1))
    return chain(len(parents)) if straight else Tree(tuple(parents))


@lru_cache(maxsize=1024)
def ancestor_mask(tree: Tree, rows: int) -> Tensor:
    """`[rows, rows]` bool: row i may look at row j. Row 0 is the root, row i + 1 node i.

    Rows past the tree are padding; each sees itself alone, so no row is empty.
    """
    mask = np.eye(rows, dtype=bool)
    for node, parent in enumerate(tree.parents):
        mask[node + 1] |= mask[parent + 1]
    return torch.from_numpy(mask)


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
