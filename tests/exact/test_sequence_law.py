"""Whole sequences from the engine have the target's law, for K = 0..4; broken engines do not.

The toy target writes words of three symbols, each depending on all before it
in the word, and then a separator, certainly. So the words of one long sequence
are independent draws from a law of 27 known probabilities, and every alignment
of rounds and words occurs. A χ² test over 200,000 words decides at a false
alarm rate of 1e-6 per test (seeds are fixed, so it never flickers).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from broken_rules import SharedNoise, Sound
from defects import DropsUnlikely, Misreporting
from outpace.drafters import CascadeDrafter, ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.engine.control import Controller, Pick
from outpace.models import MarkovModel
from outpace.sampling import RequestNoise, Stream, Warp
from outpace.types import SamplingParams
from outpace.verifiers import TokenVerifier

FALSE_ALARM = 1e-6
SEPARATOR, SYMBOLS = 0, (1, 2, 3)
V = 4


def word_table(seed: int, strict: bool) -> torch.Tensor:
    """`[V, V, V, V]`: next token given the last three; `strict` forbids misplaced separators."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(V, V, V, V, generator=generator, dtype=torch.float64) ** 2 + 0.01
    if strict:
        for a, b, c in itertools.product(range(V), repeat=3):
            # What lies before the last separator must not matter.
            open_word = SEPARATOR in (a, b, c)
            if open_word:
                table[a, b, c, SEPARATOR] = 0
                if c == SEPARATOR:
                    table[a, b, c] = table[0, 0, c]
                elif b == SEPARATOR:
                    table[a, b, c] = table[0, b, c]
                table[a, b, c, SEPARATOR] = 0
            else:
                table[a, b, c] = torch.eye(V, dtype=torch.float64)[SEPARATOR]
    return table / table.sum(-1, keepdim=True)


TARGET = MarkovModel(word_table(0, strict=True), context_length=1 << 20)
DRAFT = MarkovModel(word_table(1, strict=False), context_length=1 << 20)


def word_law(temperature: float = 1.0) -> dict[tuple[int, ...], float]:
    table = TARGET.table ** (1 / temperature)
    table = table / table.sum(-1, keepdim=True)
    return {
        (a, b, c): float(table[0, 0, 0, a] * table[0, 0, a, b] * table[0, a, b, c])
        for a, b, c in itertools.product(SYMBOLS, repeat=3)
    }


def words(engine: Engine, count: int, temperature: float = 1.0, batch: int = 256) -> Counter:
    """Count words over `batch` long sequences that run together."""
    per = -(-count // batch)
    params = SamplingParams(temperature=temperature, max_new_tokens=4 * per)
    sequences = [engine.submit([SEPARATOR], params, noise=s) for s in range(batch)]
    while engine.busy:
        engine.step()
    found: Counter = Counter()
    for sequence in sequences:
        out = sequence.emitted
        assert len(out) == 4 * per
        found.update(tuple(out[i : i + 3]) for i in range(0, len(out), 4))
    return found


def p_value(found: Counter, law: dict[tuple[int, ...], float]) -> float:
    if set(found) - set(law):
        return 0.0  # impossible words
    total = sum(found.values())
    return stats.chisquare([found[w] for w in law], [total * law[w] for w in law]).pvalue


def engine(k: int, drafter=None, verifier=None) -> Engine:
    drafter = drafter or ModelDrafter(DRAFT)
    return Engine(TARGET, drafter if k else None, k, verifier, max_batch=256)


@pytest.mark.parametrize("k", range(5))
def test_words_have_the_targets_law(k):
    count = 200_000 if k == 3 else 25_000
    assert p_value(words(engine(k), count), word_law()) > FALSE_ALARM


class Adverse(Controller):
    """Who drafts for a sequence and how far follows from all that was accepted of it so far, and
    from nothing else."""

    def __init__(self, members):
        super().__init__(members, clock=lambda: 0.0)
        self.said = Counter()

    def rests(self, batch):
        return False

    def again(self, slots, budgets, left=0, late=()):
        return None

    def looks(self):
        return self._instant

    def emitted(self, slot, tokens):
        super().emitted(slot, tokens)
        self.said[slot] = self.said[slot] * 31 + tokens

    def choose(self, asks, crowded=False):
        self._learn()
        return [self._cut(self._next(ask), ask) for ask in asks]

    def _next(self, ask):
        k, which = self.said[ask.slot] % 5, self.said[ask.slot] // 5 % 3
        able = [i for i, m in enumerate(self.members) if not m.instant or i in ask.offers]
        return Pick(able[which % len(able)], k) if k else None


def test_words_have_the_law_whatever_a_controller_makes_of_what_was_accepted():
    """K from 0 to 4, and now a draft model, now what the last tokens were followed by."""
    members = [ModelDrafter(DRAFT), NgramDrafter(2)]
    adaptive = engine("auto", CascadeDrafter(members), TokenVerifier())
    adverse = Adverse(adaptive.controller.members)
    adaptive.controller = adaptive._drafting.controller = adverse
    assert p_value(words(adaptive, 25_000), word_law()) > FALSE_ALARM
    stats = adaptive.stats
    assert min(stats.lengths[k] for k in range(5)) > 1000
    assert min(stats.drafters[m.name] for m in members) > 1000


def test_words_have_the_law_at_another_temperature():
    found = words(engine(3), 25_000, temperature=0.7)
    assert p_value(found, word_law(0.7)) > FALSE_ALARM
    assert p_value(found, word_law(0.8)) < FALSE_ALARM


def test_each_row_of_a_mixed_batch_has_its_own_law():
    """Temperature, top-k and top-p differ by row; half the batch ends earlier."""
    kinds = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.9),
    ]
    mixed = engine(3)
    requests = []
    for seed in range(256):
        kind, per = kinds[seed % 4], 80 if seed % 8 < 4 else 40
        params = replace(kind, max_new_tokens=4 * per)
        requests.append(mixed.submit([SEPARATOR], params, noise=seed))
    while mixed.busy:
        mixed.step()
    for i, kind in enumerate(kinds):
        found: Counter = Counter()
        for request in requests[i::4]:
            out = request.emitted
            found.update(tuple(out[j : j + 3]) for j in range(0, len(out), 4))
        law = warped_law(kind)
        assert p_value(found, law) > FALSE_ALARM
        other = warped_law(kinds[(i + 1) % 4])
        assert p_value(found, other) < FALSE_ALARM


