"""Temperature, top-k, top-p and min-p against slow readable twins, row by row."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import SamplingParams
from outpace.sampling import Warp
from twins import law

CPU = torch.device("cpu")
logits = st.lists(
    st.one_of(st.integers(-3, 3), st.floats(-30, 30, allow_nan=False)), min_size=2, max_size=7
)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.05, 0.5, 1.0, 2.0, 1e6]),
    top_k=st.sampled_from([None, 1, 2, 3, 50]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
)


def near_a_boundary(row: list[float], s: SamplingParams) -> bool:
    """Whether rounding may decide top-p or min-p: some mass is within 1e-9 of the threshold."""
    ranked = sorted(law(row, SamplingParams(temperature=s.temperature, top_k=s.top_k)))[::-1]
    masses = [sum(ranked[:n]) for n in range(1, len(ranked) + 1)]
    ratios = [x / ranked[0] for x in ranked]
    return any(abs(m - s.top_p) < 1e-9 for m in masses) or any(
        0 < abs(r - s.min_p) < 1e-9 for r in ratios
    )


@given(st.lists(st.tuples(logits, params), min_size=1, max_size=4))
def test_a_batch_equals_the_twin(batch):
    width = min(len(row) for row, _ in batch)
    rows = [row[:width] for row, _ in batch]
    settings = [s for _, s in batch]
    out = Warp(settings, width, CPU)(torch.tensor(rows, dtype=torch.float64).unsqueeze(1))
    for got, row, s in zip(out[:, 0], rows, settings, strict=True):
        assert abs(float(got.sum()) - 1) < 1e-9
        if not near_a_boundary(row, s):
            assert torch.allclose(got, torch.tensor(law(row, s), dtype=torch.float64), atol=1e-9)


@given(logits, params)
def test_alone_equals_among_others(row, s):
    x = torch.tensor(row, dtype=torch.float32).reshape(1, 1, -1)
    alone = Warp([s], len(row), CPU)(x)
    others = [SamplingParams(), SamplingParams(temperature=1.3, top_k=2, top_p=0.5, min_p=0.1)]
    among = Warp([*others, s], len(row), CPU)(x.repeat(3, 1, 1))[2:]
    assert torch.allclose(alone, among, atol=1e-6)
    assert torch.equal(alone, Warp([*others, s], len(row), CPU).select([2])(x))


def test_bf16_logits_become_fp32_rows():
    x = torch.randn(1, 2, 50).to(torch.bfloat16)
    p = Warp([SamplingParams(temperature=0.7, top_p=0.9)], 50, CPU)(x)
    assert p.dtype == torch.float32
    assert torch.allclose(p.sum(-1), torch.ones(1, 2), atol=1e-5)


def test_impossible_tokens_stay_impossible():
    x = torch.tensor([[[0.0, -math.inf, 1.0]]])
    for s in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.3, top_p=0.99)):
        assert Warp([s], 3, CPU)(x)[0, 0, 1] == 0


def test_extreme_parameters_stay_laws():
    """fp32 cannot hold these; they are argmax, not NaN."""
    x = torch.tensor([[[1.0, 3.0, 2.0]]])
    for s in (
        SamplingParams(temperature=1e-46),
        SamplingParams(temperature=1.0, top_p=1e-50),
        SamplingParams(temperature=1e-300, top_p=1e-300, top_k=2),
    ):
        assert Warp([s], 3, CPU)(x).tolist() == [[[0.0, 1.0, 0.0]]]
