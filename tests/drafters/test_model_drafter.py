"""The draft model: in sync after every outcome, narrower, wider, shorter than the target."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outpace
from checkpoints import ADAPTED, build
from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel, inspect_checkpoint, load_model
from outpace.models.adapter import TransformersAdapter

V = 6
GREEDY = {"max_new_tokens": 30, "eos_token_ids": ()}


def run(engine: Engine, prompt: list[int], **options) -> list[int]:
    request = engine.submit(prompt, SamplingParams(**options))
    while engine.busy:
        engine.step()
    return request.emitted


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0, 1))
def test_the_draft_cache_holds_the_context_after_every_round(k, seed, agreement):
    """Full acceptance, rejection anywhere, end of budget: what the cache holds is a prefix of
    the context, and after a full acceptance it lacks the last drafted token."""
    target = MarkovModel.random(V, 2, 0, sharpness=2)
    table = agreement * target.table + (1 - agreement) / V
    drafter = ModelDrafter(MarkovModel(table))
    engine = Engine(target, drafter, k)
    params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=40, eos_token_ids=())
    request = engine.submit([1, 2, 3], params)
    while engine.busy:
        engine.step()
        if request.slot is None:
            break
        held = drafter._cache.lengths[request.slot]
        assert held < len(request.tokens)
        assert drafter._cache.storage[0][request.slot, :held].tolist() == request.tokens[:held]
        last = request.events[-1]
        if last.provenance == "bonus" and last.depth == k + 1:
            assert held == len(request.tokens) - 2


def test_a_twin_of_the_target_is_always_accepted():
    """Any missing or stale row of the draft's cache would show as a rejection."""
    target = MarkovModel.random(V, 3, 0)
    engine = Engine(target, ModelDrafter(target), 3)
    run(engine, [1], temperature=1.0, seed=0, max_new_tokens=300, eos_token_ids=())
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("width", [V - 2, V + 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_of_other_width(width, temperature):
    """Ids the target lacks are never proposed, ids the draft lacks still come out."""
    target = MarkovModel.random(V, 2, 0, sharpness=0.5)
    drafter = ModelDrafter(MarkovModel.random(width, 2, 1))
    engine = Engine(target, drafter, 3)
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 300, "eos_token_ids": ()}
    out = run(engine, [1, V - 1], **options)
    assert max(out) <= V - 1
    if temperature:
        assert set(out) == set(range(V))
    else:
        assert out == run(Engine(target), [1, V - 1], **options)
    assert engine.stats.proposed > 0


@pytest.fixture(scope="module")
def short_draft(pair, tmp_path_factory):
    """A draft checkpoint with a context of 64 positions."""
    folder = tmp_path_factory.mktemp("short") / "draft"
    shutil.copytree(pair / "draft", folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"max_position_embeddings": 512', '"max_position_embeddings": 64')
    )
    assert inspect_checkpoint(folder).context_length == 64
    return folder


def test_a_draft_with_a_shorter_context_than_the_prompt_stays_silent(pair, short_draft):
    fast = outpace.load(str(pair / "target"), str(short_draft), 3, dtype="float32")
    plain = outpace.load(str(pair / "target"), dtype="float32")
    prompts = ["x" * 100, "for i", "y" * 50, "z" * 63]
    results = fast.generate(prompts, **GREEDY)
    assert [r.token_ids for r in results] == [
        r.token_ids for r in plain.generate(prompts, **GREEDY)
    ]
    assert results[0].stats.proposed == 0
    assert results[1].stats.proposed > 0
    assert results[2].tokens[-1].provenance == "plain"


def test_an_adapted_target_takes_a_lean_draft(pair):
    """Two runners in one engine: greedy equals plain, seeds give the same alone and together."""
    kind, options = ADAPTED["gpt2"]
    target = TransformersAdapter(build(kind, options))
    draft = load_model(inspect_checkpoint(pair / "draft"), "float32", "cpu")
    engines = [
        Engine(target, ModelDrafter(draft), 3, max_batch=4),
        Engine(target, max_batch=4),
    ]
    assert run(engines[0], [5, 6], **GREEDY) == run(engines[1], [5, 6], **GREEDY)
    params = SamplingParams(temperature=1.0, seed=5, **GREEDY)
    alone = engines[0].submit([5, 6], params)
    while engines[0].busy:
        engines[0].step()
    others = [engines[0].submit([n, 7], params.with_seed(n)) for n in range(3)]
    among = engines[0].submit([5, 6], params)
    while engines[0].busy:
        engines[0].step()
    assert among.emitted == alone.emitted
    assert len(others[0].emitted) == 30


def test_no_noise_no_draw():
    """The drafter draws from the request's noise, never from a generator of its own."""
    drafter = ModelDrafter(MarkovModel.random(V, 1, 0))
    engine = Engine(MarkovModel.random(V, 1, 1), drafter, 3)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    run(engine, [1], temperature=1.0, seed=1, max_new_tokens=20)
    assert torch.equal(before, torch.random.get_rng_state())
