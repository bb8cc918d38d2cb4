"""Rounds of a whole engine, enumerated: sound ones to 1e-12, and every planted defect beyond."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import defects
import outpace
from broken_rules import (
    WRONG_BLOCKS,
    WRONG_LAW,
    AcceptsImpossible,
    InvertedRatio,
    NoResidual,
    SharedNoise,
)
from outpace import OptionError, SamplingParams
from outpace.audit import audit_rounds, enumeration, scorers
from outpace.audit.enumeration import TOP, intervals
from outpace.audit.exact import STATES
from outpace.drafters import ModelDrafter
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.sampling import DraftNoise
from outpace.trees import chain
from outpace.types import Draft, PointMass
from outpace.verifiers import (
    BlockVerifier,
    CoupledVerifier,
    MatchVerifier,
    TokenVerifier,
    TypicalVerifier,
)

EXACT = 1e-12
ALONE = ("prompt",)
PROMPT = [1]
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=8)
SOUND = [TokenVerifier, BlockVerifier, MatchVerifier]


def tables(vocab: int, sharpness: float = 1.5):
    """A target and a draft near it."""
    target, other = (MarkovModel.random(vocab, 2, seed, sharpness=sharpness) for seed in (0, 1))
    return target, MarkovModel(0.5 * target.table + 0.5 * other.table)


def generator(
    rule=TokenVerifier, drafter=ModelDrafter, k=2, vocab=3, slots=16, models=None, **more
):
    target, draft = models or tables(vocab)
    proposer = drafter(draft) if drafter else None
    return Generator(target, proposer, k, verifier=rule(), max_batch=slots, **more)


def run_by(kind, slots=16) -> Generator:
    """A generator with another engine."""
    made = generator(slots=slots)
    e = made.engine
    made.engine = kind(e.target, defects.untaken(e.drafter), e.k, e.verifier, max_batch=slots)
    return made


def audit(engine: Generator, params=PLAIN, prompts=(PROMPT,), **options):
    own, _ = scorers(engine)
    return audit_rounds(engine.engine, own, prompts, params, **options)


class Certain(defects.ArgmaxWithRows):
    """Drafts its likeliest tokens, and says so."""

    def draft(self, contexts, budgets, warp, noise):
        return replace(super().draft(contexts, budgets, warp, noise), law=PointMass())


class Ragged(ModelDrafter):
    """How many tokens are drafted follows from the text, sometimes none."""

    def draft(self, contexts, budgets, warp, noise):
        allowed = [min(b, c.tokens[-1]) for b, c in zip(budgets, contexts, strict=True)]
        return super().draft(contexts, allowed, warp, noise)


class Unkeyed(ModelDrafter):
    """Draws with noise of its own."""

    def draft(self, contexts, budgets, warp, noise):
        own = torch.rand(len(contexts), max(budgets), dtype=torch.float64)
        return super().draft(contexts, budgets, warp, DraftNoise(own))


class StopsBehindUnlikely(ModelDrafter):
    """Ends the draft with a token of low confidence, which it keeps."""

    def draft(self, contexts, budgets, warp, noise):
        drawn = super().draft(contexts, budgets, warp, noise)
        sure = drawn.law.q.gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1) > 0.3
        kept = (sure.cumprod(1).sum(1) + 1).tolist()
        trees = tuple(chain(min(n, len(t))) for n, t in zip(kept, drawn.trees, strict=True))
        return Draft(drawn.tokens, drawn.law, trees)


# --- sound engines -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize(("vocab", "k"), [(3, 3), (4, 2)])
def test_sound_rules_are_exact_and_every_draft_is_seen(rule, vocab, k):
    found = audit(generator(rule, k=k, vocab=vocab), prompts=(PROMPT, [2, 0]))
    assert found.sound
    assert found.error < found.tolerance == EXACT
    assert (found.rounds, found.drafts) == (6, 6 * vocab**k)
    assert "6 rounds" in found.summary()


@pytest.mark.parametrize("rule", SOUND)
@pytest.mark.parametrize("drafter", [Certain, Ragged, StopsBehindUnlikely])
def test_sound_drafters_are_exact_whatever_they_propose(rule, drafter):
    found = audit(generator(rule, drafter), behind=("prompt", "full acceptance"))
    assert found.sound, found.summary()
    assert drafter is not Certain or found.drafts == found.rounds == 2


@pytest.mark.parametrize(
    "params",
    [
        defects.PENALISED,
        defects.BIASED,
        SamplingParams(temperature=0.6, top_k=2, presence_penalty=1.0, no_repeat_ngram=3),
        SamplingParams(temperature=1.5, top_p=0.7, repetition_penalty=1.3, transform_draft=False),
    ],
)
def test_every_row_is_held_against_its_own_prefix(params):
    found = audit(generator(), params, behind=("prompt", "full acceptance"))
    assert found.sound, found.summary()


def test_rounds_behind_the_end_of_a_text_are_left_out():
    engine = generator(eos=(0, 1, 2))  # every one
    assert audit(engine).rounds == 1
    with pytest.raises(OptionError, match="no round behind a rejection"):
        audit(engine, behind=("rejection", "full acceptance"))


ALIKE = SamplingParams(temperature=1.0, top_k=3, logit_bias=dict.fromkeys(range(70, 73), 30.0))
"""Two random checkpoints choose from the same three tokens."""


@pytest.mark.parametrize("params", [replace(PLAIN, top_k=2), ALIKE])
def test_a_small_checkpoint_is_exact_within_single_precision(params, pair):
    engine = outpace.load(pair / "target", pair / "draft", 2, dtype="float32")
    prompts = [engine.tokenizer.encode("for i")]
    found = audit(engine, params, prompts, tokenizer=engine.tokenizer)
    assert found.sound, found.summary()
    assert found.tolerance == 1e-5
    assert found.drafts == 3 * params.top_k**2
    engine.engine.verifier = TypicalVerifier()
    assert (audit(engine, params, prompts).error > 1e-2) == (params is ALIKE)


class Company(MarkovModel):
    """Rows of blocks are off by what single precision may be, as it declares."""

    declared = 2.0**-19

    def doubt(self, batch, rows, branched):
        return self.declared if batch * rows > 1 else 0.0

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        if out.logits.shape[0] * out.logits.shape[1] == 1:
            return out
        logits = out.logits - 80  # as large as some models' are
        sign = torch.where(torch.arange(self.vocab_size) % 2 == 0, 1.0, -1.0)
        return replace(out, logits=logits * (1 + sign * 0.5 * 2.0**-19))


def test_rounding_by_company_is_allowed_for_where_it_is_declared(monkeypatch):
    models = [Company(m.table) for m in tables(3)]
    params = SamplingParams(temperature=0.5)
    found = audit(generator(models=models), params)
    assert found.sound, found.summary()
    assert found.error > 2e-5
    assert not audit(generator(TypicalVerifier, models=models), params).sound
    monkeypatch.setattr(Company, "declared", 0.0)
    assert not audit(generator(models=models), params).sound


def test_boundaries_that_rounding_may_move_are_not_enumerated():
    table = torch.tensor([0.3, 0.3, 0.4]).double().expand(3, 3)
    tied, params = generator(models=[Company(table)] * 2), SamplingParams(temperature=1.0, top_k=2)
    with pytest.raises(OptionError, match="tie at the boundary of top_k = 2"):
        audit(tied, params)
    with pytest.raises(OptionError, match="boundaries of top_p"):
        audit(tied, SamplingParams(temperature=1.0, top_p=0.5))
    assert audit(generator(models=[MarkovModel(table)] * 2), params).sound


def test_nothing_depends_on_how_many_are_judged_at_once(monkeypatch):
    whole = audit(generator(vocab=4))
    monkeypatch.setattr(enumeration, "MOST_NUMBERS", 50)
    assert audit(generator(vocab=4)) == whole
    found = audit(generator(NoResidual, vocab=4))
    assert found.error > 1e-2


@pytest.mark.parametrize("rule", SOUND)
def test_wide_vocabularies_are_enumerated_by_the_tokens_that_are_possible(rule):
    """Three of 400, which no row has alike, and none of them is the first or the last."""
    target, other = (MarkovModel.random(400, 1, seed, sharpness=4).table for seed in (0, 1))
    models = MarkovModel(target), MarkovModel(0.9 * target + 0.1 * other)
    params = SamplingParams(temperature=1.0, top_k=3)
    found = audit(generator(rule, vocab=400, models=models), params)
    assert found.sound, found.summary()
    assert found.error < EXACT
    broken = audit(generator(InvertedRatio, vocab=400, models=models), params)
    assert not broken.sound


def test_what_one_prompt_reached_is_not_absent():
    """Behind the token 0 nothing is ever drafted, and behind others it is."""
    engine = generator(drafter=Ragged)
    alone = audit(engine, prompts=([0],), behind=STATES)
    both = audit(engine, prompts=([0], [2]), behind=ALONE)
    assert "prompt" in alone.absent
    assert both.absent == ()


# --- negative controls -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*WRONG_LAW, *WRONG_BLOCKS, TypicalVerifier])
def test_broken_rules_are_found(rule):
    found = audit(generator(rule), behind=("prompt", "rejection"))
    assert not found.sound
    assert found.error > 1e-4
    assert "not the target's law" in found.summary()


def test_noise_that_serves_two_purposes_is_found():
    found = audit(generator(SharedNoise))
    assert not found.sound
    assert found.error is None
    assert "another purpose" in found.entangled
    assert "noise is shared" in found.summary()


def test_a_token_that_passes_with_probability_0_is_found():
    """The law is right to the last digit; only a uniform of exactly 0 tells."""
    table = torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]).double()
    models = MarkovModel(table), MarkovModel.random(3, 1, 0)
    assert audit(generator(models=models), behind=ALONE).sound
    found = audit(generator(AcceptsImpossible, models=models), behind=ALONE)
    assert not found.sound
    assert found.error < EXACT
    assert found.impossible > 0
    assert "probability 0" in found.summary()


DRAFTERS = [
    (defects.Misreporting, 1e-2),
    (defects.ArgmaxWithRows, 1e-1),
    (defects.TruncatedDraw, 1e-3),
    (defects.HalfPrecisionDraw, 1e-5),
    (defects.DropsUnlikely, 1e-2),
]


@pytest.mark.parametrize(("drafter", "least"), DRAFTERS)
def test_drafts_that_were_not_drawn_from_the_law_they_report_are_found(drafter, least):
    for rule in (TokenVerifier, BlockVerifier):
        found = audit(generator(rule, drafter, vocab=4), behind=ALONE)
        assert not found.sound
        assert found.error > least
    assert audit(generator(MatchVerifier, drafter, vocab=4), behind=ALONE).sound


def test_half_precision_is_too_little_for_samples_and_enough_here():
    """Off by less than 1e-3, for which samples would need a million."""
    assert 1e-5 < audit(generator(drafter=defects.HalfPrecisionDraw, vocab=4)).error < 1e-3


def test_a_stale_cache_is_found_once_there_is_one():
    broken = run_by(defects.LosesTheLastKey)
    assert audit(broken, behind=ALONE).sound
    found = audit(broken)
    assert not found.sound
    assert found.error > 1e-1


@pytest.mark.parametrize("kind", [defects.NoiseOfTheNeighbour, defects.DraftsWithAcceptanceNoise])
def test_rows_and_noise_of_somebody_else_are_found(kind):
    found = audit(run_by(kind, slots=2), behind=ALONE)
    assert not found.sound
    assert found.error > 1e-3


@pytest.mark.parametrize(
    ("kind", "params"),
    [(defects.OncePerBlock, defects.PENALISED), (defects.DropsParameters, defects.BIASED)],
)
def test_parameters_that_do_not_reach_every_row_are_found(kind, params):
    broken = run_by(kind)
    assert audit(broken, params, behind=ALONE).error > 1e-2
    assert audit(broken, behind=ALONE).sound


# --- what cannot be enumerated -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params", "word"),
    [
        ({"rule": CoupledVerifier}, PLAIN, "audit it by samples"),
        ({}, SamplingParams(), "temperature 0"),
        ({"vocab": 6, "k": 4}, PLAIN, "more than 1024 drafts"),
        ({"vocab": 2, "k": 8}, PLAIN, "256 drafts of 8 tokens are too many"),
        ({"drafter": None}, PLAIN, "no drafter"),
        ({"drafter": Unkeyed}, PLAIN, "do not follow from the noise"),
    ],
)
def test_what_cannot_be_enumerated_is_refused_and_leaves_the_engine_idle(options, params, word):
    engine = generator(slots=64, **options)
    with pytest.raises(OptionError, match=word):
        audit(engine, params)
    assert not engine.engine.busy
    assert engine.engine.free_slots == 64
    with pytest.raises(OptionError, match="at least one prompt"):
        audit(generator(), prompts=())


def test_slots_that_differ_are_refused():
    """Noise by slot keeps the law; an enumeration from one state in every slot cannot tell."""
    engine = run_by(defects.NoiseBySlot)
    with pytest.raises(OptionError, match="from slot to slot"):
        audit(engine)
    assert not engine.engine.busy


def test_a_busy_engine_is_refused_and_goes_on():
    engine = generator()
    with engine.stream([PROMPT], params=PLAIN, seed=3) as stream:
        first = next(stream)
        with pytest.raises(OptionError, match="busy"):
            audit(engine)
        rest = [first, *stream]
    (alone,) = generator().generate([PROMPT], params=PLAIN, seed=3)
    assert [e.token_id for e in rest] == list(alone.token_ids)


@pytest.mark.parametrize("rule", [TokenVerifier, SharedNoise])
def test_an_audited_engine_gives_the_texts_it_gave_before(rule):
    """Whether the audit came to its end or not."""
    engine = generator(rule)
    prompts, seeds = [PROMPT, [2, 0], [0]], [5, 6, 7]
    texts = [
        [r.token_ids for r in engine.generate(prompts, params=PLAIN, seed=seeds)]
        for _ in (audit(engine), None)
    ]
    fresh = [r.token_ids for r in generator(rule).generate(prompts, params=PLAIN, seed=seeds)]
    assert texts == [fresh, fresh]
    assert not engine.engine.busy
    assert engine.engine.free_slots == 16


# --- where a function of noise changes ---------------------------------------------------------


def steps(breakpoints):
    """For each list of breakpoints the function that counts those at or below u."""

    def decide(which, u):
        both = zip(which.tolist(), u.tolist(), strict=True)
        return [sum(b <= x for b in breakpoints[i]) for i, x in both]

    return decide


@given(
    st.lists(
        st.lists(st.floats(2**-16, TOP), max_size=6, unique=True).map(sorted),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 9),
)
def test_intervals_end_where_a_function_changes_to_the_last_bit(breakpoints, grid):
    for cuts, parts in zip(
        breakpoints, intervals(steps(breakpoints), len(breakpoints), grid), strict=True
    ):
        edges = [0.0, *cuts, 1.0]
        assert parts == [(edges[i], edges[i + 1], i) for i in range(len(cuts) + 1)]


@given(st.lists(st.floats(1e-300, TOP), max_size=4, unique=True).map(sorted))
def test_intervals_cover_the_noise_at_any_precision(cuts):
    for precision in (0.0, 1e-6):
        (parts,) = intervals(steps([cuts]), 1, precision=precision)
        assert [parts[0][0], parts[-1][1]] == [0.0, 1.0]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        for cut in cuts:
            assert min(abs(low - cut) for low, _, _ in parts) <= max(precision, 2**-70)


def test_what_lies_between_two_points_that_agree_is_overlooked():
    """Why no decision may be narrower than a cell and the same on both of its sides."""

    def bump(which, u):
        return [0.40 < x < 0.41 for x in u.tolist()]

    assert intervals(bump, 1, grid=8) == [[(0.0, 1.0, False)]]
    (found,) = intervals(bump, 1, grid=200)
    assert [said for *_, said in found] == [False, True, False]
    assert [low for low, _, _ in found] == pytest.approx([0, 0.40, 0.41])
