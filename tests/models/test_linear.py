"""Whoever packs a weight: the product is right, and a row does not depend on its company."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch
import torch.nn.functional as F
from running import in_blocks, plain, text

from checkpoints import build
from outpace.models import inspect_checkpoint, linear, load_model
from outpace.models.linear import Linear, agreeing_rows, fits_half, pack_half, pack_mkl

SIZES = [(37, 51), (96, 64), (448, 320), (320, 960), (1280, 384), (2500, 900), (1040, 2100)]

half_works = pytest.mark.skipif(
    agreeing_rows(pack_half, 640, 640) < math.inf, reason="no half-precision weights on this CPU"
)


def weight_of(size, source):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 0.05
    return weight.to(source).float()


def rows_of(size, n=40):
    return torch.randn(n, size[1], generator=torch.Generator().manual_seed(2))


KINDS = {
    "fp32": (torch.float32, torch.float32),
    "held": (torch.bfloat16, torch.float32),  # by half precision
    "bf16": (torch.bfloat16, torch.bfloat16),
}
"""Where a weight's numbers are from, and what they are kept in."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("source", "kept"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", [*SIZES, (96, 48), (384, 1024), (512, 4096)])
def test_rows_agree_up_to_as_many_as_it_says(size, source, kept, threads):
    """How many that is depends on the processor and on the size."""
    torch.set_num_threads(threads)
    layer, x = Linear(weight_of(size, source).to(kept)), rows_of(size).to(kept)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for n in (n for n in range(1, len(x) + 1) if n <= layer.agreeing_rows):
        assert torch.equal(layer(x[:n]), alone[:n]), n


@half_works
@pytest.mark.parametrize("size", [(1280, 384), (2500, 900), (1040, 2100)])
def test_weights_kept_in_half_precision_compute_any_number_of_rows_alike(size):
    assert math.isinf(Linear(weight_of(size, torch.bfloat16)).agreeing_rows)


def error(out, *exact):
    """Relative to the product in twice the precision."""
    exact = F.linear(*(t.double() for t in exact))
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_the_product_is_that_of_fp32(size, source):
    weight, x = weight_of(size, source), rows_of(size)
    bias = weight.sum(1)
    assert error(Linear(weight, bias)(x), x, weight, bias) < 1e-6
    assert error(Linear(weight)(x), x, weight) < 1e-6


@half_works
def test_half_precision_would_show_where_it_does_not_fit():
    weight, x = weight_of((1280, 384), torch.float32), rows_of((1280, 384))
    assert error(pack_half(weight, None)(x), x, weight) > 1e-4


@half_works
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e7])
def test_half_precision_holds_any_magnitude(size):
    weight = (weight_of((1280, 384), torch.float32) * size).bfloat16().float()
    x = rows_of((1280, 384))
    assert error(pack_half(weight, None)(x), x, weight) < 1e-6


def test_all_of_a_weight_has_to_fit(monkeypatch):
    weight = weight_of((9, 64), torch.bfloat16)
    monkeypatch.setattr(linear, "_TRIED_AT_ONCE", 2 * 64)
    assert fits_half(weight)
    weight[8, 1] = 1 / 3
    assert not fits_half(weight)


def test_a_size_is_tried_once_whoever_asks():
    tried = []

    def pack(weight, bias):
        tried.append(weight.shape)
        sleep(0.05)
        return lambda x: F.linear(x, weight, bias)

    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: agreeing_rows(pack, 8, 16), range(4)))
    assert len(answers) == 1
    assert tried == [(8, 16)]


def test_what_half_precision_holds():
    weight = weight_of((64, 64), torch.float32)
    assert not fits_half(weight)
    assert fits_half(weight.half().float())
    assert fits_half(weight.bfloat16().float())
    assert fits_half(torch.zeros(3, 3))
    for magnitude in (1e-6, 1e7):  # all of it outside its range, but for a power of 2
        assert fits_half((weight * magnitude).bfloat16().float())
        assert not fits_half(weight * magnitude)
    for odd in (torch.nan, torch.inf, 1e-30, 1e30):
        weight[0, 0] = odd
        assert fits_half(weight.half().float()) == (odd == 1e-30)


