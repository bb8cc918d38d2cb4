"""Greedy verification: follow the target's argmax down the tree.

At temperature 0 the target's law is a point mass, and every exact rule
becomes this one: a child is kept iff it is the argmax after its parent (Stern
et al., 2018, section 3). It reads nothing but the largest entry of each row,
takes chains and trees of any law, and uses no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..sampling import argmax
from ..types import Draft, Law, PointMass, Rows, Tree
from .base import Noise, Verdict


class GreedyVerifier:
    """Exact at temperature 0; the engine refuses it for requests that sample."""

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes_trees: ClassVar[bool] = True
    takes_sampling: ClassVar[bool] = False

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """`p` may be logits: only the argmax of each row is read."""
        rows: list[list[int]] = argmax(p).tolist()  # [B, N + 1], a host sync
        tokens: list[list[int]] = draft.tokens.tolist()
        paths = [self.follow(*given) for given in zip(rows, tokens, draft.trees, strict=True)]
        ends = [best[path[-1] + 1 if path else 0] for best, path in zip(rows, paths, strict=True)]
        depth = draft.tokens.shape[1]
        padded = [path + [-1] * (depth - len(path)) for path in paths]
        return Verdict(
            torch.tensor(padded, dtype=torch.int64, device=p.device).view(len(paths), depth),
            torch.tensor([len(path) for path in paths], device=p.device),
            torch.tensor(ends, device=p.device),
        )

    def follow(self, best: Sequence[int], tokens: Sequence[int], tree: Tree) -> list[int]:
        """The accepted path of one sequence.

        Args:
            best: N + 1 likeliest tokens: entry 0 after the root, entry i + 1 after node i.
            tokens: of the draft's nodes.
        """
        path, at = list[int](), -1
        for node, parent in enumerate(tree.parents):  # parents come first
            if parent == at and tokens[node] == best[at + 1]:
                path.append(node)
                at = node
        return path
