"""The audit of engines with each kind of drafter, round by round or by samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance_cases import DRAFTERS, PROMPT, V
from outpace import SamplingParams
from outpace.audit import audit, scorers
from outpace.audit.exact import audit_rounds
from outpace.drafters import NgramDrafter
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.types import Rows
from outpace.verifiers import make_verifier

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, eos_token_ids=())


def generator(drafter, rule: str, target) -> Generator:
    return Generator(target, drafter, 2, verifier=make_verifier(rule), max_batch=16)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", ["token", "match"])
def test_every_round_has_the_targets_law(name, rule):
    target, build = DRAFTERS[name]
    drafter = build()
    if rule == "token" and drafter.remembers:
        pytest.skip("refused: tests/conformance")
    engine = generator(drafter, rule, target())
    own, _ = scorers(engine)
    states = ("prompt", "rejection")
    found = audit_rounds(engine.engine, own, [PROMPT], PARAMS, behind=states)
    assert found.sound
    assert found.error < (1e-12 if engine.engine.target.dtype == torch.float64 else 1e-6)
    assert found.rounds + len(found.absent) == 2
    assert found.rounds >= 1


def test_samples_have_the_targets_law():
    target, build = DRAFTERS["early exit"]
    engine = generator(build(), "token", target())
    report = audit(engine, [PROMPT], PARAMS, modes=["sampled"], samples=1500)
    assert report.sound


class Pretends(NgramDrafter):
    """Says of what it looked up that it was drawn from even rows."""

    laws = (Rows,)

    def draft(self, *args):
        draft = super().draft(*args)
        return replace(draft, law=Rows(torch.full((*draft.tokens.shape, V), 1 / V).double()))


def test_a_drafter_that_says_how_it_did_not_draw_is_found():
    engine = generator(Pretends(1, 1), "token", MarkovModel.random(V, 2, 0))
    own, _ = scorers(engine)
    assert not audit_rounds(engine.engine, own, [PROMPT], PARAMS, behind=("prompt",)).sound
    assert not audit(engine, [PROMPT], PARAMS, modes=["sampled"], samples=1500).sound
