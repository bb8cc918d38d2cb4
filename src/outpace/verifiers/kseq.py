"""K-SEQ: children that were drawn from one row are all held against p itself.

Sun, Suresh, Ro, Beirami, Jain, Yu, "SpecTr: fast speculative decoding via optimal
transport", NeurIPS 2023, algorithm 3. Of K children drawn independently from q
each in turn is kept with probability min(1, p(x) / (ρ q(x))). With

    b(ρ) = Σ min(q, p/ρ),   hit(b) = 1 + (1 - b) + ... + (1 - b)^(K-1)

one is kept with probability b hit(b), and else one token is drawn from
(p - min(q, p/ρ) hit(b))+. That is exact for every ρ with hit(b(ρ)) <= ρ, where the
difference is nowhere negative, and the least of them keeps the most: it lies in
[1, K], ρ = 1 for K = 1, and is found by bisection from above. At best K-SEQ keeps
(1 - 1/e) of what the optimal transport keeps; it may keep less than token
verification, where rejected children tell much.

Tokens that were certain, and chains, are verified as by token verification.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import Rule
from ..models.base import upload
from ..sampling import categorical
from ..types import Draft, Draw, Independent, Law, PointMass, Rows
from .base import Noise, Verdict, chances_of, parents_of, without_tensors
from .token import TokenVerifier

_STEPS = 40
"""Of the bisection; as many as in kernels/cpp/verify.h."""


class KSeqVerifier(TokenVerifier):
    """Exact for trees whose siblings were drawn from one row, and for point masses."""

    name: ClassVar[str] = "kseq"
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Independent)
    siblings: ClassVar[Draw] = "with"

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        certain = isinstance(draft.law, PointMass)
        if certain or all(tree.is_chain for tree in draft.trees):
            return super().__call__(p, draft, noise)
        return without_tensors(Rule.KSEQ, p, draft, noise) or _down_trees(p, draft, noise)


def _down_trees(p: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """All nodes at once, but for the way down."""
    assert isinstance(draft.law, Rows)
    q, rows, parents = draft.law.q, torch.arange(len(p), device=p.device), parents_of(draft)
    families = _families(draft)
    first, draws = upload(families, p.device)  # [B, N + 1] each
    rho = _least_rho(p, q, families)  # [B, N + 1]
    before = parents.clamp_min(-1) + 1  # the row that each node is held against
    px = p[rows.unsqueeze(1), before, draft.tokens].double()
    qx = chances_of(draft)
    passes = (noise.accept * rho.gather(1, before) * qx < px) & (qx > 0)
    at, kept = torch.full_like(rows, -1), list[Tensor]()
    for node, here in enumerate(passes.unbind(1)):
        kept.append((parents[:, node] == at) & here)
        at = torch.where(kept[-1], node, at)
    path, end = torch.stack(kept, 1), at + 1
    row, child = p[rows, end].double(), first[rows, end]
    shared = _shared(row, q[rows, child.clamp_min(0)].double(), rho[rows, end])
    hit = _hit_over(shared.sum(1), draws[rows, end])
    rest = (row - hit.unsqueeze(1) * shared).clamp_min_(0)
    some = (child >= 0) & (rest > 0).any(1)
    last = torch.where(some.unsqueeze(1), rest, row)
    return Verdict.through(path, categorical(last, noise.target[rows, path.sum(1)]))


def _families(draft: Draft) -> Tensor:
    """Behind the root and each node the first child, -1 for none, and how many: `[2, B, N + 1]`."""
    width = draft.tokens.shape[1] + 1
    first, draws = ([[value] * width for _ in draft.trees] for value in (-1, 0))
    for b, tree in enumerate(draft.trees):
        for node, parent in enumerate(tree.parents):
            if not draws[b][parent + 1]:
                first[b][parent + 1] = node
            draws[b][parent + 1] += 1
    return torch.tensor([first, draws])


def _least_rho(p: Tensor, q: Tensor, families: Tensor) -> Tensor:
    """ρ behind the root and each node `[B, N + 1]`; 1 where there are no siblings."""
    where = (families[1] > 1).nonzero().T  # [2, M], on the host
    picked = torch.stack([*where, *families[:, where[0], where[1]]])
    b, row, child, draws = upload(picked, p.device)
    target, law = p[b, row].double(), q[b, child].double()  # [M, V]
    low, high = torch.ones_like(target[:, 0]), draws.double()
    middle = low
    for _ in range(1 + _STEPS):
        enough = _hit_over(_shared(target, law, middle).sum(1), draws) <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        middle = (low + high) / 2
    rho = torch.ones(p.shape[:2], dtype=torch.float64, device=p.device)
    return rho.index_put((b, row), high)


def _shared(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    """min(q, p/ρ) `[M, V]`."""
    return torch.minimum(q, p / rho.unsqueeze(1))


def _hit_over(b: Tensor, draws: Tensor) -> Tensor:
    """hit(b) `[M]` of so many draws; without cancellation where b is small."""
    none = draws * torch.log1p(-b.clamp_max(1))
    return torch.where(b > 0, -torch.expm1(none) / b, draws.double())
