"""Linear layers whose rows do not depend on how many rows there are.

On CPUs oneDNN's prepacked weights serve fp32 and bf16: two to five times
faster than `F.linear` for the 1 to 16 rows of a decoding step, and each row's
result is the same, bit for bit, whatever else is computed with it (in bf16:
where the processor has bf16 instructions). Elsewhere `F.linear` does the work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware has bf16 matrix instructions.

    Without them bf16 is emulated: slower than fp32, and what a row becomes
    depends on the number of rows.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    read = getattr(torch.cpu, "get_capabilities", None)
    if read is None:
        return bool(torch.cpu._is_avx512_bf16_supported())
    return any(read().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def prepacking_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN takes prepacked weights of this type here."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = x Wᵀ + b for x `[..., in]`, W `[out, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = prepacking_available(weight.device, weight.dtype)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return F.linear(x, self._weight, self._bias)
