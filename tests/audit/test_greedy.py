"""Greedy texts are plain decoding's; where they are not, the margin tells rounding from a bug."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import defects
import outpace
from outpace import OptionError, SamplingParams
from outpace.audit import GeneratorSystem, PlainScorer, audit, audit_greedy, scorers
from outpace.drafters import ModelDrafter
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.verifiers import BlockVerifier, GreedyVerifier, TokenVerifier, TypicalVerifier, Verdict

V = 8
GREEDY = SamplingParams(max_new_tokens=40)
PROMPTS = [[i, j] for i in range(4) for j in range(4)]
ROUNDING = 0.05
"""More than `RoundsInCompany` adds to a difference of logits."""


def models(sharpness: float = 1.5, kind=MarkovModel):
    target, other = (MarkovModel.random(V, 2, seed, sharpness=sharpness).table for seed in (0, 1))
    return kind(target), MarkovModel(0.5 * target + 0.5 * other)


def generator(rule=None, target=None, draft=None, **options) -> Generator:
    ours, other = models()
    drafter = ModelDrafter(draft or other)
    return Generator(target or ours, drafter, 3, verifier=rule, max_batch=4, **options)


def check(system, params=GREEDY, prompts=PROMPTS):
    made = system.generator if isinstance(system, GeneratorSystem) else system
    system = system if isinstance(system, GeneratorSystem) else GeneratorSystem(system)
    return audit_greedy(system, scorers(made)[0], prompts, params)


class SecondBest(GreedyVerifier):
    """A draft token passes where it is next to the likeliest, too; it is asked at temperature 0."""

    lossless = False

    def __call__(self, p, draft, noise):
        return super().__call__(p.roll(1, 1), draft, noise)


class OneTooMany(TokenVerifier):
    """The first token that fails is kept all the same."""

    lossless = False

    def __call__(self, p, draft, noise):
        said = super().__call__(p, draft, noise)
        kept = (said.accepted + 1).clamp_max(torch.tensor([len(t) for t in draft.trees]))
        nodes = torch.arange(draft.tokens.shape[1])
        path = torch.where(nodes < kept.unsqueeze(1), nodes, -1)
        rows = p[torch.arange(len(kept)), kept]
        return Verdict(path, kept, rows.argmax(-1))


@pytest.mark.parametrize("rule", [TokenVerifier, BlockVerifier, GreedyVerifier, TypicalVerifier])
def test_sound_engines_give_the_very_tokens(rule):
    found = check(generator(rule()))
    assert found.sound
    assert (found.prompts, found.tokens) == (16, 16 * 40)
    assert found.summary() == "the same 640 tokens on 16 prompts"


def test_a_difference_is_described():
    """One token, the sixth of the second prompt's text, is another."""
    made = generator()

    class Planted(GeneratorSystem):
        def sample(self, prompt, params, seeds):
            (text,) = super().sample(prompt, params, seeds)
            return [[*text[:5], (text[5] + 1) % V, *text[6:]] if prompt == [0, 1] else text]

    (d,) = check(Planted(made)).differences
    text = [0, 1, *made.generate([[0, 1]], params=GREEDY)[0].token_ids]
    logits = made.engine.target.table[text[5], text[6]].log()
    assert (d.prompt, d.position, d.expected, d.got) == (2, 6, text[7], (text[7] + 1) % V)
    assert d.margin == pytest.approx(float(logits[d.expected] - logits[d.got]))
    assert d.gap == pytest.approx(float(logits.topk(2).values.diff().abs()))


def test_rounding_shows_as_a_near_tie():
    """Logits that depend on how many rows are computed, in an almost uniform model."""
    for kind, sound in ((MarkovModel, True), (defects.RoundsInCompany, False)):
        target, draft = models(0.05, kind)
        found = check(generator(target=target, draft=draft))
        assert found.sound is sound
    assert all(0 < d.margin < ROUNDING for d in found.differences)
    assert all(d.gap <= d.margin for d in found.differences)
    assert "another text on" in found.summary()


