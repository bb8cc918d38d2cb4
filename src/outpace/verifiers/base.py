"""The contract of a verifier: a pure function that decides what one round emits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ..types import Draft, Law


@dataclass(frozen=True, slots=True)
class Noise:
    """Uniforms on [0, 1), float64, for one round of B sequences.

    Attributes:
        accept: `[B, N]`, one per draft node.
        target: `[B, N + 1]`; entry d is for the token emitted at depth d + 1.
    """

    accept: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits: the accepted path, then one more token.

    Attributes:
        path: `[B, D]` int64 node indices from the root down, -1 behind the end.
        accepted: `[B]` int64, the path's length.
        token: `[B]` int64, the correction (a draft token was rejected) or the
            bonus (the path ended at a leaf).
    """

    path: Tensor
    accepted: Tensor
    token: Tensor


class Verifier(Protocol):
    """Pure: p rows, draft and noise in, verdict out.

    `lossless` says whether the emitted law is the target's; `laws` and
    `takes_trees` what it may be put together with.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    laws: ClassVar[tuple[type[Law], ...]]
    takes_trees: ClassVar[bool]
    takes_sampling: ClassVar[bool]

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """Decide one round.

        Args:
            p: `[B, N + 1, V]`: row 0 is the target's law after the root, row
                i + 1 after node i.
        """
        ...
