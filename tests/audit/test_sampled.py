"""The statistical audit finds every planted defect in the stated samples, and nobody else's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import defects
from broken_rules import (
    InvertedRatio,
    JudgesByRatio,
    NoResidual,
    NotRenormalised,
    SharedNoise,
    StopsAtTheFirst,
    WrongRowResidual,
)
from outpace import ContextLengthError, OptionError, SamplingParams
from outpace.audit import GeneratorSystem, PlainScorer, audit_samples, scorers
from outpace.audit import audit as run
from outpace.audit.statistics import MARGIN, detectable, likelihood_ratio, merge
from outpace.drafters import ModelDrafter
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.verifiers import (
    VERIFIERS,
    BlockVerifier,
    TokenVerifier,
    TypicalVerifier,
    make_verifier,
)

V = 8
TARGET = MarkovModel.random(V, 2, 0, sharpness=1.5)
DRAFT = MarkovModel(0.5 * TARGET.table + 0.5 * MarkovModel.random(V, 2, 1, sharpness=1.5).table)
PROMPTS = [[1], [2, 3]]
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=6)
SAMPLES = 4000


def generator(verifier=None, drafter=ModelDrafter, k: int = 3, eos=(), target=TARGET) -> Generator:
    rule = verifier or TokenVerifier()
    return Generator(target, drafter(DRAFT), k, eos=eos, verifier=rule, max_batch=256)


def audit(system, params=PLAIN, samples: int = SAMPLES, **options):
    if isinstance(system, Generator):
        system = GeneratorSystem(system)
    own, draft = scorers(system.generator)
    return audit_samples(system, own, PROMPTS, params, samples=samples, draft=draft, **options)


RULES = [
    (TypicalVerifier, 500),
    (NoResidual, 2000),
    (NotRenormalised, 2000),
    (SharedNoise, 4000),
    (InvertedRatio, 500),
    (WrongRowResidual, 2000),
    (StopsAtTheFirst, 1000),
    (JudgesByRatio, 2000),
]
DRAFTERS = [
    (defects.Misreporting, 2000),
    (defects.ArgmaxWithRows, 500),
    (defects.TruncatedDraw, 2000),
    (defects.DropsUnlikely, 2000),
]
ENGINES = [
    (defects.OncePerBlock, defects.PENALISED, 4000),
    (defects.DropsParameters, defects.BIASED, 500),
    (defects.LosesTheLastKey, PLAIN, 2000),
    (defects.NoiseOfTheNeighbour, PLAIN, 1000),
    (defects.DraftsWithAcceptanceNoise, PLAIN, 1000),
]


@pytest.mark.parametrize(("rule", "samples"), RULES)
def test_broken_rules_are_found(rule, samples):
    found = audit(generator(rule()))
    assert not found.sound
    assert found.samples <= samples


@pytest.mark.parametrize(("drafter", "samples"), DRAFTERS)
def test_drafts_that_were_not_drawn_from_the_law_they_report_are_found(drafter, samples):
    for rule in (TokenVerifier(), BlockVerifier()):
        found = audit(generator(rule, drafter))
        assert not found.sound
        assert found.samples <= samples


@pytest.mark.parametrize(("kind", "params", "samples"), ENGINES)
def test_broken_engines_are_found(kind, params, samples):
    """Sound ones pass with the same parameters below."""
    found = audit(defects.with_engine(kind, generator()), params)
    assert not found.sound
    assert found.samples <= samples


def test_an_end_that_is_passed_over_is_found():
    ended = generator(eos=(3,))
    assert audit(ended).sound
    found = audit(defects.IgnoresInnerEnds(ended))
    assert found.samples <= 500
    assert "behind an EOS token" in found.defects[0]
    assert "not the target's" in found.summary()


def test_noise_by_slot_shows_in_seeds_not_in_the_law():
    assert audit(generator(), samples=500).repeated == (8, 8)
    found = audit(defects.with_engine(defects.NoiseBySlot, generator()), samples=500)
    assert found.repeated[0] < 8


@pytest.mark.parametrize("name", [n for n, rule in VERIFIERS.items() if rule.lossless])
def test_sound_rules_pass(name):
    rule = make_verifier(name)
    if not rule.takes_sampling:
        return
    for params in (PLAIN, defects.PENALISED, defects.BIASED):
        found = audit(generator(rule), params, samples=600)
        assert found.sound, found.summary()
        assert found.samples == 600


def small_audits(count: int, rate: float):
    """Audits of one sound engine with samples of their own."""
    target = MarkovModel.random(5, 1, 3)
    draft = MarkovModel(0.5 * target.table + 0.5 * MarkovModel.random(5, 1, 4).table)
    params = SamplingParams(temperature=1.0, max_new_tokens=2)
    engine = Generator(target, ModelDrafter(draft), 2, max_batch=256)
    system = GeneratorSystem(engine)
    own, other = scorers(engine)
    return [
        audit_samples(
            system,
            own,
            [[0]],
            params,
            samples=256,
            draft=other,
            seed=10_000 * (i + 1),
            false_alarm=rate,
        ).sound
        for i in range(count)
    ]


def test_a_sound_engine_passes_200_times_in_200():
    assert all(small_audits(200, 1e-4))


def test_the_rate_of_false_alarms_is_kept_and_is_not_zero():
    """At a rate of 0.3 that many are accused, less what Bonferroni gives away."""
    accused = small_audits(80, 0.3).count(False)
    assert accused > 0
    assert stats.binom.sf(accused - 1, 80, 0.3) > 1e-3


def test_what_the_power_promises_is_found():
    """A law that is off by the total variation that is called detectable, 50 times."""
    n, share, degrees = 2000, 1e-4, 7
    off = detectable(n, degrees, share)
    law = torch.full((8,), 1 / 8).double()
    shifted = law + off / 4 * torch.tensor([1, -1, 1, -1, 1, -1, 1, -1])
    assert 0.5 * float((law - shifted).abs().sum()) == pytest.approx(off)
    critical = stats.chi2.isf(share, degrees)
    found = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drawn = torch.multinomial(shifted, n, replacement=True, generator=generator)
        observed = torch.bincount(drawn, minlength=8).double().numpy()
        seen, wanted = merge(np.append(observed, 0), np.append(law.numpy(), 0))
        found += likelihood_ratio(seen, wanted) > critical
    assert found >= 38  # 45 are expected


def test_cells_that_expect_little_are_one():
    """The last entry is what has no name."""
    law = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]).double().numpy()
    counts = torch.tensor([50.0, 30, 10, 4, 6]).double().numpy()
    seen, wanted = merge(counts, law)
    assert seen.tolist() == [50, 30, 10, 10]
    assert wanted.tolist() == pytest.approx([50, 30, 10, 10])
    seen, wanted = merge(counts / 2, law)
    assert wanted.tolist() == pytest.approx([25, 15, 10])
    assert len(merge(counts / 20, law)[0]) == 0
    whole = torch.tensor([0.6, 0.4, 0.0]).double().numpy()
    assert merge(torch.tensor([6.0, 34, 0]).double().numpy(), whole)[0].tolist() == [6, 34]
    assert merge(torch.tensor([30.0, 9, 1]).double().numpy(), whole)[0].tolist() == [30, 10]


def tail(statistic, n: int, p: float, groups: int, rate: float) -> float:
    """How often a sum of statistics of two cells is significant at a rate, exactly, over it."""
    k = np.arange(n + 1.0)
    expected = np.array([n * p, n * (1 - p)])
    values = np.array([statistic(np.array([x, n - x]), expected) for x in k])
    step, width = 0.01, 1 << 16
    density = np.zeros(width)
    at = np.minimum((values / step).round().astype(int), width - 1)
    np.add.at(density, at, stats.binom.pmf(k, n, p))
    summed = np.fft.irfft(np.fft.rfft(density) ** groups)
    return float(summed[int(stats.chi2.isf(rate, groups) / step) :].sum() / rate)


@pytest.mark.parametrize("groups", [1, 20, 100])
@pytest.mark.parametrize(("n", "p"), [(1000, 0.01), (100, 0.1), (40, 0.25), (400, 0.05)])
def test_the_tail_is_what_decisions_take_it_for(n, p, groups):
    """By convolution, with the least cells there are; Pearson's statistic is the control."""

    def pearson(observed, expected):
        return ((observed - expected) ** 2 / expected).sum()

    for rate in (1e-3, 1e-6):
        assert tail(likelihood_ratio, n, p, groups, rate) < MARGIN
    if (n, p, groups) == (1000, 0.01, 1):
        assert tail(pearson, n, p, groups, 1e-6) > 10


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"samples": 0}, "samples"),
        ({"false_alarm": 0}, "false-alarm"),
        ({"false_alarm": 1.5}, "false-alarm"),
        ({"params": SamplingParams()}, "temperature"),
        ({"params": SamplingParams(temperature=1.0, stop=("a",))}, "stop strings"),
    ],
)
def test_what_cannot_be_audited_is_refused(options, word):
    engine = generator()
    params = options.pop("params", PLAIN)
    with pytest.raises(OptionError, match=word):
        audit_samples(GeneratorSystem(engine), PlainScorer(TARGET), PROMPTS, params, **options)


