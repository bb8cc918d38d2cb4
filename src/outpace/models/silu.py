"""SiLU whose rows do not depend on how many rows there are.

On a CPU elementwise work is divided between threads wherever it falls, and the
last values of a part, which do not fill a vector, get another exponential.
So a call takes as many rows as are divided between whole vectors, or not at
all: then the number of rows decides about no value. (As long as the runtime
grants as many threads as it was set to, which OMP_THREAD_LIMIT can prevent.)
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_UNDIVIDED = 32768
"""Fewer values than this are one thread's work."""

_VECTORS = 64
"""Values the widest step of a kernel takes: two vectors of 32 values of bf16."""


def silu(x: Tensor) -> Tensor:
    """x · σ(x) of `[rows, n]`, a part of each row of a wider block."""
    if x.device.type != "cpu":
        return F.silu(x)
    calls = _calls(*x.shape, torch.get_num_threads())
    if len(calls) <= 1:
        return F.silu(x)
    return torch.cat([F.silu(part) for part in torch.split(x, calls)])


@cache
def _calls(rows: int, width: int, threads: int) -> list[int]:
    """Rows per call."""
    if not _whole(width, width, threads):  # then a row is divided as it is when alone
        return [1] * rows
    most = (_UNDIVIDED - 1) // width if width % _VECTORS else rows
    calls = []
    while rows:
        tried = range(min(rows, most), 0, -1)
        calls.append(next(n for n in tried if _whole(n * width, width, threads)))
        rows -= calls[-1]
    return calls


def _whole(values: int, width: int, threads: int) -> bool:
    """Whether no thread begins or ends its part of the values inside a vector of a row."""
    if values < _UNDIVIDED:
        return True
    with_openmp = _ceil(values, min(threads, _ceil(values, _UNDIVIDED)))
    with_torch_pool = max(_UNDIVIDED, _ceil(values, threads))
    return not any(n % _VECTORS for n in (width, with_openmp, with_torch_pool))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
