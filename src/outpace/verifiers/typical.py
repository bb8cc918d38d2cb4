"""Typical acceptance: whatever the target finds likely enough. It is lossy.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple
decoding heads", ICML 2024, section 2.3.1. A draft token x is kept iff
p(x) > min(ε, δ exp(-H(p))), with H the entropy of its row in nats; of several
such paths the longest. One more token is drawn from p. There is no law that
this keeps: likely drafts are taken for certain, so that the text is more
predictable than the target's own. At temperature 0 it is the greedy rule.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..models.base import upload
from ..sampling import categorical
from ..types import Draft, Draw, Law, PointMass, Rows, Shape, Tree
from .base import Noise, Verdict, row_depths


class TypicalVerifier:
    """Lossy. For chains and trees of any law.

    Args:
        epsilon, delta: ε and δ; Medusa's are the defaults.
    """

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.TREE
    siblings: ClassVar[Draw] = "top"
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = False
    invariant: ClassVar[bool] = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon, self.delta = epsilon, delta

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        n = draft.tokens.shape[1]
        x = p.double()
        entropy = torch.special.entr(x).sum(-1)  # [B, N + 1]
        threshold = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        before = [[node + 1 for node in t.parents] + [0] * (n - len(t)) for t in draft.trees]
        parents = upload(torch.tensor(before, dtype=torch.int64).view(len(before), n), p.device)
        likely = x[torch.arange(len(x), device=p.device).unsqueeze(1), parents, draft.tokens]
        kept = (likely > threshold.gather(1, parents)).tolist()  # a host sync
        paths = [_longest(k, t) for k, t in zip(kept, draft.trees, strict=True)]
        ends = torch.tensor([path[-1] + 1 if path else 0 for path in paths])
        at = upload(ends, p.device).unsqueeze(1)
        u = noise.target.gather(1, row_depths(draft, p.device).gather(1, at)).squeeze(1)
        row = p.gather(1, at.unsqueeze(-1).expand(-1, 1, p.shape[-1])).squeeze(1)
        return Verdict.of(paths, n, categorical(row, u))


def _longest(kept: list[bool], tree: Tree) -> list[int]:
    """The longest path of kept nodes; the first of several."""
    whole = list[bool]()
    for node, parent in enumerate(tree.parents):  # parents come first
        whole.append(kept[node] and (parent < 0 or whole[parent]))
    deepest = max((i for i, w in enumerate(whole) if w), key=lambda i: tree.depths[i], default=-1)
    path = list[int]()
    while deepest >= 0:
        path.append(deepest)
        deepest = tree.parents[deepest]
    return path[::-1]
