"""Root mean square norm (Zhang and Sennrich, 2019), in few kernels where PyTorch takes many."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    On a CPU `F.rms_norm` is a chain of up to ten small kernels. For fp32 four
    suffice: with n elements the divisor is hypot(|x|, sqrt(n * eps)) / sqrt(n).
    For bf16, which rounds between them, layer norm is one: over [x, -x] the mean
    is 0 and the variance mean(x²), so the first half of its result is the RMS
    norm, rounded in the same places.

    Args:
        weight: `[n]`, or `[..., n]` for x whose last dimensions are these.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps
        self._size = weight.shape[-1]
        on_cpu = weight.device.type == "cpu"
        self._mirrored = on_cpu and weight.dtype == torch.bfloat16
        self._floor: Tensor | None = None
        if on_cpu and weight.dtype == torch.float32:
            self._floor = torch.tensor(math.sqrt(self._size * eps))
            self._weight = weight * math.sqrt(self._size)
        self._inner = self._weight if weight.dim() == 1 else None
        if self._mirrored and self._inner is not None:
            self._inner = torch.cat([weight, weight], -1)

    def __call__(self, x: Tensor) -> Tensor:
        if self._floor is not None:
            length: Tensor = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
            return (x / length.hypot_(self._floor)).mul_(self._weight)
        if self._mirrored:
            mirrored, size = torch.cat([x, -x], -1), 2 * self._size
            out = F.layer_norm(mirrored, (size,), self._inner, None, self._eps)
            out = out.narrow(-1, 0, self._size)
        else:
            out = F.rms_norm(x, (self._size,), self._inner, self._eps)
        return out if self._inner is not None else out * self._weight
