"""Every drafter with every verifier it may be put together with, alone and in ragged batches.

At temperature 0 the tokens are plain decoding's. Sampled, the first tokens
have the target's law, or with a lossy rule another: a χ² test with a false-alarm
rate of 1e-6 each (seeds are fixed). What may not be put together is refused.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from scipy import stats

import outpace
from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.verifiers import VERIFIERS, make_verifier

V = 4
TARGET = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * MarkovModel.random(V, 2, 1).table)

DRAFTERS = {
    "draft model": lambda: ModelDrafter(NEAR),
    "narrow draft model": lambda: ModelDrafter(MarkovModel.random(V - 1, 1, 2)),
    "wide draft model": lambda: ModelDrafter(MarkovModel.random(V + 2, 3, 3)),
}
SAMPLES = 3000
PAIRS = list(itertools.product(DRAFTERS, VERIFIERS))


def run(engine: Engine, requests) -> list[list[int]]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


def make(drafter: str, verifier: str, k: int, max_batch: int) -> Engine:
    return Engine(TARGET, DRAFTERS[drafter](), k, make_verifier(verifier), max_batch)


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
@pytest.mark.parametrize("max_batch", [1, 8])
def test_greedy_is_plain(drafter, verifier, max_batch):
    requests = [
        ([i % V] * (1 + i % 5), SamplingParams(max_new_tokens=10 + 7 * (i % 6), eos_token_ids=()))
        for i in range(20)
    ]
    plain = run(Engine(TARGET, max_batch=1), requests)
    for k in (1, 2, 5):
        assert run(make(drafter, verifier, k, max_batch), requests) == plain


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
@pytest.mark.parametrize("max_batch", [1, 8])
def test_sampled_texts_have_the_targets_law(drafter, verifier, max_batch):
    engine = make(drafter, verifier, 3, max_batch)
    params = SamplingParams(temperature=1.0, max_new_tokens=3, eos_token_ids=())
    if not engine.verifier.takes_sampling:
        with pytest.raises(outpace.IncompatibleError):
            engine.submit([1], params)
        return
    found = Counter(
        tuple(out) for out in run(engine, [([1], params.with_seed(s)) for s in range(SAMPLES)])
    )
    law = {
        (a, b, c): float(TARGET.table[0, 1, a] * TARGET.table[1, a, b] * TARGET.table[a, b, c])
        for a, b, c in itertools.product(range(V), repeat=3)
    }
    observed = [found[w] for w in law]
    expected = [SAMPLES * p for p in law.values()]
    if not engine.verifier.lossless:
        assert stats.chisquare(observed, expected).pvalue < 1e-6
        return
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    draft_law = [
        SAMPLES * float(NEAR.table[0, 1, a] * NEAR.table[1, a, b] * NEAR.table[a, b, c])
        for a, b, c in law
    ]
    assert stats.chisquare(observed, draft_law).pvalue < 1e-6  # the test can tell
