"""Sequoia's trees are set by what is measured, and the engine is as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outpace
from conformance_cases import compiled
from outpace import OptionError, SamplingParams
from outpace.drafters import EarlyExitDrafter, ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.errors import NumericsError
from outpace.models import MarkovModel
from outpace.planner import fit_tree
from outpace.trees import SequoiaBuilder, StaticBuilder, chain, k_ary
from outpace.verifiers import make_verifier

V = 5
TARGET = MarkovModel.random(V, 2, 0, sharpness=2)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * MarkovModel.random(V, 2, 1).table)
PROMPTS = [[1], [2, 0, 3]]


def engine_of(builder=None, rule="token", target=TARGET, max_batch=1) -> Engine:
    drafter = ModelDrafter(NEAR, tree=builder)
    return Engine(target, drafter, None, make_verifier(rule), max_batch)


def state(engine: Engine):
    d = engine.drafter
    options = d.builder, d.proposes, d.laws, d.k, d.draws, d.rule, d.taken
    return engine.k, engine.verifier, engine.stats, d, options, engine.busy, engine.free_slots


def text(engine: Engine, temperature: float = 0.0) -> list[int]:
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=30, eos_token_ids=())
    request = engine.submit([1], params)
    while engine.busy:
        engine.step()
    return request.emitted


@pytest.mark.parametrize("rule", ["token", "traversal", "match", "coupled", "greedy"])
def test_trees_are_set_and_the_engine_is_as_it_was(rule):
    builder = SequoiaBuilder(6, 3)
    engine = engine_of(builder, rule)
    before, counted = state(engine), replace(engine.stats)
    fits = fit_tree(engine, PROMPTS, tokens=12)
    assert state(engine) == before
    assert engine.stats == counted
    assert builder.trees == tuple(fit.choice.tree for fit in fits)
    assert [fit.temperature for fit in fits] == [0.0, builder.temperature]
    for fit, tree in zip(fits, builder.trees, strict=True):
        assert len(tree) == 6
        assert tree.depth <= 3
        assert fit.replayed == fit.acceptance.expected_tokens(tree)
    assert text(engine) == text(Engine(TARGET))
    assert engine.stats.accepted > 0


def test_where_nothing_pays_nothing_is_drafted():
    builder = SequoiaBuilder(None, 3)
    engine = engine_of(builder)
    builder.trees = (chain(0), k_ary([2]))
    assert text(engine) == text(Engine(TARGET))
    assert engine.stats.proposed == 0
    text(engine, 1.0)
    assert engine.stats.proposed > 0


def test_another_builder_may_be_fitted_than_the_drafters_own():
    """Even where the drafter's states are taken up by the target otherwise."""
    for engine in (
        engine_of(StaticBuilder(k_ary([2]))),
        engine_of(),
        Engine(compiled(), EarlyExitDrafter(1), 2),
    ):
        before, builder = state(engine), SequoiaBuilder(4, 2)
        fit_tree(engine, PROMPTS, tokens=6, builder=builder)
        assert len(builder.trees) == 2
        assert state(engine) == before
        assert text(engine) == text(Engine(engine.target))


class Fails(MarkovModel):
    """Breaks down after so many passes over trees."""

    passes = 5

    def forward(self, *args, **options):
        self.passes -= 1
        out = super().forward(*args, **options)
        return out if self.passes > 0 else type(out)(out.logits * torch.nan)


@pytest.mark.parametrize("passes", [3, 9, 40, 60])
def test_an_error_leaves_no_request_and_no_other_tree(passes):
    """Wherever it happens; those that wait for a slot are dropped, too."""
    target = Fails(TARGET.table)
    builder = SequoiaBuilder(4, 2)
    engine = engine_of(builder, target=target)
    before = state(engine)
    target.passes = passes
    with pytest.raises(NumericsError):
        fit_tree(engine, PROMPTS, tokens=12)
    assert state(engine) == before
    assert builder.trees == ()
    target.passes = 10**6
    fit_tree(engine, PROMPTS, tokens=6)
    assert text(engine) == text(Engine(TARGET))


def test_a_prompt_that_does_not_fit_leaves_no_other_behind():
    engine = Engine(TARGET, ModelDrafter(NEAR, tree=SequoiaBuilder(4)), max_len=20)
    with pytest.raises(outpace.ContextLengthError):
        fit_tree(engine, [[1], [1] * 30])
    assert not engine.busy


def test_what_cannot_be_fitted_is_refused():
    engine = engine_of(SequoiaBuilder(4, 2))
    with pytest.raises(OptionError, match="not known yet"):
        text(engine)
    engine.submit([1], SamplingParams())
    with pytest.raises(OptionError, match="the engine is busy"):
        fit_tree(engine, PROMPTS)
    for drafter in (None, NgramDrafter(1)):
        with pytest.raises(OptionError, match="a drafter that runs a model"):
            fit_tree(Engine(TARGET, drafter), PROMPTS)
    with pytest.raises(OptionError, match="no Sequoia tree to fit: load it with tree='sequoia'"):
        fit_tree(engine_of(StaticBuilder(k_ary([2]))), PROMPTS)
    with pytest.raises(OptionError, match="no prompt"):
        fit_tree(engine_of(SequoiaBuilder(4)), [])


def test_the_shipped_pair_is_fitted_when_it_is_loaded(monkeypatch):
    """From names to text, which is plain decoding's."""
    monkeypatch.setattr("outpace.assembly.PROMPTS", ("def f(x):", "The harbour"))
    fit = outpace.assembly.fit_tree
    monkeypatch.setattr(
        "outpace.assembly.fit_tree", lambda *args, **more: fit(*args, **more | {"tokens": 8})
    )
    generator = outpace.load("demo", "demo-draft", tree="sequoia:4")
    builder = generator.engine.drafter.builder
    assert [len(tree) for tree in builder.trees] == [4, 4]
    options = {"max_new_tokens": 24, "eos_token_ids": ()}
    fast = generator.generate("def read(path):", **options)
    assert fast.token_ids == outpace.load("demo").generate("def read(path):", **options).token_ids
    assert fast.stats.accepted > 0
    assert generator.engine.stats.rounds == fast.stats.rounds
