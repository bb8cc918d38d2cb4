"""Linear layers whose rows do not depend on how many rows there are.

A decoding step multiplies 1 to 16 rows with weights it reads from memory.
On CPUs prepacked weights make that two to five times faster than `F.linear`,
and each row's result is the same, bit for bit, whatever else is computed with
it. Who packs depends on the weight:

- fp32 that half precision holds as well (most checkpoints are bf16): FBGEMM
  keeps it in half precision and multiplies in fp32. Half the memory, and
  nearly half the time, for what is the same function.
- other fp32, if small: MKL. A call of oneDNN costs as much as multiplying with
  300,000 weights.
- other fp32, and bf16: oneDNN. (Rows are the same in bf16 where the processor
  has bf16 instructions.)

Elsewhere `F.linear` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

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


_MKL_AT_MOST = 2**21
"""With more elements than this oneDNN is as fast for few rows, and faster for many."""

_HALF_AT_LEAST = 400_000
"""With fewer elements than this MKL is faster than FBGEMM: memory is not what takes time."""

_TRIED_AT_ONCE = 2**23
"""Elements of a weight whose copies in half precision are compared at once."""

_ROWS_HINT = 64
"""MKL packs for about this many rows; packed for one, it rounds differently from row to row."""

_TRIAL = Lock()
"""Layers are packed side by side; what one of them tries the others wait for."""

Packed = Callable[[Tensor], Tensor]
"""x `[rows, in]` to x Wᵀ + b `[rows, out]`."""

Packing = Callable[[Tensor, Tensor | None], Packed]
"""W `[out, in]` and b `[out]` to what multiplies with them."""


def pack_onednn(weight: Tensor, bias: Tensor | None) -> Packed:
    """fp32 or bf16, packed by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    multiply: Any = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def pack_mkl(weight: Tensor, bias: Tensor | None) -> Packed:
    """fp32, packed by MKL."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    multiply: Any = torch.ops.mkl._mkl_linear.default
    shape = weight.new_empty(1).expand(weight.shape)  # is asked for its shape only
    return lambda x: multiply(x, packed, shape, bias, x.shape[0])


def pack_half(weight: Tensor, bias: Tensor | None) -> Packed:
    """fp32, kept in half precision by FBGEMM, in the upper part of its range."""
    scale = _half_scale(weight)
    packed = torch.ops.quantized.linear_prepack_fp16((weight * scale).contiguous(), bias)
    multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default
    back = 1 / scale  # both are powers of 2: nothing is rounded
    return lambda x: multiply(x * back, packed)


def _half_scale(weight: Tensor) -> float:
    """The power of 2 that takes the largest magnitude to [2¹⁴, 2¹⁵), within [2⁻³², 2³²]."""
    low, high = map(float, weight.aminmax())
    exponent = math.frexp(max(-low, high))[1]
    return math.ldexp(1.0, max(-32, min(15 - exponent, 32)))


def fits_half(weight: Tensor) -> bool:
    """Whether half precision holds an fp32 weight: to 2⁻³⁹ of its largest magnitude.

    So it is with weights that come from bf16 (it has fewer bits than half
    precision, and of its range little is used) or from half precision.
    """
    scale = _half_scale(weight)
    for part in torch.split(weight, max(1, _TRIED_AT_ONCE // weight.shape[1])):
        scaled = part * scale
        error = float(scaled.half().float().sub_(scaled).abs_().max())
        if not error <= 2**-25:  # nor is it where something is no number
            return False
    return True


def rows_agree(pack: Packing, size_out: int, size_in: int) -> bool:
    """Whether weights of this size can be packed so here, and whether a row then gets the same
    bits however many rows there are.

    All but very small ones do on the processors that were tried. As nothing
    promises it, it is tried again, once per size and process.
    """
    if pack is pack_half:  # works through blocks of a few outputs, whatever their number
        size_out = min(size_out, 512)
    settings = torch.get_num_threads(), torch.backends.quantized.engine
    with _TRIAL:
        return _try_rows(pack, size_out, size_in, *settings)


@cache
def _try_rows(pack: Packing, size_out: int, size_in: int, threads: int, engine: str) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

    weight, x = draw(size_out, size_in).half().float(), draw(512, size_in)
    try:
        multiply = pack(weight, None)
        if not torch.allclose(multiply(x), F.linear(x, weight), rtol=1e-3, atol=1e-3):
            return False
        single = torch.cat([multiply(row) for row in torch.split(x[:64], 1)])
        counts = (*range(2, 34), 47, 64, 80, 128, 512)
        return all(torch.equal(multiply(x[:n])[:64], single[:n]) for n in counts)
    except (AttributeError, RuntimeError):  # no such operator in this build, or not for this CPU
        return False


def _pack(weight: Tensor, bias: Tensor | None) -> Packed:
    if not prepacking_available(weight.device, weight.dtype):
        return lambda x: F.linear(x, weight, bias)
    if weight.dtype == torch.float32:
        size = weight.shape
        if weight.numel() >= _HALF_AT_LEAST and rows_agree(pack_half, *size) and fits_half(weight):
            return pack_half(weight, bias)
        if weight.numel() <= _MKL_AT_MOST and rows_agree(pack_mkl, *size):
            return pack_mkl(weight, bias)
    return pack_onednn(weight, bias)


class Linear:
    """y = x Wᵀ + b for x `[rows, in]`, W `[out, in]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = _pack(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x)
