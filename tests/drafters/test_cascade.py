"""Cascades: several drafters as one. Who is taken is chosen, what is said follows from no choice.

How well it is chosen is tested with the controller (`tests/engine/test_controller.py`).
"""

from __future__ import annotations

import random

import pytest
import torch

import outpace
from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    Drafter,
    EarlyExitDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    SuffixDrafter,
    certain,
)
from outpace.drafters.base import together
from outpace.drafters.cascade import Cascade
from outpace.engine import Engine
from outpace.engine.control import Controller, Pick
from outpace.models import MarkovModel
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, Tree
from outpace.verifiers import TokenVerifier, make_verifier

V = 5
CYCLE = MarkovModel(0.9 * torch.eye(V).roll(1, 1).double() + 0.1 / V)
TARGET = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.7 * TARGET.table + 0.3 / V)


class Fake(Drafter):
    """Drafts so many tokens, all right or all wrong."""

    def __init__(self, name, right, count=3, instant=True):
        self.name, self.right, self.instant, self.k, self.most = name, right, instant, count, count
        self.asked = []

    def draft(self, contexts, budgets, warp, noise):
        self.asked.append(tuple(budgets))
        step = 1 if self.right else 2
        proposals = []
        for context, budget in zip(contexts, budgets, strict=True):
            tokens = [(context.tokens[-1] + step * (i + 1)) % V for i in range(budget)]
            proposals.append((tokens, chain(len(tokens))))
        return certain(proposals, warp.device)


def run(engine, *prompts, **options):
    given = {"eos_token_ids": ()} | options
    requests = [engine.submit(p, SamplingParams(**given)) for p in prompts]
    while engine.busy:
        engine.step()
    return requests


class Chance(Controller):
    """Looks, and chooses who drafts, by chance; K is fixed."""

    def __init__(self, members, fixed, seed):
        super().__init__(members, fixed, clock=lambda: 0.0)
        self._rng = random.Random(seed)

    def rests(self, batch):
        return False

    def again(self, slots, budgets, left=0, late=()):
        return None

    def looks(self):
        return [i for i in self._instant if self._rng.random() < 0.7]

    def choose(self, asks, crowded=False):
        self._learn()
        return [self._cut(self._any(ask), ask) for ask in asks]

    def _any(self, ask):
        able = [i for i, m in enumerate(self.members) if not m.instant or i in ask.offers]
        member = self._rng.choice([None, *able])
        return None if member is None else Pick(member, min(self.most, self.members[member].most))


def by_chance(engine, seed):
    """An engine whose controller is such a one."""
    chance = Chance(engine.controller.members, engine.k, seed)
    engine.controller = engine._drafting.controller = chance
    return engine


def test_where_no_k_is_asked_for_each_has_its_own():
    """Else all draft as far as was asked for."""
    for k, longest in ((None, {2, 4}), (3, {3}), (1, {1}), (6, {6})):
        members = [Fake("short", True, 2, instant=False), Fake("long", True, 4, instant=False)]
        for member in members:
            member.most = 8
        engine = by_chance(Engine(CYCLE, CascadeDrafter(members), k, max_batch=1), 0)
        run(engine, [0], max_new_tokens=90)
        asked = [max(b for (b,) in m.asked) for m in members]
        assert set(asked) == longest
        assert {n for n, count in enumerate(engine.stats.lengths) if count} >= longest


def test_who_is_right_is_taken():
    """With nothing but what was accepted to tell them apart."""
    for first in (True, False):
        members = [Fake("a", first), Fake("b", not first)]
        engine = Engine(CYCLE, CascadeDrafter(members), 3, make_verifier("greedy"), 1)
        thinks = Controller(engine.controller.members, 3, clock=lambda: 0.0)  # in every round
        engine.controller = engine._drafting.controller = thinks
        run(engine, [0], max_new_tokens=400)
        drafters = engine.stats.drafters
        assert drafters.get("a" if first else "b", 0) > 0.9 * sum(drafters.values())


