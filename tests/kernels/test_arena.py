"""Copies side by side: none runs into another, whatever their sizes."""

from __future__ import annotations

import pytest
import torch

from outpace.kernels import Arena, arena

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.uint8]


@pytest.mark.parametrize("size", [2**26, 256])  # one piece for all, and pieces smaller than some
def test_copies_side_by_side(monkeypatch, size):
    monkeypatch.setattr(arena, "_SIZE", size)
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randint(0, 100, (rows, 7), generator=generator).to(dtype)
        for rows in (1, 5, 100)
        for dtype in DTYPES
    ]
    given += [torch.arange(12.0).view(3, 4).t(), torch.arange(20)[::3]]  # strided
    memory = Arena()
    kept = [memory.keep(tensor) for tensor in given]
    del memory
    for tensor, copy in zip(given, kept, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, tensor)
    kept[0].fill_(1)
    assert all(torch.equal(copy, tensor) for tensor, copy in zip(given[1:], kept[1:], strict=True))
