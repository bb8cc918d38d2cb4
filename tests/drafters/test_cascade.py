"""Cascades: who is taken follows from measured times, what is said does not."""

from __future__ import annotations

import functools

import pytest
import torch

import outpace
from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    Commit,
    Context,
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
from outpace.models import MarkovModel
from outpace.sampling import Warp
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, Tree
from outpace.verifiers import CoupledVerifier, TokenVerifier, make_verifier

V = 5
CYCLE = MarkovModel(0.9 * torch.eye(V).roll(1, 1).double() + 0.1 / V)
TARGET = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.7 * TARGET.table + 0.3 / V)


class Clock:
    """Time that passes only where it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake(Drafter):
    """Drafts so many tokens, all right or all wrong, in so many seconds."""

    def __init__(self, name, clock, seconds, right, count=3, instant=True):
        self.name, self.instant, self.k = name, instant, count
        self._clock, self._seconds, self.right = clock, seconds, right
        self.asked = 0

    def draft(self, contexts, budgets, warp, noise):
        self.asked += 1
        self._clock.now += self._seconds
        proposals = []
        for context, budget in zip(contexts, budgets, strict=True):
            step = 1 if self.right else 2
            tokens = [(context.tokens[-1] + step * (i + 1)) % V for i in range(budget)]
            proposals.append((tokens, chain(len(tokens))))
        return certain(proposals, warp.device)


class Ticking:
    """A target whose passes take a second."""

    def __init__(self, clock):
        self._clock = clock

    def __getattr__(self, name):
        return getattr(CYCLE, name)

    def forward(self, *args, **more):
        self._clock.now += 1
        return CYCLE.forward(*args, **more)


def rounds(members, clock, count=400, max_batch=1):
    """How often each member was taken, in the last half."""
    cascade = CascadeDrafter(members, clock)
    taken = []
    honest = cascade._choose

    engine = Engine(Ticking(clock), cascade, 3, make_verifier("greedy"), max_batch)

    def choose(*args):
        choice = honest(*args)
        if choice is not None:
            taken.append(choice[0][0])
        return choice

    cascade._choose = choose
    engine.submit([0], SamplingParams(max_new_tokens=count, eos_token_ids=()))
    while engine.busy:
        engine.step()
    late = taken[len(taken) // 2 :]
    return [late.count(i) / len(late) for i in range(len(members))]


@pytest.mark.parametrize("first", [True, False])
def test_who_is_right_is_taken(first):
    clock = Clock()
    members = [Fake("a", clock, 0.01, first), Fake("b", clock, 0.01, not first)]
    shares = rounds(members, clock)
    assert shares[0 if first else 1] > 0.9


@pytest.mark.parametrize(("seconds", "best"), [(0.5, 1), (9.0, 0)])
def test_a_model_is_taken_if_it_is_worth_its_time(seconds, best):
    """Right and dear against wrong and free: 4 tokens in 1.5 seconds, or in 10, against 1 in 1."""
    clock = Clock()
    members = [
        Fake("free", clock, 0.0, False),
        Fake("dear", clock, seconds, True, instant=False),
    ]
    assert rounds(members, clock)[best] > 0.85
    assert members[1].asked > 1


def test_who_was_wrong_is_tried_again():
    """It may have become right."""
    clock = Clock()
    members = [Fake("a", clock, 0.0, True, count=1), Fake("b", clock, 0.0, False, instant=False)]
    cascade = CascadeDrafter(members, clock)
    engine = Engine(Ticking(clock), cascade, 3, make_verifier("greedy"))
    request = engine.submit([0], SamplingParams(max_new_tokens=3000, eos_token_ids=()))
    while engine.busy:
        engine.step()
        if len(request.events) > 400:
            members[1].right = True
    tail = [e.depth for e in request.events[-100:]]
    assert max(tail) == 4  # of three drafted tokens and a bonus


class Alternates(Fake):
    """By turns one right token, and three of which one is right."""

    def draft(self, contexts, budgets, warp, noise):
        self.asked += 1
        steps = (1,) if self.asked % 2 else (1, 3, 5)
        proposals = [
            ([(c.tokens[-1] + s) % V for s in steps[:b]], chain(min(b, len(steps))))
            for c, b in zip(contexts, budgets, strict=True)
        ]
        return certain(proposals, warp.device)


class RightWhereAnotherIsLong(Fake):
    other: Alternates

    def draft(self, *args):
        self.right = self.other.asked % 2 == 0
        return super().draft(*args)


def test_a_model_is_judged_by_rounds_of_the_same_kind():
    """4 tokens in 1.5 seconds against 2 in 1 where the free one's proposal is long, else 1: over
    all rounds it is the worse one."""
    clock = Clock()
    free = Alternates("free", clock, 0.0, None)
    model = RightWhereAnotherIsLong("model", clock, 0.5, None, instant=False)
    model.other = free
    cascade = CascadeDrafter([free, model], clock)
    engine = Engine(Ticking(clock), cascade, 3, make_verifier("greedy"), 1)
    engine.submit([0], SamplingParams(max_new_tokens=900, eos_token_ids=()))
    taken = {True: [], False: []}
    while engine.busy:
        before = model.asked
        engine.step()
        taken[free.asked % 2 == 0].append(model.asked - before)
    for long, rounds in taken.items():
        share = sum(rounds[len(rounds) // 2 :]) / len(rounds[len(rounds) // 2 :])
        assert share > 0.8 if long else share < 0.2


def test_one_without_proposal_leaves_the_round_to_others():
    engine = Engine(TARGET, CascadeDrafter([NgramDrafter(9), ModelDrafter(NEAR)]), 3)
    engine.submit([1], SamplingParams(seed=1, temperature=1.0, max_new_tokens=4, eos_token_ids=()))
    while engine.busy:
        engine.step()
    assert engine.stats.drafted_rounds == engine.stats.rounds - (engine.stats.draft_steps == 0)
    assert engine.stats.proposed > 0


CASCADES = {
    "n-gram and model": lambda clock: CascadeDrafter(
        [NgramDrafter(1, 2), ModelDrafter(NEAR)], clock
    ),
    "suffix and lookahead and model": lambda clock: CascadeDrafter(
        [SuffixDrafter(capacity=999), LookaheadDrafter(3, 3, 2), ModelDrafter(NEAR)], clock
    ),
}


class Erratic:
    """A clock that makes every choice a matter of chance."""

    def __init__(self, seed):
        self._generator = torch.Generator().manual_seed(seed)
        self._now = 0.0

    def __call__(self):
        self._now += float(torch.rand((), generator=self._generator)) ** 8
        return self._now


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_depend_on_no_clock(cascade, temperature):
    """By the rule that a cascade suggests, in ragged batches."""

    def texts(drafter, k=5):
        rule = CoupledVerifier() if drafter is None else None
        engine = Engine(TARGET, drafter, k if drafter else 0, rule, 4)
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
        return [r.emitted for r in requests]

    plain = texts(None)
    for seed in range(4):
        assert texts(CASCADES[cascade](Erratic(seed))) == plain


class Pretending(TokenVerifier):
    """Token verification, whose sampled texts follow from the draft, says that they do not."""

    invariant = True


def test_by_another_rule_they_may():
    """Negative control; without the pretence it is refused."""
    with pytest.raises(outpace.IncompatibleError, match="choose 'match' or 'coupled'"):
        Engine(TARGET, CASCADES["n-gram and model"](Erratic(0)), 5, TokenVerifier())
    found = set()
    for seed in range(4):
        drafter = CASCADES["n-gram and model"](Erratic(seed))
        engine = Engine(TARGET, drafter, 5, Pretending(), 4)
        params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=60, eos_token_ids=())
        request = engine.submit([1, 2, 1, 2], params)
        while engine.busy:
            engine.step()
        found.add(tuple(request.emitted))
    assert len(found) > 1


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


def started(members, slots=1):
    """A cascade of fakes with contexts of one token, and what it needs for a draft."""
    clock = Clock()
    cascade = CascadeDrafter([make(clock) for make in members], clock)
    contexts = [Context(slot, [0], 1) for slot in range(slots)]
    for context in contexts:
        cascade.open(context)
    return cascade, contexts, Warp([SamplingParams()] * slots, V, torch.device("cpu"))


FREE = functools.partial(Fake, "free", seconds=0.01, right=True)
DEAR = functools.partial(Fake, "dear", seconds=9.0, right=False, instant=False)


def test_a_draft_that_was_dropped_is_asked_for_again_and_is_the_same():
    cascade, contexts, warp = started([FREE, DEAR])
    for i in range(9):  # both are known
        cascade.draft(contexts, [3], warp, None)
        contexts[0].tokens.append((i + 1) % V)
        cascade.observe([Commit(0, (), block=[0])])
    asked = cascade.members[1].asked
    assert asked
    drafts = set()
    for _ in range(200):
        drafts.add(str(cascade.draft(contexts, [3], warp, None).tokens.tolist()))
        cascade.observe([Commit(0, ())])
    assert len(drafts) == 1
    assert cascade.members[1].asked == asked


def test_a_sequence_without_budget_teaches_nothing():
    cascade, contexts, warp = started([DEAR, FREE], 2)
    for _ in range(30):
        cascade.draft(contexts, [0, 3], warp, None)
        for context in contexts:
            context.tokens.append((context.tokens[-1] + 1) % V)
        cascade.observe([Commit(slot, (), block=[0]) for slot in (0, 1)])
    assert cascade._own[0] == {}
    assert cascade._own[1]
    assert cascade._idle[0] == {}


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


def test_what_draws_is_not_looked_at_before_it_is_taken():
    class Hasty(ModelDrafter):
        instant = True

    for kind in (Cascade, CascadeDrafter):
        with pytest.raises(outpace.IncompatibleError, match="say that it is not instant"):
            kind([NgramDrafter(), Hasty(NEAR)])


def test_times_are_learned_in_mixed_batches_too():
    """One sequence repeats itself, the other does not."""
    clock = Clock()
    members = [NgramDrafter(2), Fake("model", clock, 0.5, True, instant=False)]
    cascade = CascadeDrafter(members, clock)
    engine = Engine(Ticking(clock), cascade, 3, make_verifier("greedy"), 2)
    for start in ([0], [3, 1, 4, 1, 0]):
        engine.submit(start, SamplingParams(max_new_tokens=200, eos_token_ids=()))
    while engine.busy:
        engine.step()
    seconds = {(kind[0], round(mean.value, 1)) for kind, mean in cascade._seconds.items()}
    assert seconds == {(0, 1.0), (1, 1.5)}


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
