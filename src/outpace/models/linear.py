"""Linear layers whose rows do not depend on how many rows there are.

A decoding step multiplies 1 to 16 rows with weights it reads from memory.
On CPUs prepacked weights make that two to five times faster than `F.linear`,
and each row's result is the same, bit for bit, whatever else is computed with
it, wherever that can be had. Who packs depends on the weight:

- fp32 that half precision holds as well (most checkpoints are bf16): FBGEMM
  keeps it in half precision and multiplies in fp32. Half the memory, and
  nearly half the time, for what is the same function.
- other fp32, if small: MKL. A call of oneDNN costs as much as multiplying with
  300,000 weights.
- other fp32, and bf16: oneDNN, in fp32 only if it computes rows alike.

None of them promises that about rows, and oneDNN does not keep it for every
size: it depends on the processor, and on both dimensions of the weight. So it
is tried, size by size, before a weight is packed. Where nobody can pack
`F.linear` does the work.
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

_TRIAL_AT_MOST = 2**25
"""Elements of a weight that is made up to try how rows come out, at most."""

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


def agreeing_rows(
    pack: Packing, size_out: int, size_in: int, dtype: torch.dtype = torch.float32
) -> float:
    """Up to how many rows at once each gets the bits it gets alone, by weights packed so here.

    inf if that is so of all numbers that are tried, and 0 if weights of this size
    cannot be packed so. It is tried once per size and process.
    """
    most = 512 if pack is pack_half else max(512, _TRIAL_AT_MOST // size_in)
    settings = torch.get_num_threads(), torch.backends.quantized.engine
    with _TRIAL:
        return _try_rows(pack, min(size_out, most), size_in, dtype, *settings)


@cache
def _try_rows(
    pack: Packing, size_out: int, size_in: int, dtype: torch.dtype, threads: int, engine: str
) -> float:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

    weight, x = draw(size_out, size_in).half().float(), draw(512, size_in)
    half = size_in // 2
    weight[:, half : 2 * half] = -weight[:, :half].flip(1)
    weight, x = weight.to(dtype), x.to(dtype)
    try:
        multiply = pack(weight, None)
        near = 1e-3 if dtype == torch.float32 else 1e-2
        product = F.linear(x[:64].float(), weight.float())
        if not torch.allclose(multiply(x)[:64].float(), product, rtol=near, atol=1e-3):
            return 0
        # Every term and its opposite: a sum is what rounding left, in the order it was done in.
        # In bf16, other sums hide their order in all but one of 60,000 outputs.
        x[:, half : 2 * half] = x[:, :half].flip(1)
        single = torch.cat([multiply(row) for row in torch.split(x[:64], 1)])
        agree = 1
        for n in (*range(2, 34), 47, 64, 80, 128, 512):
            if not torch.equal(multiply(x[:n])[:64], single[:n]):
                return agree
            agree = n
        return math.inf
    except (AttributeError, RuntimeError):  # no such operator in this build, or not for this CPU
        return 0


def _pack(weight: Tensor, bias: Tensor | None) -> tuple[Packed, float, int]:
    """What multiplies, up to how many rows alike, and the bytes of an element."""
    size = weight.element_size()
    if not prepacking_available(weight.device, weight.dtype):
        return lambda x: F.linear(x, weight, bias), 1, size
    kind = *weight.shape, weight.dtype
    packings: list[Packing] = [pack_onednn]
    if weight.dtype == torch.float32:
        large = weight.numel() > _MKL_AT_MOST
        packings = [pack_onednn, pack_mkl] if large else [pack_mkl, pack_onednn]
        half = weight.numel() >= _HALF_AT_LEAST and math.isinf(agreeing_rows(pack_half, *kind))
        if half and fits_half(weight):
            return pack_half(weight, bias), math.inf, torch.half.itemsize
    rows, pack = 0.0, packings[0]
    for other in packings:
        agreeing = agreeing_rows(other, *kind)
        if agreeing > rows:
            rows, pack = agreeing, other
        if math.isinf(rows):
            break
    if not rows:
        return lambda x: F.linear(x, weight, bias), 1, size
    return pack(weight, bias), rows, size


class Linear:
    """y = x Wᵀ + b for x `[rows, in]`, W `[out, in]`."""

    agreeing_rows: float
    """Up to how many rows at once each gets the bits it gets alone."""
    weight_bytes: int
    """Memory that W takes."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed, self.agreeing_rows, size = _pack(weight, bias)
        self.weight_bytes = size * weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return self._packed(x)
