"""Weight-only quantisation: matrices in 8 or 4 bits, everything else as it is.

A weight is rounded to the nearest multiple of a scale, symmetrically around 0:
with 8 bits one scale per output, with 4 bits one per output and 32 inputs.
Embeddings, norms and activations are not touched, and the head, which decides
between tokens, never has fewer than 8 bits. A quantised model is another
target with a law of its own; decoding from it is as exact as from any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a model are rounded.

    Attributes:
        bits: 8 or 4.
        group: inputs that share a scale; None is all of them.
    """

    bits: int
    group: int | None

    @property
    def bytes(self) -> float:
        """Memory per parameter, with the scales of 32 bits of its group."""
        return self.bits / 8 + (4 / self.group if self.group else 0.0)

    @property
    def of_head(self) -> Quantization:
        """How the head is rounded."""
        return QUANTIZATIONS["int8"]


QUANTIZATIONS = {"int8": Quantization(8, None), "int4": Quantization(4, 32)}


def choose_quantization(name: str | None) -> Quantization | None:
    """By its name.

    Raises:
        OptionError: there is no such thing.
    """
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise OptionError(
            f"unknown quantization {name!r}: use {' or '.join(QUANTIZATIONS)}, or leave it out"
        )
    return QUANTIZATIONS[name]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight as values `[out, in]` int8 times scales `[out, groups]` fp32."""

    values: Tensor
    scales: Tensor
    group: int

    @classmethod
    def of(cls, weight: Tensor, how: Quantization) -> Quantized:
        """Round a weight `[out, in]`."""
        out, size = weight.shape
        group = how.group or size
        w = F.pad(weight.float(), (0, -size % group)).view(out, -1, group)
        most = 2 ** (how.bits - 1) - 1
        scales = w.abs().amax(-1).div_(most).clamp_min_(torch.finfo(torch.float32).tiny)
        values = w.div_(scales.unsqueeze(-1)).round_().view(out, -1)[:, :size]
        return cls(values.to(torch.int8), scales, group)

    def weight(self) -> Tensor:
        """The weight `[out, in]` that it stands for, fp32."""
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values * scales
