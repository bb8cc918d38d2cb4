"""Shapes of drafts and what a forward pass needs to know of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError
from ..types import Tree, check_whole_number

MOST_NODES = 512
"""Of a draft."""


def check_nodes(nodes: int, name: str = "nodes") -> int:
    """A number of nodes of a draft, or of those side by side or on a path.

    Raises:
        OptionError: not a whole number from 1 to `MOST_NODES`.
    """
    nodes = check_whole_number(name, nodes, 1, "of a tree")
    if nodes > MOST_NODES:
        raise OptionError(f"{name}={nodes} is more than a pass takes: at most {MOST_NODES}")
    return nodes


@lru_cache(maxsize=256)
def chain(length: int) -> Tree:
    """The tree without branches."""
    return Tree(tuple(range(-1, length - 1)))


def merged(paths: Iterable[Sequence[int]]) -> tuple[list[int], Tree]:
    """The tokens and shape of the tree with these paths, in which equal beginnings are one."""
    paths = list(paths)
    if len(paths) == 1:
        return list(paths[0]), chain(len(paths[0]))
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


def k_ary(widths: Sequence[int]) -> Tree:
    """The tree whose root has `widths[0]` children, each of them `widths[1]`, and so on.

    Nodes are numbered level by level, a parent's children side by side.

    Raises:
        OptionError: a width is not a whole number from 1, or there are too many nodes.
    """
    what = f"a tree of widths {','.join(map(str, widths))}"
    parents: list[int] = []
    level = [-1]
    for width in widths:
        check_whole_number("a width of a tree", width, 1, "children of every node of a level")
        _check_size(what, len(parents) + len(level) * width, "lower or leave out a width")
        begin = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(begin, len(parents)))
    return tree_of(parents)


def paths_tree(count: int, length: int) -> Tree:
    """So many chains, which have nothing but the root in common.

    Nodes are numbered level by level, so that the first `count * d` are the tree cut at depth d.

    Raises:
        OptionError: not whole numbers, or too many nodes.
    """
    count = check_whole_number("count", count, 1, "of paths")
    length = check_whole_number("length", length, 0, "of a path, in tokens")
    _check_size(f"{count} paths of {length} tokens", count * length, "ask for fewer or shorter")
    return tree_of([max(node - count, -1) for node in range(count * length)])


def from_ranks(paths: Iterable[Sequence[int]]) -> Tree:
    """A tree by hand: each path says which child to take, from the root to one node.

    The notation is that of Medusa's choices (Cai et al., 2024). `[[0], [0, 0], [1]]` are two
    children of the root, and one of the first. What a path begins with need not be listed
    itself. Nodes are numbered level by level, children in order of rank.

    Raises:
        OptionError: a path is empty, a rank is not a whole number from 0, a child is missing
            before another, or there are too many nodes.
    """
    known: set[tuple[int, ...]] = set()
    for given in paths:
        path = tuple(check_whole_number("a rank", r, 0, "0 is the first child") for r in given)
        if not path:
            raise OptionError("an empty path is the root, which every tree has: leave it out")
        known.update(path[:end] for end in range(1, len(path) + 1))
    _check_size("the tree", len(known), "leave out paths")
    for path in known:
        before = (*path[:-1], path[-1] - 1)
        if path[-1] and before not in known:
            raise OptionError(f"there is {list(path)} but not {list(before)} before it: add that")
    ordered = sorted(known, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate(ordered)} | {(): -1}
    return tree_of([number[path[:-1]] for path in ordered])


def _check_size(what: str, nodes: int, fix: str) -> None:
    if nodes > MOST_NODES:
        raise OptionError(
            f"{what} has {nodes} nodes or more, and a pass takes {MOST_NODES} at most: {fix}"
        )


@lru_cache(maxsize=1024)
def cut(tree: Tree, depth: int) -> Tree:
    """The nodes of a tree that are no deeper than `depth`, in the same order.

    Of a tree that is numbered level by level they are its first ones.
    """
    kept = [node for node, at in enumerate(tree.depths) if at <= depth]
    if len(kept) == len(tree):
        return tree
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return tree_of([place[tree.parents[node]] for node in kept])


def ranks(tree: Tree) -> tuple[int, ...]:
    """Which child of its parent each node is, from 0, in the order of their numbers."""
    seen: Counter[int] = Counter()
    found: list[int] = []
    for parent in tree.parents:
        found.append(seen[parent])
        seen[parent] += 1
    return tuple(found)


def to_ranks(tree: Tree) -> list[list[int]]:
    """What `from_ranks` makes the tree of: of every leaf the ranks on the way to it."""
    ways: list[list[int]] = []
    for parent, rank in zip(tree.parents, ranks(tree), strict=True):
        ways.append([*(ways[parent] if parent >= 0 else []), rank])
    inner = set(tree.parents)
    return [way for node, way in enumerate(ways) if node not in inner]


def widths(tree: Tree) -> tuple[int, ...]:
    """How many nodes there are at each depth, from 1."""
    count = Counter(tree.depths)
    return tuple(count[depth] for depth in range(1, len(count) + 1))


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