def test_one_without_proposal_leaves_the_round_to_others():
    silent = Fake("silent", True, count=0)
    engine = Engine(TARGET, CascadeDrafter([silent, ModelDrafter(NEAR)]), 3)
    run(engine, [1], max_new_tokens=12)
    assert silent.asked
    last = engine.stats.lengths[0]  # of one token, which is not drafted for
    assert last <= 1
    assert engine.stats.drafted_rounds == engine.stats.rounds - last
    assert engine.stats.drafters == {"draft model": engine.stats.drafted_rounds}


CASCADES = {
    "n-gram and model": lambda: CascadeDrafter([NgramDrafter(1, 2), ModelDrafter(NEAR)]),
    "suffix and lookahead and model": lambda: CascadeDrafter(
        [SuffixDrafter(capacity=999), LookaheadDrafter(3, 3, 2), ModelDrafter(NEAR)]
    ),
}


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_depend_on_no_choice(cascade, temperature):
    """Of a fixed K, in ragged batches, by the rules that a cascade suggests: tokens that were
    drawn are verified by ratio, and requests with a seed by coupled draws."""

    def texts(drafter, seed=0):
        engine = Engine(TARGET, drafter, 5 if drafter else 0, max_batch=4)
        if drafter is not None:
            assert engine.verifier.name == "token"
            by_chance(engine, seed)
        requests = [
            engine.submit(
                [i % V] * (1 + i % 3),
                SamplingParams(
                    temperature=temperature, seed=i, max_new_tokens=20 + i, eos_token_ids=()
                ),
            )
            for i in range(12)
        ]
        while engine.busy:
            engine.step()
        assert drafter is None or engine.stats.accepted > 20
        return [r.emitted for r in requests]

    plain = texts(None)
    for seed in range(4):
        assert texts(CASCADES[cascade](), seed) == plain


class Pretending(TokenVerifier):
    """Token verification, whose sampled texts follow from the draft, says that they do not."""

    invariant = True


def test_by_another_rule_they_may():
    """Negative control; without the pretence a seed is verified by another rule."""
    kinds = {}
    for rule in (TokenVerifier, Pretending):
        found = set()
        for seed in range(4):
            engine = Engine(TARGET, CASCADES["n-gram and model"](), 5, rule(), 4)
            by_chance(engine, seed)
            options = {"temperature": 1.0, "seed": 1, "max_new_tokens": 60}
            (request,) = run(engine, [1, 2, 1, 2], **options)
            found.add(tuple(request.emitted))
        kinds[rule] = len(found)
    assert kinds[TokenVerifier] == 1
    assert kinds[Pretending] > 1


def test_drafts_of_different_laws_become_one():
    tree, q = Tree((-1, -1, 0)), torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]]])
    sure = Draft(torch.tensor([[2, 1, 0]]), PointMass(), (tree,))
    drawn = Draft(torch.tensor([[1, 2]]), Rows(q), (chain(2),))
    both = together([(sure, [2]), (drawn, [0])], 3, torch.device("cpu"))
    assert both.trees == (chain(2), chain(0), tree)
    assert both.tokens[[0, 2]].tolist() == [[1, 2, 0], [2, 1, 0]]
    assert isinstance(both.law, Rows)
    assert torch.equal(both.law.q[0, :2], q[0])
    assert torch.equal(both.law.q[2], torch.eye(3)[[2, 1, 0]])


def test_a_draft_that_is_not_taken_is_dropped_and_is_the_same_again():
    """Who is looked at and left is told so, and proposes the same to the same text."""

    class Notes(NgramDrafter):
        def __init__(self):
            super().__init__(1)
            self.seen, self.dropped = {}, 0

        def propose(self, context, budget):
            tokens, tree = super().propose(context, budget)
            key = len(context.tokens), budget
            assert self.seen.setdefault(key, tokens) == tokens
            return tokens, tree

        def observe(self, commits):
            self.dropped += sum(not c.block for c in commits)

    class LooksOnly(Chance):
        def _any(self, ask):
            return None

    first = Notes()
    engine = Engine(TARGET, CascadeDrafter([first, Notes()]), 3, max_batch=1)
    engine.controller = LooksOnly(engine.controller.members, 3, 0)
    engine._drafting.controller = engine.controller
    run(engine, [1, 2, 1, 2], max_new_tokens=40)
    assert first.dropped > 10
    assert engine.stats.proposed == 0


