"""Coupled draws: draft and target race with the same noise, and whatever the target wins is said.

Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024, algorithm 3. Per request and position every token
has one exponential time E_i; the drafter proposes argmin E_i/q_i, the target
says argmin E_i/p_i, and the round goes on while they are the same. Law: the
target's, because E_i are independent and the target's winner is what is
emitted. What is said follows from target and seed alone: no drafter and no K
changes it. A drafter that draws so is accepted at least (1 - TV)/(1 + TV) of
the time, near 1 - TV and more than by `match`; one that does not is accepted as
often as it happens to say the target's token.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..kernels import Rule
from ..sampling import race
from ..types import Draft, Draw, Law, PointMass, Rows, Shape
from .base import Noise, Verdict, row_depths, without_tensors
from .follow import judge


class CoupledVerifier:
    """Exact for chains and trees of any law; the text depends on target and seed alone."""

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Rows)
    takes: ClassVar[Shape] = Shape.TREE
    siblings: ClassVar[Draw] = "without"
    takes_sampling: ClassVar[bool] = True
    coupled: ClassVar[bool] = True
    invariant: ClassVar[bool] = True

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        assert noise.keys is not None
        if verdict := without_tensors(Rule.COUPLED, p, draft, noise):
            return verdict
        return judge(race(p, noise.keys, row_depths(draft, p.device)), draft)
