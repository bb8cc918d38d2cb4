"""Draws and residuals: tensors and explicit noise in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from .races import Keys, race

_BELOW_ONE = 1 - 2.0**-52


def law_device(device: torch.device) -> torch.device:
    """Where laws are computed and drawn from: where the model is, if that has float64.

    MPS has not, and draws in lower precision would not have the law that the
    verifier assumes; there the CPU does it.
    """
    return torch.device("cpu") if device.type == "mps" else device


def argmax(x: Tensor) -> Tensor:
    """The index of each row's first largest element, `[...]` of `[..., V]`."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(x.numpy().argmax(-1)))  # several times as fast
    return x.argmax(-1)


def categorical(p: Tensor, u: Tensor) -> Tensor:
    """Draw one index per row by inverting the distribution function.

    Args:
        p: `[..., V]`, non-negative, each row with positive mass (it need not
            sum to exactly 1: the noise is scaled by the row's mass).
        u: `[...]` uniforms on [0, 1), float64.

    Returns:
        `[...]` int64. An index with p = 0 is never drawn, as far as the running
        sum does not decrease; where p is not a number, some index.
    """
    if (library := kernels.loaded(p)) is not None:
        return kernels.draw(library, p, u)
    cdf = p.cumsum(-1, dtype=torch.float64)  # [..., V]
    # Below 1 by more than an ulp, u times the mass never rounds up to the mass.
    point = u.clamp_max(_BELOW_ONE).unsqueeze(-1) * cdf[..., -1:]
    return torch.searchsorted(cdf, point, right=True).squeeze(-1).clamp_max_(p.shape[-1] - 1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ per row, `[..., V]`, not normalised; p itself where that has no mass.

    The residual is drawn from after a rejection (Leviathan et al., 2023,
    section 2.3; Chen et al., 2023, theorem 1). It has no mass only where
    p = q, and there a rejection has probability 0 up to rounding.
    """
    rest = (p - q).clamp_min_(0)
    return torch.where((rest > 0).any(-1, keepdim=True), rest, p)


def without(p: Tensor, token: Tensor) -> Tensor:
    """The residual against a point mass at `token` `[...]`: p without it."""
    return residual(p, torch.zeros_like(p).scatter_(-1, token.unsqueeze(-1), torch.inf))


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """How the nodes of B drafts are drawn. One of the two is there.

    Attributes:
        uniforms: `[B, N]` float64 on [0, 1): each node has noise of its own.
        keys: nodes race with the very noise that the target will race with.
    """

    uniforms: Tensor | None = None
    keys: Keys | None = None

    def draw(self, p: Tensor, node: int, depth: int) -> Tensor:
        """Tokens `[B, 1]` of p `[B, 1, V]`.

        Args:
            node: its index in the draft.
            depth: 0 for the first token behind the context.
        """
        if self.keys is not None:
            return race(p, self.keys, p.new_full((len(p), 1), depth, dtype=torch.int64))
        assert self.uniforms is not None
        return categorical(p, self.uniforms[:, node : node + 1])

    def select(self, rows: Tensor) -> DraftNoise:
        """The same for some of the sequences `[M]` int64."""
        return DraftNoise(
            None if self.uniforms is None else self.uniforms[rows],
            None if self.keys is None else self.keys.select(rows),
        )