@pytest.mark.parametrize("rule", [SecondBest, OneTooMany])
def test_a_wrong_token_is_far_from_a_tie(rule):
    found = check(generator(rule()))
    assert not found.sound
    margins = [d.margin for d in found.differences]
    assert min(margins) > 0
    assert sorted(margins)[len(margins) // 2] > 10 * ROUNDING
    widest = max(found.differences, key=lambda d: d.margin)
    assert f"token {widest.position} of prompt {widest.prompt}" in found.summary()


class Foreign:
    """Somebody else's engine, with another token where two are nearly tied, or where not."""

    name, takes_seeds = "foreign", False

    def __init__(self, generator: Generator, swapped: dict[int, int]) -> None:
        self.generator, self.swapped = generator, swapped

    def sample(self, prompt, params, seeds):
        (result,) = self.generator.generate([prompt], params=params)
        return [[self.swapped.get(t, t) for t in result.token_ids]]


def test_near_ties_of_other_engines_are_forgiven_and_wrong_tokens_are_not():
    """Two tokens differ by one part in 10^16; ours must tell them apart all the same."""
    row = torch.tensor([1.0, 3.0, 3.0 + 1e-15, *[1.0] * 5], dtype=torch.float64)
    table = row.repeat(V, 1)
    made = generator(target=MarkovModel(table / table.sum(-1, keepdim=True)), draft=models()[1])
    scorer = PlainScorer(made.engine.target)
    near = audit_greedy(Foreign(made, {2: 1}), scorer, [[1]], GREEDY)
    assert near.sound
    assert [d.near for d in near.differences] == [True]
    assert "which rounding turns over" in near.summary()
    wrong = audit_greedy(Foreign(made, {2: 0}), scorer, [[1]], GREEDY)
    assert not wrong.sound
    assert wrong.differences[0].margin == pytest.approx(float(torch.tensor(3.0).log()))
    ours = GeneratorSystem(made)
    ours.sample = Foreign(made, {2: 1}).sample
    assert not audit_greedy(ours, scorer, [[1]], GREEDY).sound


def test_rounding_passes_where_nothing_is_nearly_tied():
    target, draft = models(3.0, defects.RoundsInCompany)
    assert check(generator(target=target, draft=draft)).sound


class Cut(GeneratorSystem):
    """Texts end before their last token."""

    def sample(self, prompt, params, seeds):
        return [text[:-1] for text in super().sample(prompt, params, seeds)]


class Endless(GeneratorSystem):
    """No token ends a text."""

    def sample(self, prompt, params, seeds):
        return super().sample(prompt, replace(params, eos_token_ids=()), seeds)


@pytest.mark.parametrize("kind", [Cut, Endless])
def test_texts_that_end_elsewhere_differ(kind):
    ended = generator(eos=(3,))
    assert check(ended).sound
    assert check(ended).tokens < 640
    found = check(kind(ended))
    assert not found.sound
    for d in found.differences:
        assert d.margin is None
        assert (d.got is None) == (kind is Cut)
        assert (d.expected is None) == (kind is Endless)
    assert "the end of a text" in found.summary()


def test_an_end_may_be_given_with_the_parameters():
    params = replace(GREEDY, eos_token_ids=(3,))
    assert check(generator(), params).sound
    assert not check(Endless(generator()), params).sound


SHAPED = [
    replace(GREEDY, repetition_penalty=1.6),
    replace(GREEDY, presence_penalty=0.7, frequency_penalty=0.2, min_new_tokens=5),
    replace(GREEDY, no_repeat_ngram=4, bad_words=((1,), (2, 3)), logit_bias={0: 1.5, 4: -1.0}),
]


@pytest.mark.parametrize("params", SHAPED)
def test_penalties_and_forbidden_tokens(params):
    ended = generator(eos=(3,))
    assert check(ended, params).sound
    assert not check(defects.with_engine(defects.DropsParameters, ended), params).sound


def test_penalties_once_per_block_are_found():
    broken = defects.with_engine(defects.OncePerBlock, generator())
    assert check(broken).sound
    found = check(broken, SHAPED[0])
    assert not found.sound
    assert max(d.margin for d in found.differences) > ROUNDING


@pytest.mark.parametrize(
    "fields", [{"regex": "[a-c]{3,8}x+"}, {"json_schema": True}, {"bad_words": ("a", "or")}]
)
def test_constraints_of_a_checkpoint(fields, pair):
    made = outpace.load(pair / "target", pair / "draft", 3, dtype="float32")
    prompts = [made.tokenizer.encode(text) for text in ("for i", "def", "x")]
    params = SamplingParams(max_new_tokens=12, **fields)
    assert check(made, params, prompts).sound
    plain = check(made, SamplingParams(max_new_tokens=12), prompts)
    assert plain.sound
    system = GeneratorSystem(made)
    system.sample = lambda prompt, params, seeds: GeneratorSystem.sample(
        system, prompt, SamplingParams(max_new_tokens=12), seeds
    )
    assert not check(system, params, prompts).sound


def test_an_audit_at_temperature_0_is_a_greedy_one():
    report = audit(generator(), PROMPTS[:2], GREEDY, greedy_tokens=10)
    assert list(report.parts) == ["greedy"]
    assert report.parts["greedy"].tokens == 20
    assert report.sound
    assert not report.left_out


@pytest.mark.parametrize(
    ("prompts", "params", "word"),
    [([], GREEDY, "at least one prompt"), (PROMPTS, replace(GREEDY, temperature=1.0), "samples")],
)
def test_what_cannot_be_compared_is_refused(prompts, params, word):
    made = generator()
    with pytest.raises(OptionError, match=word):
        audit_greedy(GeneratorSystem(made), PlainScorer(made.engine.target), prompts, params)
