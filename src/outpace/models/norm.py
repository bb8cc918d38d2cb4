"""Root mean square norm (Zhang and Sennrich, 2019), in few kernels where PyTorch takes many.

On a CPU `F.rms_norm` is a chain of up to ten small kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        weight: `[n]`, or `[..., n]` for x whose last dimensions are these.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        make = _fused
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            make = _by_length
        elif weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            make = _mirrored
        self._norm = make(weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


def _by_length(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """With n elements: x / sqrt(|x|² + n * eps) * (sqrt(n) * weight).

    Every kernel rounds correctly, so that none rounds the last elements of a
    tensor, which do not fill a vector, in another way.
    """
    n = weight.shape[-1]
    scaled, floor = weight * math.sqrt(n), n * eps

    def apply(x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
        return (x / length.square_().add_(floor).sqrt_()).mul_(scaled)

    return apply


def _mirrored(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """By layer norm, which is one kernel: over [x, -x] the mean is 0 and the variance mean(x²),
    so the first half of its result is the RMS norm, rounded in the same places."""
    n = weight.shape[-1]
    inner = torch.cat([weight, weight]) if weight.dim() == 1 else None

    def apply(x: Tensor) -> Tensor:
        out = F.layer_norm(torch.cat([x, -x], -1), (2 * n,), inner, None, eps).narrow(-1, 0, n)
        return out if inner is not None else out * weight

    return apply


def _fused(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    shape, inner = weight.shape[-1:], weight if weight.dim() == 1 else None

    def apply(x: Tensor) -> Tensor:
        out = F.rms_norm(x, shape, inner, eps)
        return out if inner is not None else out * weight

    return apply
