"""The audit of engines with each kind of drafter, round by round or by samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance_cases import DRAFTERS, MARKOV, NEAR, PROMPT, V
from outpace import SamplingParams
from outpace.audit import audit, scorers
from outpace.audit.exact import audit_rounds
from outpace.drafters import ModelDrafter, NgramDrafter
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.sampling import DraftNoise, draws
from outpace.trees import StaticBuilder, from_ranks, paths_tree
from outpace.types import Rows
from outpace.verifiers import make_verifier

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, eos_token_ids=())

FEWER = replace(PARAMS, top_k=2)
"""For trees of many nodes: there are as many drafts as choices to the power of nodes."""


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
    params = FEWER if drafter.draws > 2 else PARAMS
    found = audit_rounds(engine.engine, own, [PROMPT], params, behind=states)
    assert found.sound
    assert found.error < (1e-12 if engine.engine.target.dtype == torch.float64 else 1e-6)
    assert found.rounds + len(found.absent) == 2
    assert found.rounds >= 1


def of_trees(rule: str):
    """An audit of a drafter whose every node has noise of its own."""
    few = from_ranks([[0, 0], [1]])
    paths = StaticBuilder(paths_tree(2, 2), "with")
    builder = paths if rule in ("kseq", "multipath") else StaticBuilder(few)
    engine = generator(ModelDrafter(NEAR, tree=builder), rule, MARKOV)
    own, _ = scorers(engine)
    params = replace(PARAMS, top_k=3) if builder is paths else PARAMS
    return audit_rounds(engine.engine, own, [PROMPT], params, behind=("prompt",))


@pytest.mark.parametrize(
    ("rule", "drafts"), [("token", 48), ("traversal", 48), ("kseq", 81), ("multipath", 81)]
)
def test_every_tree_that_can_be_drawn_is_seen(rule, drafts):
    found = of_trees(rule)
    assert found.sound
    assert found.error < 1e-12
    assert found.drafts == drafts


def rows_that_are_not_struck(monkeypatch):
    honest = draws.without_replacement

    def broken(p, scores, count, draw):
        tokens, _ = honest(p, scores, count, draw)
        return tokens, p.unsqueeze(-2).expand(*p.shape[:-1], count, -1)

    monkeypatch.setattr(draws, "without_replacement", broken)


def without_replacement_after_all(monkeypatch):
    honest = DraftNoise.children
    monkeypatch.setattr(DraftNoise, "children", lambda *args: honest(*args[:-1], False))


def noise_of_the_first_node(monkeypatch):
    honest = DraftNoise.children

    def broken(self, p, scores, nodes, *rest):
        return honest(self, p, scores, torch.zeros_like(nodes), *rest)

    monkeypatch.setattr(DraftNoise, "children", broken)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("token", rows_that_are_not_struck),
        ("traversal", rows_that_are_not_struck),
        ("kseq", without_replacement_after_all),
        ("multipath", without_replacement_after_all),
        ("token", noise_of_the_first_node),
        ("kseq", noise_of_the_first_node),
    ],
)
def test_siblings_that_were_drawn_otherwise_are_found(monkeypatch, rule, broken):
    broken(monkeypatch)
    found = of_trees(rule)
    assert not found.sound
    assert found.error > 1e-4


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
