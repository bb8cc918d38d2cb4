"""The audit of engines with each kind of drafter, round by round or by samples."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from conformance_cases import DRAFTERS, MARKOV, NEAR, PROMPT, V
from outpace import SamplingParams
from outpace.audit import GeneratorSystem, audit, scorers
from outpace.audit.exact import audit_rounds, choices_of
from outpace.drafters import CascadeDrafter, ModelDrafter, NgramDrafter
from outpace.engine import clock
from outpace.engine.control import Controller, Pick
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.sampling import DraftNoise, draws
from outpace.trees import StaticBuilder, from_ranks, paths_tree
from outpace.types import Rows
from outpace.verifiers import TokenVerifier, make_verifier

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
    engine = generator(drafter, rule, target())
    own, _ = scorers(engine)
    states = ("prompt", "rejection")
    params = FEWER if drafter.draws > 2 else PARAMS
    found = audit_rounds(engine.engine, own, [PROMPT], params, behind=states)
    assert found.sound
    assert found.error < (1e-12 if engine.engine.target.dtype == torch.float64 else 1e-6)
    members = max(1, len(drafter.members))
    assert members <= found.rounds + len(found.absent) <= 2 * members
    assert members > 1 or found.rounds + len(found.absent) == 2
    assert found.rounds >= 1
    assert not engine.engine.busy


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


# --- where K and who drafts is chosen ---------------------------------------------------------

CHOSEN = ["draft model", "n-gram trees", "suffix", "recycling", "cascade", "dynamic trees"]


def chosen(drafter, target=MARKOV, rule="token") -> Generator:
    """A generator whose every round takes its own K."""
    return Generator(target, drafter, verifier=make_verifier(rule), max_batch=16)


@pytest.mark.parametrize("name", CHOSEN)
def test_every_choice_is_enumerated(name):
    """Each member of a cascade, for K up to 4; afterwards the engine is as it was."""
    target, build = DRAFTERS[name]
    made = chosen(build(), target())
    engine = made.engine
    before = engine.k, engine.drafter, engine.verifier, engine.controller
    own, _ = scorers(made)
    choices = choices_of(engine)
    members = engine.drafter.members or (engine.drafter,)
    assert {m.name for m, _ in choices} == {m.name for m in members}
    longest = {m.name: max(k for n, k in choices if n is m) for m in members}
    assert longest == {m.name: min(4, m.most) for m in members}
    found = audit_rounds(engine, own, [PROMPT], FEWER, behind=("prompt", "rejection"))
    assert found.sound, found.summary()
    assert found.error < 1e-12
    assert max(found.lengths) == max(longest.values())
    assert f"of K = {min(found.lengths)} to {max(found.lengths)} " in found.summary()
    assert (engine.k, engine.drafter, engine.verifier, engine.controller) == before
    assert engine.auto
    assert "K = auto" in audit(made, [PROMPT], FEWER, modes=["greedy"]).system


class TooFar(ModelDrafter):
    """Reports other rows than it draws from once it drafts more than two tokens."""

    def draft(self, contexts, budgets, warp, noise):
        made = super().draft(contexts, budgets, warp, noise)
        if max(budgets) < 3 or not isinstance(made.law, Rows):
            return made
        flat = made.law.q**0.5
        return replace(made, law=Rows(flat / flat.sum(-1, keepdim=True)))


def test_a_choice_that_is_not_exact_is_found():
    """The control: at K = 2, which it would take by itself, nothing is wrong."""
    fixed = generator(TooFar(NEAR), "token", MARKOV)
    own, _ = scorers(fixed)
    assert audit_rounds(fixed.engine, own, [PROMPT], FEWER, behind=("prompt",)).sound
    made = chosen(TooFar(NEAR))
    assert not audit_rounds(made.engine, own, [PROMPT], FEWER, behind=("prompt",)).sound
    with_model = chosen(CascadeDrafter([NgramDrafter(1, 2), TooFar(NEAR)]))
    assert not audit_rounds(with_model.engine, own, [PROMPT], FEWER, behind=("prompt",)).sound


class Follows(TokenVerifier):
    """A rule whose law is not the target's: what was drafted is emitted."""

    def __call__(self, p, draft, noise):
        return super().__call__(p, draft, replace(noise, accept=noise.accept * 0.5))


def test_samples_are_those_of_requests_without_a_seed():
    """By the engine's own rule, whatever is chosen; those that ask for a seed are audited, too."""
    for rule, sound in ((TokenVerifier(), True), (Follows(), False)):
        made = Generator(MARKOV, ModelDrafter(NEAR), verifier=rule, max_batch=256)
        driven(made.engine)
        for seeded in (False, True):
            system = GeneratorSystem(made, seeded=seeded)
            found = audit(system, [PROMPT], LONGER, modes=["sampled"], samples=3000)
            assert found.sound == (sound or seeded)
            assert found.parts["sampled"].repeated in ((8, 8), None)
        assert made.engine.stats.lengths[0] > 0 < made.engine.stats.lengths[3]


LONGER = replace(PARAMS, max_new_tokens=6)


class Ticks:
    """A clock that goes on whenever it is looked at, by chance."""

    def __init__(self) -> None:
        self._rng, self._now = random.Random(0), 0.0

    def perf_counter(self) -> float:
        self._now += self._rng.gammavariate(4.0, 0.25)
        return self._now


def test_samples_have_the_law_where_the_controller_chooses(monkeypatch):
    """The controller itself, and a rule that is not exact."""
    for rule, sound in ((TokenVerifier(), True), (Follows(), False)):
        monkeypatch.setattr(clock, "time", Ticks())
        made = Generator(MARKOV, ModelDrafter(NEAR), verifier=rule, max_batch=4)
        engine = made.engine
        control = Controller(engine.controller.members, clock=lambda: 0.0)
        engine.controller = engine._drafting.controller = control
        system = GeneratorSystem(made, seeded=False)
        assert audit(system, [PROMPT], LONGER, modes=["sampled"], samples=2000).sound == sound
        assert min(engine.stats.lengths) > 0


class ByTurns(Controller):
    """K from 0 to 3, one after the other."""

    def rests(self, batch):
        return False

    def again(self, slots, budgets, left=0, late=()):
        return None

    def choose(self, asks, crowded=False):
        self._learn()
        self._turn = getattr(self, "_turn", 0) + 1
        ks = [min(self._turn % 4, ask.budget) for ask in asks]
        return [Pick(0, k) if k else None for k in ks]


def driven(engine):
    """Choices that follow from no clock."""
    turns = ByTurns(engine.controller.members, clock=lambda: 0.0)
    engine.controller = engine._drafting.controller = turns


def test_by_default_a_seed_has_a_rule_of_its_own():
    """A broken rule shows in samples of requests without a seed, and only there."""
    made = Generator(MARKOV, ModelDrafter(NEAR), 3, max_batch=256)
    made.engine.verifier = Follows()
    for seeded in (False, True):
        system = GeneratorSystem(made, seeded=seeded)
        assert audit(system, [PROMPT], LONGER, modes=["sampled"], samples=2000).sound == seeded