def split_from(rows):
    """A packing that sums in two parts where there are this many rows."""

    def pack(weight, bias):
        weight, half = weight.float(), weight.shape[1] // 2

        def apply(x):
            kind, x = x.dtype, x.float()
            if len(x) < rows:
                return torch.stack([F.linear(row, weight, bias) for row in x]).to(kind)
            first = torch.stack([F.linear(row[:half], weight[:, :half], bias) for row in x])
            return (first + x[:, half:] @ weight[:, half:].T).to(kind)

        return apply

    return pack


depends_on_rows = split_from(5)


def is_wrong(weight, bias):
    return lambda x: F.linear(x, 1.1 * weight, bias)


def is_missing(weight, bias):
    return torch.ops.outpace.no_such_operator(weight)


@pytest.mark.parametrize("pack", [depends_on_rows, is_wrong, is_missing])
def test_a_packing_that_does_not_compute_rows_alike_is_not_used(pack, monkeypatch):
    used = []

    def works(weight, bias):
        used.append(weight)
        return lambda x: torch.stack([F.linear(row, weight, bias) for row in x])

    assert agreeing_rows(pack, 64, 96) == (4 if pack is depends_on_rows else 0)
    for name in ("pack_half", "pack_mkl"):
        monkeypatch.setattr(linear, name, pack)
    monkeypatch.setattr(linear, "pack_onednn", works)
    weight = weight_of((1000, 500), torch.bfloat16)
    assert Linear(weight).agreeing_rows == math.inf
    assert used[-1] is weight


def test_where_none_computes_rows_alike_it_says_up_to_how_many(monkeypatch):
    monkeypatch.setattr(linear, "pack_mkl", depends_on_rows)
    monkeypatch.setattr(linear, "pack_onednn", split_from(8))
    for size in ((300, 200), (1500, 1500)):  # either is asked first
        assert Linear(weight_of(size, torch.float32)).agreeing_rows == 7
    for name in ("pack_mkl", "pack_onednn"):
        monkeypatch.setattr(linear, name, is_missing)
    layer, x = Linear(weight_of((300, 200), torch.float32)), rows_of((300, 200))
    assert layer.agreeing_rows == 1
    assert error(layer(x), x, weight_of((300, 200), torch.float32)) < 1e-6


def test_an_order_of_sums_that_bf16_hides_is_found():
    """In two parts or in one, no output of ordinary numbers differs, and yet some would."""
    weight, x = weight_of((64, 96), torch.bfloat16).bfloat16(), rows_of((64, 96)).bfloat16()
    multiply = depends_on_rows(weight, None)
    assert torch.equal(multiply(x[:20]), torch.cat([multiply(x[i : i + 1]) for i in range(20)]))
    assert agreeing_rows(depends_on_rows, 64, 96, torch.bfloat16) == 4


@pytest.fixture
def packed_half(monkeypatch):
    """The sizes of all weights kept in half precision from here on."""
    sizes = []

    def spy(weight, bias):
        sizes.append(tuple(weight.shape))
        return pack_half(weight, bias)

    monkeypatch.setattr(linear, "pack_half", spy)
    monkeypatch.setattr(
        linear, "agreeing_rows", lambda pack, *_: 0 if pack is pack_mkl else math.inf
    )
    return sizes


@half_works
def test_only_large_weights_that_fit_are_kept_in_half_precision(packed_half):
    Linear(weight_of((1280, 384), torch.bfloat16))
    assert packed_half == [(1280, 384)]
    Linear(weight_of((1280, 384), torch.float32))
    Linear(weight_of((384, 384), torch.bfloat16))
    assert packed_half == [(1280, 384)]


@half_works
def test_a_bf16_checkpoint_in_fp32_keeps_logits_and_rows(tmp_path, packed_half):
    """Kept in half precision it computes what transformers computes with all 32 bits."""
    model = build("Qwen3", {"hidden_size": 640, "intermediate_size": 640, "num_key_value_heads": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((0.3 * parameter).bfloat16())
    model.save_pretrained(tmp_path)
    lean, ids = load_model(inspect_checkpoint(tmp_path), "fp32", "cpu", compile=False), text(40)
    assert packed_half.count((1280, 640)) == packed_half.count((640, 640)) == 3
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    tied = model.config.tie_word_embeddings * model.lm_head.weight.nbytes  # packed beside it
    saved = sum(2 * out * size for out, size in packed_half)
    assert lean.weight_bytes == matrices + tied - saved
    blocks = in_blocks(lean, ids, 5)
    assert (blocks - plain(model, ids)).abs().max() <= 1e-4
    assert torch.equal(blocks, in_blocks(lean, ids, 1))