# --- where texts end, and where drafts do -------------------------------------------------------


def short(table, context: int) -> MarkovModel:
    return MarkovModel(table, context_length=context)


def test_texts_that_a_smaller_max_len_cuts_are_sound():
    for length in (6, 40):
        cut = Generator(TARGET, ModelDrafter(DRAFT), 3, max_batch=256, max_len=length)
        assert audit(cut, replace(PLAIN, max_new_tokens=8), 500).sound
        for full in ("stop", "error"):
            params = replace(PLAIN, max_new_tokens=2, on_context_full=full)
            for system in (cut, GeneratorSystem(cut)):
                both = ["greedy", "sampled"]
                assert run(system, PROMPTS, params, modes=both, samples=500).sound


class DropsTheBan(GeneratorSystem):
    """Leaves out what is forbidden behind a prefix."""

    def sample(self, prompt, params, seeds):
        return super().sample(prompt, replace(params, no_repeat_ngram=None), seeds)


def test_tokens_where_none_is_allowed_are_a_defect_and_no_error():
    """All eight tokens have come, and there is nothing to compare the ninth with."""
    params = replace(PLAIN, no_repeat_ngram=1, max_new_tokens=12)
    found = audit(DropsTheBan(generator()), params, 500)
    assert not found.sound
    assert "has probability 0" in found.defects[0]
    (law,) = PlainScorer(TARGET).laws([1], [(2, 3, 0, 4, 5, 6, 7, 1, 1)], params)
    assert law.any(-1).tolist() == [True] * 7 + [False] * 2


