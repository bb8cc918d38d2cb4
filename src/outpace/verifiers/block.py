"""Block verification: the longest prefix that can be kept, judged jointly.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh, "Block verification
accelerates speculative decoding", ICLR 2025, algorithm 2. With P_i the joint
ratio min(1, P_{i-1} p(X_i)/q(X_i)), the prefix of length i is judged by

    h_K = P_K,   h_i = S_i / (S_i + 1 - P_i),   S_i = Σ_x (P_i p(x|X^i) - q(x|X^i))+

each against a uniform of its own. The longest prefix that passes is kept, not
the one before the first that fails, and one more token is drawn from p behind
the whole draft, else from (P_i p - q)+ behind prefix i. Law: the target's. No
rule for chains accepts more in expectation, so it never accepts less than token
verification, and the same where K = 1 or all is certain.

A chain that ended by looking at its own tokens is judged as a chain of its
length. The comparison is strict, so nothing with probability 0 passes at u = 0.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import Rule
from ..sampling import categorical
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict, parents_of, without_tensors


class BlockVerifier:
    """Exact for chains, for point masses and for rows; no rule for them accepts more."""

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.CHAIN
    siblings: ClassVar[Draw] = "without"
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = False
    invariant: ClassVar[bool] = False

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if verdict := without_tensors(Rule.TRAVERSAL, p, draft, noise):
            return verdict
        q = draft.law.q if isinstance(draft.law, Rows) else None
        if q is None:
            index = draft.tokens.unsqueeze(-1)
            q = torch.zeros_like(p[:, :-1]).scatter_(-1, index, 1)
        lengths = (parents_of(draft) >= -1).sum(1)
        return judge_chains(p, q, draft.tokens, lengths, noise)


def judge_chains(p: Tensor, q: Tensor, tokens: Tensor, lengths: Tensor, noise: Noise) -> Verdict:
    """Block verification of chains `[B, N]` of these lengths `[B]`, drawn from q `[B, N, V]`."""
    batch, n = tokens.shape
    index = tokens.unsqueeze(-1)  # [B, N, 1]
    rows, nodes = torch.arange(batch, device=p.device), torch.arange(n, device=p.device)
    joint = _joint(p[:, :n].gather(-1, index), q.gather(-1, index))  # [B, N]
    left = _left(joint[:, :-1].unsqueeze(-1), p[:, 1:n], q[:, 1:]).sum(-1)  # [B, N - 1]
    whole = left + (1 - joint[:, :-1])
    inner = torch.where(whole > 0, left / whole, 1.0)
    ends = nodes == lengths.unsqueeze(1) - 1
    passes = torch.where(ends, joint, torch.cat([inner, joint[:, -1:]], 1))
    kept = (noise.accept < passes) & (nodes < lengths.unsqueeze(1))
    accepted = torch.where(kept, nodes + 1, 0).amax(1)  # [B]: the last that passed
    weight = torch.cat([torch.ones_like(joint[:, :1]), joint], 1)[rows, accepted]
    p_last, q_last = p[rows, accepted], q[rows, accepted.clamp_max(n - 1)]  # [B, V]
    rest = _left(weight.unsqueeze(-1), p_last, q_last)
    full = (accepted == lengths).unsqueeze(1) | ~(rest > 0).any(-1, keepdim=True)
    token = categorical(torch.where(full, p_last.double(), rest), noise.target[rows, accepted])
    return Verdict.through(nodes < accepted.unsqueeze(1), token)


def _joint(px: Tensor, qx: Tensor) -> Tensor:
    """P_1, ..., P_N `[B, N]` in float64, from the drafted tokens' masses `[B, N, 1]`."""
    ratios = torch.where(qx > 0, px.double() / qx.double(), 0.0)
    joint, steps = torch.ones_like(ratios[:, 0]), []
    for ratio in ratios.unbind(1):
        joint = (joint * ratio).clamp_max(1)
        steps.append(joint)
    return torch.cat(steps, 1)


def _left(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(weight p - q)+ in float64."""
    return (weight * p.double() - q.double()).clamp_min_(0)
