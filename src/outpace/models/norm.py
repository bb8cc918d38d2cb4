"""Root mean square norm (Zhang and Sennrich, 2019), fused where PyTorch does not fuse it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    For bf16 on a CPU, `F.rms_norm` is a chain of ten small kernels. Layer norm
    is one. Over [x, -x] the mean is 0 and the variance mean(x²), so the first
    half of its result is the RMS norm, rounded in the same places.
    """

    def __init__(self, weight: Tensor | None, size: int, eps: float, like: Tensor) -> None:
        self._weight, self._size, self._eps = weight, size, eps
        self._mirrored = like.device.type == "cpu" and like.dtype == torch.bfloat16
        self._double = None
        if self._mirrored and weight is not None:
            self._double = torch.cat([weight, weight], -1)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._mirrored:
            return F.rms_norm(x, (self._size,), self._weight, self._eps)
        mirrored = torch.cat([x, -x], -1)
        out = F.layer_norm(mirrored, (2 * self._size,), self._double, None, self._eps)
        return out[..., : self._size]
