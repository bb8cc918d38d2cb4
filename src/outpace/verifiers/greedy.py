"""Greedy verification: follow the target's argmax down the tree.

At temperature 0 the target's law is a point mass, and every exact rule
becomes this one: a child is kept iff it is the argmax after its parent (Stern
et al., 2018, section 3). It reads nothing but the largest entry of each row,
takes chains and trees of any law, and uses no noise.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..sampling import argmax
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict
from .follow import judge


class GreedyVerifier:
    """Exact at temperature 0; the engine refuses it for requests that sample."""

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.TREE
    siblings: ClassVar[Draw] = "top"
    takes_sampling: ClassVar[bool] = False
    coupled: ClassVar[bool] = False
    invariant: ClassVar[bool] = True

    def __call__(self, p: Tensor, draft: Draft, noise: Noise | None = None) -> Verdict:
        """`p` may be logits: only the argmax of each row is read."""
        return judge(argmax(p), draft)
