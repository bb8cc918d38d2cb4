"""Greedy verification: follow the target's argmax down the tree.

At temperature 0 the target's law is a point mass, and every exact rule
becomes this one: a child is kept iff it is the argmax after its parent (Stern
et al., 2018, section 3). It reads nothing but the largest entry of each row,
takes chains and trees of any law, and uses no noise.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..types import Draft, Law, PointMass, Rows
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
        batch, n = draft.tokens.shape
        best = p.argmax(-1)  # [B, N + 1], what the target emits after each row
        rows = torch.arange(batch, device=p.device)
        lengths = torch.tensor([len(t) for t in draft.trees], device=p.device)
        if all(t.is_chain for t in draft.trees):
            nodes = torch.arange(n, device=p.device)
            kept = (draft.tokens == best[:, :n]) & (nodes < lengths.unsqueeze(1))
            accepted = kept.cumprod(1).sum(1)
            path = torch.where(nodes < accepted.unsqueeze(1), nodes, -1)
            return Verdict(path, accepted, best[rows, accepted])
        parents = torch.full((batch, n), -2, dtype=torch.int64)
        for b, tree in enumerate(draft.trees):
            parents[b, : len(tree)] = torch.tensor(tree.parents, dtype=torch.int64)
        parents = parents.to(p.device)
        at = torch.full_like(rows, -1)  # the node each sequence stands on
        path = torch.full((batch, n), -1, dtype=torch.int64, device=p.device)
        accepted = torch.zeros_like(rows)
        for depth in range(max(max(t.depths, default=0) for t in draft.trees)):
            wanted = best[rows, at + 1].unsqueeze(1)
            match = (parents == at.unsqueeze(1)) & (draft.tokens == wanted)  # [B, N]
            found = match.any(1) & (accepted == depth)
            at = torch.where(found, match.int().argmax(1), at)
            path[:, depth] = torch.where(found, at, -1)
            accepted = accepted + found
        return Verdict(path, accepted, best[rows, at + 1])