def test_a_draft_with_too_short_a_context_is_left_out_of_the_tests():
    drafter = ModelDrafter(short(DRAFT.table, 5))
    engine = Generator(TARGET, drafter, 3, max_batch=256)
    assert {t.kind for t in audit(engine, samples=500).tests} == {"tokens", "ranks"}
    with pytest.raises(ContextLengthError, match="the scoring model has 5"):
        list(scorers(engine)[1].laws([1], [(1, 2, 3, 4, 5, 6)], PLAIN))


@pytest.mark.parametrize("context", [64, 2])
def test_an_audit_of_nothing_that_was_drafted_is_no_verdict(context):
    """The rule is lossy, and would be found if it were asked."""
    drafter = ModelDrafter(short(DRAFT.table, context))
    engine = Generator(TARGET, drafter, 3, verifier=TypicalVerifier(), max_batch=256)
    params = replace(PLAIN, max_new_tokens=1 if context == 64 else 6)
    with pytest.raises(OptionError, match="nothing was drafted"):
        run(engine, [[1, 2, 3]], params, modes=["sampled"], samples=500)
    if context == 2:
        with pytest.raises(OptionError, match="no round behind a prompt"):
            run(engine, [[1, 2, 3]], params, modes=["exact"])


def test_ids_beyond_a_smaller_model_are_read_as_its_last():
    small = PlainScorer(MarkovModel.random(3, 1, 0), vocab_size=4)
    prompts = [3, 1], [2, 1]
    one, other = (next(small.laws(p, [(0, 3, 1)], PLAIN)) for p in prompts)
    assert torch.equal(one, other)
    assert (one[:, 3] == 0).all()