def test_a_sequence_without_budget_teaches_nothing():
    members = [Fake("dear", False, instant=False), Fake("free", True)]
    engine = Engine(CYCLE, CascadeDrafter(members), 3, max_batch=2)
    silent = engine.submit([0], SamplingParams(speculate=False, eos_token_ids=()))
    loud = engine.submit([0], SamplingParams(eos_token_ids=()))
    for _ in range(30):
        engine.step()
    engine.controller._learn()
    own = [engine.controller._estimates._open[r.place].own for r in (silent, loud)]
    assert own[0] == {}
    assert own[1]
    assert silent.stats.proposed == 0
    for r in (silent, loud):
        engine.cancel(r)


class Wants(NgramDrafter):
    """Notes how many of the target's likeliest tokens it was shown."""

    def __init__(self, tops):
        super().__init__(1)
        self.tops, self.shown = tops, set()

    def observe(self, commits):
        self.shown |= {None if c.top is None else c.top.shape[1] for c in commits}


def test_everybody_is_shown_what_he_wants():
    members = [Wants(0), Wants(1), Wants(3)]
    engine = Engine(TARGET, CascadeDrafter(members), 3)
    engine.submit([1, 2, 1], SamplingParams(max_new_tokens=9, eos_token_ids=()))
    while engine.busy:
        engine.step()
    assert [m.shown - {None} for m in members] == [set(), {1}, {3}]


def test_a_part_that_is_taken_leaves_the_others_free():
    taken, free = NgramDrafter(), NgramDrafter()
    Engine(TARGET, taken)
    with pytest.raises(outpace.IncompatibleError, match="given to an engine already"):
        Engine(TARGET, CascadeDrafter([free, taken]))
    assert not free.taken


def test_parts_are_checked_before_weights_are_read(pair, monkeypatch):
    monkeypatch.setattr("outpace.assembly.load_model", None)
    cascade = CascadeDrafter([NgramDrafter(), EarlyExitDrafter(99)])
    with pytest.raises(outpace.IncompatibleError, match="leaves nothing to verify with"):
        outpace.load(str(pair / "target"), cascade)


def test_one_drafter_is_no_cascade():
    with pytest.raises(outpace.OptionError, match="two drafters at least"):
        CascadeDrafter([NgramDrafter()])


def test_what_draws_is_not_looked_at_before_it_is_taken(pair, monkeypatch):
    class Hasty(ModelDrafter):
        instant = True

    for kind in (Cascade, CascadeDrafter):
        with pytest.raises(outpace.IncompatibleError, match="say that it is not instant"):
            kind([NgramDrafter(), Hasty(NEAR)])
    with pytest.raises(outpace.IncompatibleError, match="say that it is not instant"):
        Engine(TARGET, Hasty(NEAR))
    Engine(TARGET, Hasty(NEAR), 3)
    monkeypatch.setattr("outpace.assembly.load_model", None)
    with pytest.raises(outpace.IncompatibleError, match="say that it is not instant"):
        outpace.load(str(pair / "target"), Hasty(NEAR))


def test_a_model_that_sat_out_reads_what_it_missed_without_scores(monkeypatch):
    rows = []
    model = MarkovModel.random(V, 2, 1)
    honest = model.forward

    def forward(tokens, *args, logits=True, **more):
        rows.append((tokens.shape[1], logits))
        return honest(tokens, *args, logits=logits, **more)

    monkeypatch.setattr(model, "forward", forward)
    drafter = ModelDrafter(model)
    engine = Engine(TARGET, drafter, 2)
    request = engine.submit([1, 2], SamplingParams(max_new_tokens=200, eos_token_ids=()))
    while engine.busy:
        if len(request.tokens) < 100:
            engine._undecided = True  # a plain round
        engine.step()
    assert max(n for n, scored in rows if scored) < 10
    assert max(n for n, scored in rows if not scored) > 50
