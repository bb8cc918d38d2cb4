"""Memory for weights in large pages.

A step walks over all weights, and the processor has to translate the address of
every page of them: of 2 MB there are 512 times fewer than of 4 KB. The system
gives large pages to whoever asks, where it can; where it cannot, all works the
same.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_SIZE = 2**26
"""Bytes that are asked for at a time; of what is not used only the first page takes memory."""

_LINE = 64
"""Bytes at whose multiples a tensor begins: those of a cache line."""


class Arena:
    """Keeps copies of tensors side by side."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor on the CPU; it keeps alive what was asked for with it."""
        size = tensor.numel() * tensor.element_size()
        taken = -(-size // _LINE) * _LINE
        if taken > len(self._free):
            self._free = _pages(max(taken, _SIZE))
        mine, self._free = self._free[:size], self._free[taken:]
        return mine.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _pages(size: int) -> Tensor:
    """So many bytes, in large pages if there are any."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
