"""Every drafter with every verifier it may be put together with, alone and in ragged batches.

At temperature 0 the tokens are plain decoding's. Sampled, the rules whose texts follow
from target and seed give plain decoding's texts, token by token; by the others the
first tokens have the target's law, or with a lossy rule another: a χ² test with a
false-alarm rate of 1e-6 each (noise is fixed). Where drafts follow from other requests, those
that ask for a seed are verified by a rule of the first kind, and give its texts. What may not
be put together is refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

import chi_square
import outpace
from broken_rules import (
    ForgetsTheRejected,
    LeavesUnnormalised,
    MatchesTheNextRow,
    TakesTheNextRow,
)
from conformance_cases import DRAFTERS, PROMPT, V
from outpace import SamplingParams
from outpace.engine import Engine
from outpace.types import Independent, Rows, Shape
from outpace.verifiers import VERIFIERS, make_verifier

ALSO = {
    "n-gram trees",
    "suffix",
    "early exit, lean",
    "adapter",
    "int8",
    "tli trees",
    "early exit trees",
    "int4 trees",
}
"""Drafters that differ little from others: they are not run alone once more."""

FOR_TREES = {"kseq", "traversal", "multipath"}
BRANCHED = {
    "draft model",
    "n-gram trees",
    "draft trees",
    "draft paths",
    "dynamic trees",
    "early exit trees",
}
"""Rules that on chains are others, and the drafters that they are run with."""

CLOSE = {"int4", "int8"}
"""Drafters so near to the target that rejections are too rare for a wrong residual to show.

With K = 1 every second token is from behind a draft, where another broken rule shows."""

CONTROLS = dict.fromkeys(
    [*CLOSE, "draft model", "draft paths", "cascade"], TakesTheNextRow
) | dict.fromkeys(
    ["draft trees", "dynamic trees", "early exit trees", "recycling"], LeavesUnnormalised
)
"""The broken rule that shows best; for others it is `ForgetsTheRejected`."""

SAMPLES = {1: 320, 8: 1000}  # by batch
MORE = 3000
"""Of a close drafter in batches."""
STARTS = {1: (PROMPT,), 8: (PROMPT, PROMPT[:5])}
PAIRS = [
    (d, v) for d, v in itertools.product(DRAFTERS, VERIFIERS) if d in BRANCHED or v not in FOR_TREES
]
SIZED = [(d, v, b) for d, v in PAIRS for b in (1, 8) if b == 8 or d not in ALSO]


def run(engine: Engine, requests, asked: bool = True) -> list[list[int]]:
    """Texts; seeds are asked for, or else but the noise is theirs."""
    submitted = []
    for prompt, params in requests:
        own = params if asked else replace(params, seed=None)
        submitted.append(engine.submit(prompt, own, noise=params.seed))
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


def refusal(drafter, rule) -> str | None:
    """What is said where a pair would not be exact."""
    alone = drafter.proposes is Shape.CHAIN
    if not alone and Independent in rule.laws and Rows in drafter.laws:
        return "is not exact for drafts of"
    if not alone and rule.coupled and Independent in drafter.laws:
        return "race with the same noise"
    return "takes .* only" if drafter.proposes > rule.takes else None


def make(drafter: str, verifier: str, k: int, max_batch: int) -> Engine:
    """The engine, unless the pair must be refused."""
    target, build_drafter = DRAFTERS[drafter]
    made, rule = build_drafter(), make_verifier(verifier)
    if message := refusal(made, rule):
        with pytest.raises(outpace.IncompatibleError, match=message):
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
    """Prompts and outputs of different lengths."""
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
def law_of(target, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Of the first three tokens behind a prompt, by the target itself."""
    law = {(): 1.0}
    for _ in range(3):
        law = {
            (*said, token): mass * float(p)
            for said, mass in law.items()
            for token, p in enumerate(row_behind(target(), [*prompt, *said]))
        }
    return law


def row_behind(model, ids) -> torch.Tensor:
    cache_ = model.new_cache(1, 64)
    out = model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache_, [0])
    return out.logits[0, -1].double().softmax(-1)


def samples_of(drafter: str, max_batch: int) -> int:
    """As many as the test needs to tell a broken rule."""
    return MORE if drafter in CLOSE and max_batch == 8 else SAMPLES[max_batch]


def k_of(drafter: str) -> int:
    return 1 if drafter in CLOSE else 3


def p_value(engine: Engine, target, max_batch: int, samples: int) -> float:
    """Of first three tokens, under the target's law; in batches of prompts of two lengths, and
    of requests that end at different times."""
    starts, sent = STARTS[max_batch], []
    for i in range(samples):
        params = SamplingParams(temperature=1.0, seed=i, eos_token_ids=(), max_new_tokens=3 + i % 4)
        sent.append((starts[i // 3 % len(starts)], params))
    found = [Counter[tuple[int, ...]]() for _ in starts]
    for (start, _), words in zip(sent, run(engine, sent, asked=False), strict=True):
        found[starts.index(start)][tuple(words[:3])] += 1
    laws = (law_of(target, tuple(start)) for start in starts)
    return chi_square.p_value(*map(chi_square.chi_square, found, laws))


@pytest.mark.parametrize(("drafter", "verifier", "max_batch"), SIZED)
def test_greedy_is_plain(drafter, verifier, max_batch):
    proposed = 0
    for k in (1, 2, 5) if verifier == "token" else (4,):
        engine = make(drafter, verifier, k, max_batch)
        said = run(engine, requests(0.0, 12, 10))
        assert said == plain(DRAFTERS[drafter][0], "greedy", 0.0, 12, 10)
        proposed += engine.stats.proposed
    assert proposed > 60


@pytest.mark.parametrize(("drafter", "verifier", "max_batch"), SIZED)
def test_sampled_texts_are_plain_decodings_or_have_its_law(drafter, verifier, max_batch):
    drawn = verifier not in ("match", "coupled")
    engine = make(drafter, verifier, k_of(drafter) if drawn else 3, max_batch)
    rule, target = engine.verifier, DRAFTERS[drafter][0]
    if not rule.takes_sampling:
        with pytest.raises(outpace.IncompatibleError):
            engine.submit([1], SamplingParams(temperature=1.0))
        return
    if not drawn:
        assert run(engine, requests(1.0, 24, 12)) == plain(target, verifier, 1.0, 24, 12)
        assert engine.stats.accepted > 60
        return
    differs = not rule.lossless and drafter == "draft model" and max_batch == 8
    samples = samples_of(drafter, max_batch) if rule.lossless or differs else 100
    p = p_value(engine, target, max_batch, samples)
    assert engine.stats.proposed > samples / 3
    if rule.lossless and engine._steady is not None:  # behind all these others
        steady = engine._steady.name
        assert run(engine, requests(1.0, 24, 12)) == plain(target, steady, 1.0, 24, 12)
    if rule.lossless:
        assert p > 1e-6
    elif differs:
        assert p < 1e-6


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_tests_can_tell(drafter):
    """The law under a broken rule by ratio, texts under a broken rule that matches."""
    target, build_drafter = DRAFTERS[drafter]
    made = build_drafter()
    if drafter in ("int4 trees", "cascade of own layers"):  # which are close, too
        engine = Engine(target(), made, 3, MatchesTheNextRow(), 8)
        assert run(engine, requests(1.0, 24, 12)) != plain(target, "match", 1.0, 24, 12)
        return
    rule = CONTROLS.get(drafter, ForgetsTheRejected)
    engine = Engine(target(), made, k_of(drafter), rule(), 8)
    assert p_value(engine, target, 8, samples_of(drafter, 8)) < 1e-6
