"""Token verification (speculative sampling).

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding", ICML 2023, algorithm 1; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023, algorithm 2. Going down the
chain, token x ~ q is kept with probability min(1, p(x)/q(x)); at the first
rejection one token is drawn from norm((p - q)+); when all are kept, one from p.

In a tree the children of a node are tried in turn: what a rejected child leaves,
norm((p - q)+), is the p that the next one is held against (Miao et al., "SpecInfer",
2024, algorithm 2). Each is held against its own row q, its law given those before
it, so that children may be drawn with or without replacement. With children that
are certain that is to keep x with probability p(x), else to strike it out.

Two edges are guarded: the comparison is strict (u < p/q), so u = 0 never lets
a token with p = 0 through, and where (p - q)+ has no mass p stays as it is.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import Rule
from ..sampling import categorical, residual
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict, chances_of, laws_of, parents_of, without_tensors


class TokenVerifier:
    """Exact for chains and trees, for point masses and for rows."""

    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.TREE
    siblings: ClassVar[Draw] = "without"
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = False
    invariant: ClassVar[bool] = False

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if verdict := without_tensors(Rule.TOKEN, p, draft, noise):
            return verdict
        chains = all(tree.is_chain for tree in draft.trees)
        return (_down_chains if chains else _down_trees)(p, draft, noise)


def _down_chains(p: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """All nodes at once."""
    batch, n = draft.tokens.shape
    rows = torch.arange(batch, device=p.device)
    px = p[:, :n].gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1).double()  # [B, N]
    qx, inside = chances_of(draft), parents_of(draft) >= -1
    kept = ((noise.accept * qx < px) & (qx > 0) & inside).cumprod(1).bool()
    accepted = kept.sum(1)  # [B]
    row = p[rows, accepted].double()  # [B, V]
    rest = residual(row, laws_of(draft, accepted.clamp_max(n - 1), p.shape[-1]))
    row = torch.where((accepted < inside.sum(1)).unsqueeze(1), rest, row)
    return Verdict.through(kept, categorical(row, noise.target[rows, accepted]))


def _down_trees(p: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """One node after the other, of all sequences: parents come first."""
    parents, qx = parents_of(draft), chances_of(draft)
    rows = torch.arange(len(p), device=p.device)
    at, kept = torch.full_like(rows, -1), list[Tensor]()
    left = p[:, 0].double()  # [B, V]
    mass = torch.ones_like(left[:, 0])
    for node, x in enumerate(draft.tokens.unbind(1)):
        tried = parents[:, node] == at
        wanted = left[rows, x] / mass
        stays = tried & (noise.accept[:, node] * qx[:, node] < wanted) & (qx[:, node] > 0)
        law = laws_of(draft, torch.full_like(rows, node), p.shape[-1])
        rest = (left / mass.unsqueeze(1) - law).clamp_min_(0)
        over = rest.sum(1)
        goes = tried & ~stays & (over > 0)
        left = torch.where(goes.unsqueeze(1), rest, left)
        left = torch.where(stays.unsqueeze(1), p[:, node + 1].double(), left)
        mass = torch.where(stays, 1.0, torch.where(goes, over, mass))
        at = torch.where(stays, node, at)
        kept.append(stays)
    path = torch.stack(kept, 1)
    return Verdict.through(path, categorical(left, noise.target[rows, path.sum(1)]))
