"""Benchmarks measure what they say: prompts, formula, ballast."""

from __future__ import annotations

import pytest
import torch

import outpace
from outpace import SamplingParams, Stats
from outpace.bench.ballast import add_ballast
from outpace.bench.compare import compare, expected_speedup
from outpace.bench.prompts import held_out_prompts
from outpace.models import inspect_checkpoint, load_model
from outpace.training.corpus import standard_library


def test_prompts_come_from_held_out_files_only():
    prompts = held_out_prompts(20)
    assert len(set(prompts)) == 20
    held = [f.text for f in standard_library(held_out=True)]
    assert all(any(p in text for text in held) for p in prompts)
    assert all(len(p) <= 700 and "def " in p for p in prompts)
    with pytest.raises(outpace.OptionError, match="were asked for"):
        held_out_prompts(100_000)


def test_the_formula_is_the_papers():
    """Equal α_i: (1 - α^(K+1)) / ((1 - α)(Kc + 1)); worked: α = 0.7, K = 5 gives 2.94 tokens."""
    stats = Stats(rounds=10**6, drafted_rounds=10**6, draft_steps=5 * 10**6)
    reach = 1e6
    for _ in range(5):
        stats.reached.append(int(reach))
        reach *= 0.7
        stats.accepted_at.append(int(reach))
    for c, expected in ((0.1, 2.941 / 1.5), (0.0, 2.941)):
        assert expected_speedup(stats, c) == pytest.approx(expected, rel=1e-3)
    assert expected_speedup(stats, 0.1, 0.25) == pytest.approx(2.941 / 1.25, rel=1e-3)
    assert expected_speedup(Stats(rounds=3), 0.1) == 1.0


def test_rounds_without_a_draft_and_short_ones_promise_less():
    """Every other round drafts nothing: no more than half of what is accepted comes about."""
    stats = Stats()
    for _ in range(50):
        stats.count(2, 2, 3, 2, ended=True)
        stats.count(0, 0, 1, 0)
    assert expected_speedup(stats, 0.1) == pytest.approx(stats.tokens_per_pass / 1.1)
    for _ in range(100):
        stats.count(1, 1, 2, 1, ended=True)  # nothing was tried at depth 2
    assert stats.alpha == (1.0, 1.0)
    assert expected_speedup(stats, 0.1) == pytest.approx(2.0 / 1.1)


def test_comparison_counts(pair):
    generator = outpace.load(str(pair / "target"), str(pair / "draft"), 2, dtype="float32")
    params = SamplingParams(max_new_tokens=6, eos_token_ids=())
    found = compare(generator, ["for i", "def"], params, repeats=2)
    assert [r.mode for r in found.rows] == ["draft only", "target only", "speculative"]
    assert [r.tokens for r in found.rows] == [12, 12, 12]
    assert found.rows[1].speedup == 1.0
    assert found.identical == found.prompts == 2
    assert found.rows[2].stats.emitted == 24
    assert found.cost > 0
    with pytest.raises(outpace.OptionError, match="the draft model has 512"):
        compare(generator, ["x" * 600], params)
    with pytest.raises(outpace.OptionError, match="give --drafter"):
        compare(outpace.load(str(pair / "target"), None), ["x"], params)


def test_a_comparison_runs_past_the_end_of_text(pair):
    """EOS would make runs of different length; the speculative generator has one, too."""
    generator = outpace.load(str(pair / "target"), str(pair / "draft"), 2, dtype="float32")
    plain = generator.generate("for i", max_new_tokens=6, eos_token_ids=())
    generator.eos_token_ids = plain.token_ids[1:2]
    assert len(generator.generate("for i", max_new_tokens=6).token_ids) < 6
    found = compare(generator, ["for i"], SamplingParams(max_new_tokens=6), repeats=1)
    assert [r.tokens for r in found.rows] == [6, 6, 6]
    assert found.identical == 1
    plain, fast = (row.stats for row in found.rows[1:])  # of one run each: medians are it
    assert found.decoding == pytest.approx(
        (plain.round_seconds / 6) / (fast.round_seconds / 6), rel=1e-9
    )
    assert found.to_dict()["decoding_speedup"] == found.decoding
    steps = fast.draft_seconds / fast.draft_steps
    assert found.cost == pytest.approx(steps * plain.rounds / plain.target_seconds, rel=1e-9)


def test_ballast_changes_cost_and_nothing_else(pair, tmp_path):
    add_ballast(pair / "target", tmp_path / "heavy", 400)
    light, heavy = (
        load_model(inspect_checkpoint(f), "float32", "cpu")
        for f in (pair / "target", tmp_path / "heavy")
    )
    assert heavy.config.mlp_size == 400
    tokens = torch.arange(2, 30).unsqueeze(0)
    outs = [
        m.forward(tokens, torch.arange(28).unsqueeze(0), m.new_cache(1, 64), [0]).logits
        for m in (light, heavy)
    ]
    assert torch.allclose(*outs, atol=1e-5)
    assert outpace.load(str(tmp_path / "heavy")).generate("def", max_new_tokens=2).token_ids
    with pytest.raises(outpace.OptionError, match="must exceed"):
        add_ballast(pair / "target", tmp_path / "thin", 10)


def test_texts_of_one_repeat_are_forgotten_before_the_next(pair):
    """Else a drafter that remembers would draft them by heart; without forgetting it does."""
    generator = outpace.load(str(pair / "target"), "suffix", None, dtype="float32", max_batch=1)
    params = SamplingParams(max_new_tokens=40)

    def accepted(repeats):
        found = compare(generator, ["def naïve", "for i"], params, repeats)
        return found.rows[-1].stats.accepted

    once = accepted(1)
    assert accepted(3) == 3 * once
    generator.engine.drafter.forget = lambda: None
    assert accepted(3) > 3 * once
