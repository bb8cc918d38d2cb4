"""What only a CUDA device can show: graphs, bf16, and a round without a wait."""

from __future__ import annotations

import pytest
import torch

import outpace
from outpace.models.graphs import GraphedDecoder
from outpace.models.lean import LeanDecoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

TOKENS = 300
"""Enough to cross the end of a bucket."""


def load(drafter="demo-draft", k=4, **options):
    return outpace.load("demo", drafter, k, device="cuda", **options)


def generate(generator, prompts="def main(argv):\n    ", **options):
    return generator.generate(prompts, max_new_tokens=TOKENS, eos_token_ids=(), **options)


@pytest.fixture
def graphs(recwarn):
    """That nothing fell back."""
    yield
    assert not [w for w in recwarn if "CUDA graphs" in str(w.message)]


def test_graphs_are_the_default(graphs):
    generator = load()
    assert isinstance(generator.engine.target, GraphedDecoder)
    assert isinstance(load(compile=False).engine.target, LeanDecoder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("k", [1, 2, 4, 8, 12])
def test_greedy_speculation_is_plain_decoding_to_the_last_bit(graphs, dtype, k):
    plain = generate(load(None, dtype=dtype), temperature=0)
    fast = generate(load(k=k, dtype=dtype), temperature=0)
    assert fast.token_ids == plain.token_ids
    assert [e.logprob for e in fast.tokens] == [e.logprob for e in plain.tokens]


@pytest.mark.parametrize(
    "drafter",
    ["ngram", "suffix:branching=yes", "recycling", "lookahead", "early-exit:7", "skip:6-8"],
)
def test_no_drafter_changes_greedy_text(graphs, drafter):
    """In fp32, where greedy text hardly ever hangs on the last bits."""
    plain = generate(load(None, dtype="float32"), temperature=0)
    fast = generate(load(drafter, None, dtype="float32"), temperature=0)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted > 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_seed_survives_speculation_by_match(graphs, dtype):
    plain = generate(load(None, dtype=dtype, verifier="match"), temperature=0.8, seed=3)
    fast = generate(load(dtype=dtype, verifier="match"), temperature=0.8, seed=3)
    assert fast.token_ids == plain.token_ids


def test_graphs_compute_what_the_lean_decoder_does(graphs):
    """In fp32, where greedy text hardly ever hangs on the last bits."""
    for batch in (1, 5):
        prompts = [f"def f{i}(x):\n    return {i} + " for i in range(batch)]
        fast = generate(load(dtype="float32"), prompts, temperature=0)
        slow = generate(load(dtype="float32", compile=False), prompts, temperature=0)
        assert [r.token_ids[:50] for r in fast] == [r.token_ids[:50] for r in slow]


def test_one_wait_per_round(graphs):
    """Drafting and scoring only queue work; the round waits once, for what it emits."""
    generator = load()
    generate(generator, temperature=0)
    engine = generator.engine
    with generator.stream("import os", max_new_tokens=64, temperature=0, eos_token_ids=()):
        engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                draft = engine.draft(engine.running)
                engine.score(engine.running, draft)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_stays_where_it_is(graphs):
    generator = load()
    generate(generator, temperature=0)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        generate(generator, temperature=0)
    assert torch.cuda.memory_allocated() <= before
