"""Rotary position embeddings and the scalings that Llama-family checkpoints use.

Su et al., "RoFormer", 2021. Scalings: linear (Chen et al., 2023), Llama 3.1's
piecewise one, and YaRN (Peng et al., 2023, equations 17 to 24).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError


def inverse_frequencies(
    rope: Mapping[str, Any], head_dim: int, context_length: int
) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` and the factor on cosine and sine.

    Args:
        rope: `rope_type`, `rope_theta` and what the type needs.

    Raises:
        UnsupportedModelError: a scaling whose frequencies depend on the length
            seen so far (they would change under tokens already cached).
    """
    theta = float(rope.get("rope_theta", 10000.0))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponent
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, theta, head_dim, context_length)
    raise UnsupportedModelError(
        f"rope_type {kind!r} changes its frequencies with the length of the text"
    )


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by the factor, short ones stay, a ramp lies between."""
    factor = float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    turns = original * plain / (2 * math.pi)  # turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(
    plain: Tensor, rope: Mapping[str, Any], theta: float, head_dim: int, context_length: int
) -> tuple[Tensor, float]:
    original = rope.get("original_max_position_embeddings") or context_length
    factor = float(rope.get("factor") or context_length / original)
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns this often within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((ramp - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * stretch + plain * (1 - stretch)
    attention = rope.get("attention_factor")
    if attention is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        if scale and scale_all:
            attention = _magnitude(factor, scale) / _magnitude(factor, scale_all)
        else:
            attention = _magnitude(factor, 1.0)
    return frequencies, float(attention)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rotation_table(
    inverse: Tensor, factor: float, positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Cosine and signed sine for `rotate`, `[positions, 2, 1, head_dim]`."""
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.unsqueeze(2).to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotate the pairs (i, i + D/2) of `[..., D]`; the sine's first half carries the sign."""
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)
