"""Where nobody is named to draft, whoever suits the model and the machine does."""

from __future__ import annotations

from functools import partial

import pytest

import outpace
from outpace.drafters import parse
from outpace.drafters.candidates import Candidate

PROMPT = "def f(a, b):\n    return a + b\n\ndef f(a, b):\n"


def load(pair, **options):
    return outpace.load(str(pair / "target"), dtype="float32", max_batch=2, **options)


def test_the_draft_beside_the_target_and_look_ups_are_taken(pair):
    generator = load(pair)
    names = [member.name for member in generator.engine.drafter.members]
    assert names[0] == "ngram"
    assert "draft" in names[1]
    assert generator.engine.controller is not None


@pytest.mark.parametrize("k", ["auto", 4])
def test_texts_are_plain_decodings_and_were_drafted(pair, k):
    generator, plain = load(pair, k=k), load(pair, drafter=None)
    drafted = 0
    for text in (PROMPT, "for i in range(3):", "import os\nimport sys\n") * 2:
        result = generator.generate(text, max_new_tokens=48)
        assert result.token_ids == plain.generate(text, max_new_tokens=48).token_ids
        drafted += result.stats.drafted_rounds
    assert drafted  # auto may find that it does not pay here, but has to try
    assert sum(generator.engine.stats.drafters.values()) == drafted
    assert plain.engine.drafter is None


def test_a_rule_that_is_given_leaves_out_who_does_not_go_with_it(pair, monkeypatch):
    found = [Candidate(name, "", partial(parse, name)) for name in ("recycling", "suffix")]
    monkeypatch.setattr("outpace.assembly.candidates", lambda setting: found)
    assert load(pair).engine.drafter.name == "recycling+suffix"
    assert load(pair, verifier="block").engine.drafter.name == "suffix"  # the other drafts trees


def test_a_tree_is_for_those_that_can_branch(pair):
    generator = load(pair, tree="2x2")
    text = generator.generate(PROMPT, max_new_tokens=24).token_ids
    assert text == load(pair, drafter=None).generate(PROMPT, max_new_tokens=24).token_ids


def test_plain_decoding_looks_for_nobody(pair, monkeypatch):
    monkeypatch.setattr("outpace.assembly.candidates", lambda setting: pytest.fail("looked for"))
    assert load(pair, k=0).engine.drafter is None
    assert load(pair, drafter=None).engine.drafter is None
    with pytest.raises(pytest.fail.Exception):
        load(pair)


def test_where_nobody_fits_it_is_plain_decoding(pair, monkeypatch):
    monkeypatch.setattr("outpace.assembly.candidates", lambda setting: [])
    generator = load(pair)
    assert generator.engine.drafter is None
    assert generator.generate(PROMPT, max_new_tokens=4).stats.emitted == 4
