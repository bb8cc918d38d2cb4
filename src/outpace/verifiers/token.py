"""Token verification (speculative sampling).

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding", ICML 2023, algorithm 1; Chen et al., "Accelerating large language
model decoding with speculative sampling", 2023, algorithm 2. Going down the
chain, token x ~ q is kept with probability min(1, p(x)/q(x)); at the first
rejection one token is drawn from norm((p - q)+); when all are kept, one from p.

In a tree the children of a node are tried in turn, each drawn on its own: what a
rejected child leaves, norm((p - q)+), is the p that the next one is held against
(Miao et al., "SpecInfer", 2024, algorithm 2). With children that are certain that
is to keep x with probability p(x), else to strike it out.

Two edges are guarded: the comparison is strict (u < p/q), so u = 0 never lets
a token with p = 0 through, and where (p - q)+ has no mass the draw is from p.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..models.base import upload
from ..sampling import categorical, residual, without
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict, without_tensors


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
        if not all(tree.is_chain for tree in draft.trees):
            return _down_trees(p, draft, noise)
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


def _down_trees(p: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """One child after the other, on the host."""
    paths, ends = [], []
    tokens, accept = draft.tokens.tolist(), noise.accept.tolist()
    for b, tree in enumerate(draft.trees):
        path, left = list[int](), p[b, 0].double()
        for node, parent in enumerate(tree.parents):  # parents come first
            if parent != (path[-1] if path else -1):
                continue
            x = tokens[b][node]
            q = _row(draft, b, node, left)
            if accept[b][node] * float(q[x]) * float(left.sum()) < float(left[x]) and q[x] > 0:
                path.append(node)
                left = p[b, node + 1].double()
            else:
                left = residual(left / left.sum(), q)
        paths.append(path)
        ends.append(categorical(left, noise.target[b, len(path)]))
    return Verdict.of(paths, draft.tokens.shape[1], torch.stack(ends))


def _row(draft: Draft, b: int, node: int, like: Tensor) -> Tensor:
    """The law `[V]` that a node was drawn from."""
    if isinstance(draft.law, Rows):
        return draft.law.q[b, node].double()
    return torch.zeros_like(like).scatter_(0, draft.tokens[b, node], 1)
