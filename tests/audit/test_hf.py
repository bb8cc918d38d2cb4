"""transformers' `generate` under audit, and the defect that it had."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import outpace
from outpace import OptionError, SamplingParams
from outpace.audit import PlainScorer, TransformersSystem, audit_greedy, audit_samples, scorers
from outpace.audit.hf import generate_options, load_causal_lm
from outpace.models import MarkovModel
from outpace.models.loading import inspect_checkpoint

SAMPLES = 256
CHOICES = range(70, 74)
ALIKE = SamplingParams(
    temperature=1.0, max_new_tokens=4, logit_bias=dict.fromkeys(CHOICES, 30.0), top_k=4
)
"""Two random checkpoints choose from the same four tokens, so that drafts are accepted."""

ASSISTED = [
    {},
    {"assistant": "draft", "k": 2},
    {"prompt_lookup": 2},
    {"early_exit": 1, "k": 2},
]


@pytest.fixture(scope="module")
def engine(pair):
    return outpace.load(pair / "target", pair / "draft", 2, dtype="float32")


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.tokenizer.encode("for i in for i in for")


@pytest.fixture
def load(pair):
    def loaded(name):
        source = inspect_checkpoint(str(pair / name))
        return load_causal_lm(source, torch.float32, torch.device("cpu"))

    return loaded


def system(load, eos, name="target", **how) -> TransformersSystem:
    if "assistant" in how:
        how["assistant"] = load(how["assistant"])
    return TransformersSystem(load(name), eos=eos, **how)


def audit(engine, prompt, audited, params=ALIKE, samples=SAMPLES):
    own, draft = scorers(engine)
    return audit_samples(audited, own, [prompt], params, samples=samples, draft=draft)


# --- generate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ASSISTED)
def test_samples_are_the_targets(how, engine, prompt, load):
    audited = system(load, engine.eos_token_ids, **how)
    found = audit(engine, prompt, audited)
    assert found.sound, found.summary()
    assert found.samples == SAMPLES
    assert {t.position for t in found.tests} == {1, 2, 3, 4}
    word = {"assistant": "assistant_model", "prompt_lookup": "prompt_lookup_num_tokens=2"}
    assert all(word.get(name, "") in audited.name for name in how)


@pytest.mark.parametrize("how", ASSISTED[1:3])
def test_samples_are_the_targets_where_texts_end_and_parameters_look_back(
    how, engine, prompt, load
):
    ends = dict(ALIKE.logit_bias) | {engine.eos_token_ids[0]: 30.0}
    params = replace(
        ALIKE, logit_bias=ends, top_k=None, min_p=0.05, repetition_penalty=1.2, min_new_tokens=2
    )
    found = audit(engine, prompt, system(load, engine.eos_token_ids, **how), params)
    assert found.sound, found.summary()
    assert found.tokens < SAMPLES * params.max_new_tokens


@pytest.mark.parametrize("how", ASSISTED)
def test_greedy_texts_are_the_targets(how, engine, prompt, load):
    audited = system(load, engine.eos_token_ids, **how)
    own, _ = scorers(engine)
    for params in (ALIKE, SamplingParams(repetition_penalty=1.2)):
        greedy = replace(params, temperature=0.0, max_new_tokens=24)
        found = audit_greedy(audited, own, [prompt, prompt[:2]], greedy)
        assert found.sound, found.summary()
        assert found.tokens == 48


def test_another_checkpoint_and_another_temperature_are_found(engine, prompt, load):
    """Negative controls: the very loop that passes above, of the wrong model or the wrong law."""
    assert not audit(engine, prompt, system(load, engine.eos_token_ids, "draft")).sound
    audited = system(load, engine.eos_token_ids)
    honest = audited.sample
    audited.sample = lambda prompt, params, seeds: honest(
        prompt, replace(params, temperature=0.5), seeds
    )
    assert not audit(engine, prompt, audited).sound
    greedy = SamplingParams(max_new_tokens=8)
    wrong = system(load, engine.eos_token_ids, "draft")
    assert not audit_greedy(wrong, scorers(engine)[0], [prompt], greedy).sound


def test_the_models_own_settings_are_left_alone_and_left_out(engine, prompt, load):
    model, assistant = load("target"), load("draft")
    for each in (model, assistant):
        each.generation_config.update(top_k=1, suppress_tokens=[70], typical_p=0.1, min_p=0.9)
    before = [each.generation_config.to_dict() for each in (model, assistant)]
    audited = TransformersSystem(model, assistant=assistant, k=2, eos=engine.eos_token_ids)
    state = torch.random.get_rng_state()
    texts = audited.sample(prompt, ALIKE, range(8))
    fresh = system(load, engine.eos_token_ids, assistant="draft", k=2)
    assert texts == fresh.sample(prompt, ALIKE, range(8))
    assert any(70 in text for text in texts)
    assert [each.generation_config.to_dict() for each in (model, assistant)] == before
    assert torch.equal(torch.random.get_rng_state(), state)


# --- parameters --------------------------------------------------------------------------------


def theirs(model, prompt, params, eos):
    """A text that transformers samples, and the laws it has sampled from `[T, V]`."""
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([prompt]),
        return_dict_in_generate=True,
        output_scores=True,
        **generate_options(params, eos),
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.softmax(torch.cat(out.scores), -1)


BASE = SamplingParams(temperature=0.8, max_new_tokens=16)
FEW = {**dict.fromkeys(CHOICES, 30.0), 0: 30.0}
SHAPES = [
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2, "logit_bias": {70: 30.0, 71: 31.0}},
    {"logit_bias": {70: 2.0, 71: -3.0, 72: -math.inf}},
    {"bad_words": ((70,), (71, 72)), "logit_bias": FEW},
    {"bad_words": ((0,), (71,)), "logit_bias": FEW},
    {"min_new_tokens": 12, "logit_bias": FEW},
    {"eos_token_ids": (70, 71), "min_new_tokens": 3, "logit_bias": FEW},
    {"eos_token_ids": (), "logit_bias": FEW},
    {"transforms": (lambda ids, scores: scores * (1.0 + 0.1 * (ids[:, -1:] % 5)),)},
    {"repetition_penalty": 1.3, "logit_bias": FEW, "bad_words": ((70, 71),), "top_p": 0.8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_every_parameter_gives_the_law_it_gives_us(shape, engine, prompt, load):
    """Of every token of a text; without the parameter it is another law, or the text ends there."""
    params = replace(BASE, **shape)
    own, _ = scorers(engine)
    text, rows = theirs(load("target"), prompt, params, engine.eos_token_ids)
    (ours,) = own.laws(prompt, [text], params)
    assert ours.shape == rows.shape
    assert float((ours - rows).abs().max()) < 1e-5
    ends = engine.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
    assert (text[-1] in ends) or len(text) == params.max_new_tokens
    (plain,) = own.laws(prompt, [text], BASE)
    assert float((plain - rows).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"json_schema": True}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"stop": ("a",)}, "stop"),
        ({"bad_words": ("a", (3,))}, "bad_words of text"),
        ({"presence_penalty": 1.0, "regex": "a"}, "presence_penalty, regex"),
    ],
)
def test_what_generate_has_no_equal_of_is_refused_by_name(fields, word):
    with pytest.raises(OptionError, match=f"generate has no {word}: leave"):
        generate_options(SamplingParams(**fields), (0,))


def test_what_leaves_the_law_alone_is_taken():
    fields = {"seed": 3, "logprobs": 2, "transform_draft": False, "on_context_full": "error"}
    assert generate_options(SamplingParams(**fields), (0,)) == generate_options(
        SamplingParams(), (0,)
    )


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"prompt_lookup": 0}, "prompt_lookup"),
        ({"early_exit": 0}, "early_exit"),
        ({"early_exit": 3}, "less than the target's 3 layers"),
        ({"early_exit": 1, "prompt_lookup": 2}, "exclude each other"),
        ({"assistant": "draft", "prompt_lookup": 2}, "exclude each other"),
    ],
)
def test_assistance_that_cannot_be_is_refused(how, word, load):
    with pytest.raises(OptionError, match=word):
        system(load, (), **how)


# --- the published defect ----------------------------------------------------------------------


class Assisted:
    """transformers' own verification, of drafts of a Markov chain.

    As published (huggingface/transformers#32867): the assistant decoded greedily, and its logits
    were judged as those of a draw.

    Args:
        greedily: whether drafts are argmaxes.
    """

    name, takes_seeds, k = "assisted loop", False, 3

    def __init__(self, target: MarkovModel, draft: MarkovModel, greedily: bool) -> None:
        self.target, self.draft, self.greedily = target.table, draft.table, greedily

    def sample(self, prompt, params, seeds):
        with torch.random.fork_rng():
            return [self.one(list(prompt), params.max_new_tokens, seed) for seed in seeds]

    def one(self, prompt, length, seed):
        from transformers.generation.utils import _speculative_sampling

        torch.manual_seed(seed)
        text = list(prompt)
        while len(text) < len(prompt) + length:
            drafted = list(text)
            for _ in range(self.k):
                row = self.draft[drafted[-1]]
                drafted.append(int(row.argmax() if self.greedily else torch.multinomial(row, 1)))
            before = drafted[-self.k - 1 :]
            kept, _ = _speculative_sampling(
                torch.tensor([drafted]),
                self.draft[before[:-1]].log().unsqueeze(0),
                self.k,
                self.target[before].log().unsqueeze(0),
            )
            text += kept[0].tolist()
        return text[len(prompt) :][:length]


def test_argmax_drafts_that_are_judged_as_draws_are_found():
    """huggingface/transformers#32867; the same loop with draws passes."""
    target, other = (MarkovModel.random(16, 1, seed, sharpness=1.5) for seed in (0, 1))
    draft = MarkovModel(0.5 * target.table + 0.5 * other.table)
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    found = {}
    for greedily in (True, False):
        found[greedily] = audit_samples(
            Assisted(target, draft, greedily),
            PlainScorer(target),
            [[1], [2]],
            params,
            samples=1000,
            draft=PlainScorer(draft),
        )
    assert not found[True].sound
    assert found[True].samples == 125
    assert found[False].sound, found[False].summary()
    assert found[False].samples == 1000
