"""Token verification (speculative sampling).

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding", ICML 2023, algorithm 1; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023, algorithm 2. Going down the
chain, token x ~ q is kept with probability min(1, p(x)/q(x)); at the first
rejection one token is drawn from norm((p - q)+); when all are kept, one from p.

Two edges are guarded: the comparison is strict (u < p/q), so u = 0 never lets
a token with p = 0 through, and where (p - q)+ has no mass the draw is from p.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..models.base import upload
from ..sampling import categorical, residual, without
from ..types import Draft, Law, PointMass, Rows
from .base import Noise, Verdict, without_tensors


class TokenVerifier:
    """Exact for chains, for point masses and for rows."""

    name: ClassVar[str] = "token"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes_trees: ClassVar[bool] = False
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = False

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        batch, n = draft.tokens.shape
        lengths = upload(torch.tensor([len(t) for t in draft.trees]), p.device)
        if verdict := without_tensors(p, draft, noise, lengths, by_block=False):
            return verdict
        q = draft.law.q if isinstance(draft.law, Rows) else None
        rows = torch.arange(batch, device=p.device)
        nodes = torch.arange(n, device=p.device)
        index = draft.tokens.unsqueeze(-1)  # [B, N, 1]
        px = p[:, :n].gather(-1, index).squeeze(-1).double()  # [B, N]
        qx = torch.ones_like(px) if q is None else q.gather(-1, index).squeeze(-1).double()
        kept = (noise.accept * qx < px) & (qx > 0) & (nodes < lengths.unsqueeze(1))
        accepted = kept.cumprod(1).sum(1)  # [B]
        p_last = p[rows, accepted]  # [B, V]
        rejected = accepted.clamp_max(n - 1)
        if q is None:
            rest = without(p_last, draft.tokens[rows, rejected])
        else:
            rest = residual(p_last, q[rows, rejected])
        full = (accepted == lengths).unsqueeze(1)
        token = categorical(torch.where(full, p_last, rest), noise.target[rows, accepted])
        path = torch.where(nodes < accepted.unsqueeze(1), nodes, -1)
        return Verdict(path, accepted, token)