def warped_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Words under sampling parameters, impossible ones left out."""
    warp = Warp([params], V, torch.device("cpu"))

    def row(*context: int) -> torch.Tensor:
        return warp(TARGET.table[context].log().reshape(1, 1, V))[0, 0]

    law = {
        (a, b, c): float(row(0, 0, 0)[a] * row(0, 0, a)[b] * row(0, a, b)[c])
        for a, b, c in itertools.product(SYMBOLS, repeat=3)
    }
    return {word: p for word, p in law.items() if p > 0}


class OutOfSync(ModelDrafter):
    """After a full acceptance, believes its cache holds the last drafted token. It does not."""

    def observe(self, commits):
        full = [c.slot for c in commits if len(c.path) > self._drafted.get(c.slot, 0)]
        super().observe(commits)
        for slot in full:
            self._cache.commit(slot, (0,))


@pytest.mark.parametrize("broken", [Misreporting, DropsUnlikely])
def test_a_drafter_with_the_wrong_law_is_caught(broken):
    found = words(engine(3, broken(DRAFT)), 20_000)
    assert p_value(found, word_law()) < FALSE_ALARM


def test_shared_noise_is_caught_in_sequences():
    found = words(engine(3, verifier=SharedNoise()), 20_000)
    assert p_value(found, word_law()) < FALSE_ALARM
    assert p_value(words(engine(3, verifier=Sound()), 20_000), word_law()) > FALSE_ALARM


def test_streams_that_share_noise_are_caught(monkeypatch):
    """Drafts drawn with the acceptance noise: the engine's own keys are tested, too."""
    honest = RequestNoise.at

    def shared(self, stream, position, indices):
        return honest(self, Stream.ACCEPT, position, indices)

    monkeypatch.setattr(RequestNoise, "at", shared)
    assert p_value(words(engine(3), 20_000), word_law()) < FALSE_ALARM


def test_a_stale_draft_cache_costs_acceptance_only():
    """A drafter cannot break the law; one in sync with a copy of the target never errs."""
    sloppy = engine(3, OutOfSync(DRAFT))
    assert p_value(words(sloppy, 20_000), word_law()) > FALSE_ALARM
    rates = []
    for kind in (ModelDrafter, OutOfSync):
        twin = engine(2, kind(TARGET))  # rounds that do not begin with a word
        words(twin, 2_000)
        rates.append(twin.stats.acceptance_rate)
    assert rates[0] == 1.0
    assert rates[1] < 0.99
