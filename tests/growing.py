"""Trees that grow without a model: what a drafting model would read, row by row, and be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from outpace.trees import Block, Children, Grown, Growth
from outpace.types import Tree

Path = tuple[int, ...]
"""Tokens from the root to a node, or ranks."""

Behind = Callable[[Path, int, Sequence[int] | None], Children]
"""What is drawn behind a text: so many tokens, with the noise of these nodes. Without dimensions
for sequences and rows."""


@st.composite
def trees(draw, least=0, most=12):
    """Any tree, in any order in which parents come first."""
    count = draw(st.integers(least, most))
    return Tree(tuple(draw(st.integers(-1, node - 1)) for node in range(count)))


def rank_paths(tree: Tree) -> list[Path]:
    """Per node the ranks on the way to it, counted among the children before it."""
    paths: list[Path] = []
    for node, parent in enumerate(tree.parents):
        rank = sum(p == parent for p in tree.parents[:node])
        paths.append((*(() if parent < 0 else paths[parent]), rank))
    return paths


def texts(tree: Tree, tokens: Sequence[int]) -> list[Path]:
    """What stands on the way to each node, its own token last."""
    found: list[Path] = []
    for token, parent in zip(tokens, tree.parents, strict=False):
        found.append((*(() if parent < 0 else found[parent]), token))
    return found


def grow(growth: Growth, behind: Behind | Sequence[Behind], batch: int) -> Grown:
    """Grow a draft, and hold every block against the one before and against what has grown.

    What is drawn may be another matter in each sequence.
    """
    each = [behind] * batch if callable(behind) else behind
    rows: list[list[Path]] = [[()] for _ in range(batch)]
    block: Block | None = None
    while True:
        nodes = None if growth.nodes is None else growth.nodes.tolist()
        drawn = [
            [
                each[b](path, growth.width, None if nodes is None else nodes[b][f])
                for f, path in enumerate(paths)
            ]
            for b, paths in enumerate(rows)
        ]
        further = growth.add(_stacked(drawn))
        if further is None:
            break
        _assert_goes_on(block, further)
        block = further
        rows = [_read(block, b)[block.computed :] for b in range(batch)]
    grown = growth.grown()
    for b in range(batch):
        _assert_read(grown, block, b)
    return grown


def _stacked(drawn: list[list[Children]]) -> Children:
    def stack(name: str):
        each = [[getattr(c, name) for c in row] for row in drawn]
        if each[0][0] is None:
            return None
        return torch.stack([torch.stack(row) for row in each])

    return Children(stack("tokens"), stack("masses"), stack("q"))


def _read(block: Block, b: int) -> list[Path]:
    """What each row sees, itself included."""
    tokens, mask = block.tokens[b].tolist(), block.mask[b].tolist()
    return [tuple(t for t, seen in zip(tokens, row, strict=True) if seen) for row in mask]


def _assert_goes_on(before: Block | None, block: Block) -> None:
    """What was read stays as it is, and nothing is read twice."""
    done = 0 if before is None else before.tokens.shape[1]
    assert block.computed == done < block.tokens.shape[1]
    assert not block.mask.triu(1).any()
    if before is not None:
        assert torch.equal(block.tokens[:, :done], before.tokens)
        assert torch.equal(block.depths[:, :done], before.depths)
        assert torch.equal(block.mask[:, :done, :done], before.mask)


def _assert_read(grown: Grown, block: Block | None, b: int) -> None:
    """Where a node was read it saw its ancestors alone, at its depth; all that have children were
    read, each once."""
    tree, rows = grown.trees[b], grown.rows[b]
    assert len(rows) == len(tree)
    paths = texts(tree, grown.tokens[b].tolist())
    assert {node for node in tree.parents if node >= 0} <= {n for n, r in enumerate(rows) if r >= 0}
    read = [row for row in rows if row >= 0]
    assert len(set(read)) == len(read)
    for node, row in enumerate(rows):
        if row >= 0:
            assert block is not None
            assert _read(block, b)[row] == paths[node]
            assert block.depths[b, row] == tree.depths[node]
            assert block.mask[b, row].sum() == tree.depths[node]
