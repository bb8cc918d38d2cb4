"""Draws and residuals: tensors and explicit noise in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
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


def without_replacement(
    p: Tensor, scores: Tensor, count: int, draw: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Draw several indices per row, each from what those before it have left.

    The order in which Gumbel noise ranks tokens has this law, too (Kool et al.,
    "Stochastic beams and where to find them", 2019, section 2). Where nothing is left the
    next ones are those with the largest scores, and certain.

    Args:
        p: `[..., V]`, rows sum to 1.
        scores: `[..., V]`.
        draw: gives `[...]` indices of rows `[..., V]`, for the j-th draw.

    Returns:
        Indices `[..., count]`, and the rows `[..., count, V]` that they were drawn from.
    """
    left, taken = p, torch.zeros_like(p, dtype=torch.bool)
    tokens, rows = [], []
    for j in range(count):
        mass = left.sum(-1, keepdim=True, dtype=torch.float64)
        best = argmax(scores.masked_fill(taken, -torch.inf)).unsqueeze(-1)
        certain = torch.zeros_like(left).scatter_(-1, best, 1.0)
        row = torch.where(mass > 0, (left / mass).to(p.dtype), certain)
        token = draw(row, j).unsqueeze(-1)
        tokens.append(token)
        rows.append(row)
        taken = taken.scatter(-1, token, True)
        left = left.masked_fill(taken, 0)
    return torch.cat(tokens, -1), torch.stack(rows, -2)


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

    def children(
        self, p: Tensor, scores: Tensor, nodes: Tensor, depth: int, replace: bool
    ) -> tuple[Tensor, Tensor]:
        """Several tokens behind each row of p `[B, F, V]`.

        Args:
            scores: `[B, F, V]`; see `without_replacement`.
            nodes: `[B, F, m]` their indices in the draft.
            depth: 0 for the first tokens behind the context.
            replace: whether they are drawn with replacement.

        Returns:
            Tokens `[B, F, m]`, and rows `[B, F, m, V]` that they were drawn from.
        """
        batch, rows, count = nodes.shape
        library = kernels.loaded(p, scores)
        if (keys := self.keys) is not None:
            if library is not None:
                first = keys.first + depth
                return kernels.children(library, p, scores, count, None, keys.seeds, first)
            depths = nodes.new_full((batch, rows), depth)
            return without_replacement(p, scores, count, lambda left, _: race(left, keys, depths))
        assert self.uniforms is not None
        u = self.uniforms.gather(1, nodes.flatten(1)).view(nodes.shape)
        if replace:
            each = p.unsqueeze(2).expand(-1, -1, count, -1)
            return categorical(each, u), each
        if library is not None:
            return kernels.children(library, p, scores, count, u)
        return without_replacement(p, scores, count, lambda left, j: categorical(left, u[..., j]))

    def select(self, rows: Tensor) -> DraftNoise:
        """The same for some of the sequences `[M]` int64."""
        return DraftNoise(
            None if self.uniforms is None else self.uniforms[rows],
            None if self.keys is None else self.keys.select(rows),
        )
