"""Sample and match: draw the target's own token at every row, and go on while it was drafted.

What is emitted is always the target's draw, with the noise of the position it
is for: the very token that plain decoding draws there with the same seed.
So a seeded text depends on target and seed alone, neither on the drafter nor
on K. The price is acceptance: a token that was drawn from q is kept with
probability Σ p·q, where token verification keeps Σ min(p, q). A draft that is
certain (an argmax, an n-gram) loses nothing.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..kernels import Rule
from ..sampling import categorical
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict, row_depths, without_tensors
from .follow import judge


class MatchVerifier:
    """Exact for chains and trees of any law, and bit for bit the same as plain decoding."""

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.TREE
    siblings: ClassVar[Draw] = "top"
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = False
    invariant: ClassVar[bool] = True

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if verdict := without_tensors(Rule.MATCH, p, draft, noise):
            return verdict
        u = noise.target.gather(1, row_depths(draft, p.device))  # [B, N + 1]
        return judge(categorical(p, u), draft)
