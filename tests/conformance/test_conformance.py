"""Every drafter with every verifier it may be put together with, alone and in ragged batches.

At temperature 0 the tokens are plain decoding's. Sampled, the rules whose texts follow
from target and seed give plain decoding's texts, token by token; by the others the
first tokens have the target's law, or with a lossy rule another: a χ² test with a
false-alarm rate of 1e-6 each (seeds are fixed). What may not be put together is refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from scipy import stats

import outpace
from broken_rules import ForgetsTheRejected, TakesTheNextRow
from checkpoints import build
from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    EarlyExitDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    QuantizedDrafter,
    RecyclingDrafter,
    SkipDrafter,
    SLEMDrafter,
    SuffixDrafter,
    TLIDrafter,
)
from outpace.drafters.translation import Common, Words
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.models.compiled import CompiledDecoder
from outpace.models.config import LeanConfig
from outpace.models.lean import LeanDecoder
from outpace.verifiers import VERIFIERS, make_verifier
from tokenizers_of import letters

V = 4
MARKOV = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.6 * MARKOV.table + 0.4 * MarkovModel.random(V, 2, 1).table)
PROMPT = [1, 0, 2, 3, 1, 0, 2, 1, 0, 2]
OURS, THEIRS = Words(letters("abcd"), "target"), Words(letters("dxbay"), "draft")


@cache
def layered(compiled: bool):
    """A random decoder of four tokens, whose layers can run alone."""
    shape = {"vocab_size": V, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = build("Llama", shape)
    config, weights = LeanConfig.read(model.config.to_dict()), dict(model.state_dict())
    return (CompiledDecoder if compiled else LeanDecoder)(config, lambda name: weights[name])


def compiled():
    return layered(True)


def lean():
    return layered(False)


def markov():
    return MARKOV


def foreign_model():
    return MarkovModel.random(5, 2, 4)


DRAFTERS = {
    "draft model": (markov, lambda: ModelDrafter(NEAR)),
    "narrow draft model": (markov, lambda: ModelDrafter(MarkovModel.random(V - 1, 1, 2))),
    "wide draft model": (markov, lambda: ModelDrafter(MarkovModel.random(V + 2, 3, 3))),
    "n-gram": (markov, lambda: NgramDrafter(2, 1)),
    "n-gram trees": (markov, lambda: NgramDrafter(3, 3)),
    "suffix": (markov, lambda: SuffixDrafter(capacity=2000, branching=False)),
    "suffix trees": (markov, lambda: SuffixDrafter(capacity=2000, least=0.05)),
    "recycling": (markov, lambda: RecyclingDrafter(9)),
    "lookahead": (markov, lambda: LookaheadDrafter(3, 3, 2)),
    "tli": (markov, lambda: TLIDrafter(foreign_model(), Common(OURS, THEIRS), "tli")),
    "slem": (markov, lambda: SLEMDrafter(foreign_model(), OURS, THEIRS, "slem")),
    "cascade": (markov, lambda: CascadeDrafter([NgramDrafter(1, 2), ModelDrafter(NEAR)])),
    "early exit": (compiled, lambda: EarlyExitDrafter(2)),
    "early exit, lean": (lean, lambda: EarlyExitDrafter(1)),
    "skipped layers": (compiled, lambda: SkipDrafter("1-2")),
    "int4": (compiled, lambda: QuantizedDrafter("int4")),
}
ALSO = {"n-gram trees", "suffix", "early exit, lean"}
"""Drafters that differ little from others: they are not run alone once more."""

CLOSE = {"draft model", "early exit", "int4"}
"""Drafters so near to the target that rejections are too rare for a wrong residual to show."""

SAMPLES = {1: 500, 8: 2500}  # by batch
PAIRS = list(itertools.product(DRAFTERS, VERIFIERS))
SIZED = [(d, v, b) for d, v in PAIRS for b in (1, 8) if b == 8 or d not in ALSO]


def run(engine: Engine, requests) -> list[list[int]]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


def make(drafter: str, verifier: str, k: int, max_batch: int) -> Engine:
    """The engine, unless the pair must be refused."""
    target, build_drafter = DRAFTERS[drafter]
    made, rule = build_drafter(), make_verifier(verifier)
    if made.proposes_trees and not rule.takes_trees:
        with pytest.raises(outpace.IncompatibleError, match="takes chains only"):
            Engine(target(), made, k, rule, max_batch)
        pytest.skip("refused, as it must be")
    return Engine(target(), made, k, rule, max_batch)


@cache
def plain(target, verifier: str, temperature: float, count: int, new: int):
    """What plain decoding says by the same rule."""
    return run(
        Engine(target(), None, 0, make_verifier(verifier)), requests(temperature, count, new)
    )


def requests(temperature: float, count: int, new: int):
    """Prompts and outputs of different lengths, or the same prompt over and over."""
    params = SamplingParams(temperature=temperature, eos_token_ids=(), max_new_tokens=new)
    if new == 3:
        return [(PROMPT, params.with_seed(i)) for i in range(count)]
    return [
        (
            [*PROMPT[: 1 + i % 9], i % V],
            SamplingParams(
                temperature=temperature, seed=i, eos_token_ids=(), max_new_tokens=new + 7 * (i % 6)
            ),
        )
        for i in range(count)
    ]


@cache
def law_of(target) -> dict[tuple[int, ...], float]:
    """Of the first three tokens behind the prompt, by the target itself."""
    law = {(): 1.0}
    for _ in range(3):
        law = {
            (*said, token): mass * float(p)
            for said, mass in law.items()
            for token, p in enumerate(row_behind(target(), [*PROMPT, *said]))
        }
    return law


def row_behind(model, ids) -> torch.Tensor:
    cache_ = model.new_cache(1, 64)
    out = model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache_, [0])
    return out.logits[0, -1].double().softmax(-1)


def p_value(words, law) -> float:
    found = Counter(map(tuple, words))
    return stats.chisquare([found[w] for w in law], [len(words) * p for p in law.values()]).pvalue


@pytest.mark.parametrize(("drafter", "verifier", "max_batch"), SIZED)
def test_greedy_is_plain(drafter, verifier, max_batch):
    proposed = 0
    for k in (1, 2, 5):
        engine = make(drafter, verifier, k, max_batch)
        said = run(engine, requests(0.0, 20, 10))
        assert said == plain(DRAFTERS[drafter][0], "greedy", 0.0, 20, 10)
        proposed += engine.stats.proposed
    assert proposed > 200


@pytest.mark.parametrize(("drafter", "verifier", "max_batch"), SIZED)
def test_sampled_texts_are_plain_decodings_or_have_its_law(drafter, verifier, max_batch):
    engine = make(drafter, verifier, 3, max_batch)
    rule, target = engine.verifier, DRAFTERS[drafter][0]
    if not rule.takes_sampling:
        with pytest.raises(outpace.IncompatibleError):
            engine.submit([1], SamplingParams(temperature=1.0))
        return
    if verifier in ("match", "coupled"):
        assert run(engine, requests(1.0, 40, 12)) == plain(target, verifier, 1.0, 40, 12)
        assert engine.stats.accepted > 100
        return
    words = run(engine, requests(1.0, SAMPLES[max_batch], 3))
    assert engine.stats.proposed > len(words) / 3
    if rule.lossless:
        assert p_value(words, law_of(target)) > 1e-6
    elif drafter == "draft model" and max_batch == 8:
        assert p_value(words, law_of(target)) < 1e-6


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_test_of_the_law_can_tell(drafter):
    target, build_drafter = DRAFTERS[drafter]
    rule = TakesTheNextRow() if drafter in CLOSE else ForgetsTheRejected()
    engine = Engine(target(), build_drafter(), 3, rule, 8)
    assert p_value(run(engine, requests(1.0, SAMPLES[8], 3)), law_of(target)) < 1e-6
