"""SiLU: a row gets the same bits however many there are, wherever threads divide the work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outpace.models.silu import _calls, silu

ROWS = (1, 2, 3, 5, 9, 33)
WIDTHS = (40, 1280, 7680, 8200, 14341, 33000, 36864)
"""With whole vectors and without, of one thread and of more than one already alone."""


def gate(rows, width, dtype):
    """As the decoder has it: the left half of each row of a wider block."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 2 * width, generator=generator).to(dtype).chunk(2, 1)[0]


def one_by_one(x, rule):
    return torch.cat([rule(row) for row in torch.split(x, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_a_row_does_not_depend_on_its_company(threads, width, dtype):
    torch.set_num_threads(threads)
    for rows in ROWS:
        x = gate(rows, width, dtype)
        assert torch.equal(silu(x), one_by_one(x, silu)), rows
        torch.testing.assert_close(silu(x), (x.double() * x.double().sigmoid()).to(dtype))


def test_divided_anywhere_it_would():
    torch.set_num_threads(3)
    same = []
    for rows in ROWS:
        x = gate(rows, 14341, torch.float32)
        same.append(torch.equal(F.silu(x), one_by_one(x, F.silu)))
    assert not all(same)


def test_threads_share_what_falls_on_whole_vectors():
    assert _calls(5, 7680, threads=2) == [5]
    assert _calls(512, 8192, threads=16) == [512]
    assert _calls(5, 7681, threads=2) == [4, 1]  # four rows are one thread's work
    assert _calls(3, 40960, threads=3) == [3]
    assert _calls(3, 40001, threads=2) == [1, 1, 1]
