"""Members at work: who is opened and told, who reads; drafters that learn from the target."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    Drafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    RecyclingDrafter,
    certain,
)
from outpace.drafters.base import Context, together
from outpace.drafters.foreign import SLEMDrafter, TLIDrafter
from outpace.drafters.translation import Common, Words
from outpace.engine import Engine
from outpace.engine.control import Controller, Pick
from outpace.engine.drafting import DRAFT, Drafting, Lap
from outpace.models import MarkovModel
from outpace.trees import chain, tree_of
from outpace.types import Shape
from ticking import ticking
from tokenizers_of import letters

V = 12
TARGET = MarkovModel.random(V, 2, 0, sharpness=2.0)
TURN = 0.9 * torch.eye(V).roll(1, 1).double() + 0.1 / V
CYCLE = MarkovModel(TURN)


class Script(Controller):
    """Picks by round: a function of how many there have been."""

    def __init__(self, engine: Engine, pick) -> None:
        super().__init__(engine.controller.members, clock=lambda: 0.0)
        engine.controller = engine._drafting.controller = self
        self.pick = pick

    def rests(self, batch):
        return False

    def again(self, slots, budgets, late=()):
        self._round += 1

    def looks(self):
        return self._instant

    def choose(self, asks, crowded=False):
        self._learn()
        return [self._cut(self.pick(self._round), ask) for ask in asks]


def run(engine: Engine, prompt=(1, 2, 3), tokens: int = 40):
    params = SamplingParams(max_new_tokens=tokens, eos_token_ids=())
    request = engine.submit(list(prompt), params)
    while engine.busy:
        engine.step()
    return request


class Notes(Drafter):
    """Proposes the next number; notes what it is told."""

    name = "notes"

    def __init__(self, instant: bool, taps=(), tops: int = 0) -> None:
        self.instant, self.taps, self.tops = instant, taps, tops
        self.calls: list[tuple] = []

    def open(self, context, features=()):
        self.calls.append(("open", len(context.tokens), len(features)))

    def draft(self, contexts, budgets, warp, noise):
        self.calls.append(("draft", *budgets))
        proposals = [
            ([(c.tokens[-1] + i + 1) % V for i in range(b)], chain(b))
            for c, b in zip(contexts, budgets, strict=True)
        ]
        return certain(proposals, warp.device)

    def catch_up(self, contexts):
        self.calls.append(("catch up", len(contexts[0].tokens)))

    def observe(self, commits):
        self.calls += [
            ("told", len(c.block), None if c.top is None else c.top.shape) for c in commits
        ]

    def close(self, slot):
        self.calls.append(("close",))

    def count(self, what: str) -> int:
        return sum(call[0] == what for call in self.calls)


def test_a_model_is_opened_when_it_first_drafts_and_told_of_its_own_rounds_only():
    """In rounds 20 and 21; no more of it is asked than was picked."""
    model = Notes(instant=False)
    engine = Engine(CYCLE, model)
    Script(engine, lambda n: Pick(0, 2) if n in (20, 21) else None)
    run(engine)
    kinds = [call[0] for call in model.calls]
    assert kinds == ["open", "draft", "told", "draft", "told", "close"]
    assert model.calls[0] == ("open", 3 + 19, 0)
    assert model.calls[1] == ("draft", 2)


def test_a_model_that_was_away_for_long_reads_first():
    model = Notes(instant=False)
    engine = Engine(CYCLE, model)
    Script(engine, lambda n: Pick(0, 1) if n in (1, 2, 60) else None)
    run(engine, tokens=90)
    reads = [call for call in model.calls if call[0] == "catch up"]
    assert len(reads) == 1
    assert reads[0][1] > 40
    assert engine.controller._prices.reading[0].count >= 1


def test_who_is_never_drafted_with_is_never_opened():
    model = Notes(instant=False)
    engine = Engine(CYCLE, model)
    Script(engine, lambda n: None)
    run(engine)
    assert model.calls == []


def test_what_was_looked_at_and_left_is_dropped():
    look = Notes(instant=True)
    engine = Engine(CYCLE, look)
    Script(engine, lambda n: Pick(0, 3) if n % 2 else None)
    run(engine)
    told = [call[1] for call in look.calls if call[0] == "told"]
    assert look.count("draft") == len(told)
    assert told == [1, 0] * (len(told) // 2) + [1] * (len(told) % 2)  # of those with a block


def test_who_learns_from_the_targets_passes_is_told_of_those_it_was_looked_at_in():
    """With the block that was scored, whoever drafted it."""
    learns = Notes(instant=True, tops=2)
    engine = Engine(CYCLE, CascadeDrafter([learns, Notes(instant=False)]))
    Script(engine, lambda n: (None, Pick(1, 2))[n % 2])
    run(engine)
    told = [(call[1], call[2]) for call in learns.calls if call[0] == "told"]
    assert {(1, (1, 2)), (3, (3, 2))} <= set(told)


class Ahead(Drafter):
    """Proposes tokens so far ahead of the last one, in this shape; right is a node's own depth."""

    name, instant, proposes = "ahead", True, Shape.TREE

    def __init__(self, ahead, parents) -> None:
        self.ahead, self.tree = ahead, tree_of(parents)

    def draft(self, contexts, budgets, warp, noise):
        tokens = [[(c.tokens[-1] + n) % V for n in self.ahead] for c in contexts]
        return certain([(row, self.tree) for row in tokens], warp.device)


@pytest.mark.parametrize(
    ("ahead", "parents", "reached", "accepted"),
    [
        ((1, 2), (-1, 0), 2, 2),
        ((1, 2, 9), (-1, 0, 1), 3, 2),
        ((1, 9, 3), (-1, 0, 1), 2, 1),
        ((9, 2), (-1, 0), 1, 0),
        ((9, 1, 2), (-1, -1, 1), 2, 2),  # by the second branch
        ((1, 9, 8, 2), (-1, 0, 1, 0), 2, 2),  # behind that one nothing was proposed, but deeper
        ((1, 9, 8), (-1, 0, 0), 2, 1),
        ((9, 8, 7), (-1, -1, 0), 1, 0),
        ((9, 1, 2), (-1, -1, 0), 1, 1),  # nor here
    ],
)
def test_what_was_proposed_is_judged_by_the_text_as_far_as_it_went_there(
    ahead, parents, reached, accepted
):
    engine = Engine(CYCLE, Ahead(ahead, parents))
    controller = Script(engine, lambda n: None)
    found = []
    controller.told = found.append
    run(engine)
    assert found
    assert {(told.reached, told.accepted) for told in found} == {(reached, accepted)}


def accepted(engine: Engine, texts: int = 6) -> int:
    for i in range(texts):
        run(engine, [i % V], 60)
    return engine.stats.accepted


def test_token_recycling_begins_with_nothing_and_gets_somewhere():
    """It knows nothing until it was told of a pass, so that nothing could be taken before."""
    engine = Engine(CYCLE, RecyclingDrafter(8), max_batch=1)
    Script(engine, lambda n: Pick(0, 4))
    assert accepted(engine) > 100

    deaf = Engine(CYCLE, RecyclingDrafter(8), max_batch=1)
    deaf.drafter.tops = 0  # the control
    Script(deaf, lambda n: Pick(0, 4))
    assert accepted(deaf) == 0


def test_a_window_stands_where_the_text_is_after_rounds_that_it_sat_out():
    """Guesses move on with text that came without them; one that takes no notice keeps them."""
    for deaf in (False, True):
        drafter, context = LookaheadDrafter(4, 5, 2), Context(0, [1, 2, 3])
        drafter.start(TARGET, TARGET.new_cache(1, 64))
        drafter.open(context)
        state = drafter._states[0]
        state._rows = deque([0, 1, 2, 3, 4] for _ in state._rows)
        context.tokens.extend([7, 8])
        if deaf:
            state._seen += 2
        drafter.propose(context, 8)
        moved = [row[:3] for row in state._rows]
        assert moved == [[0, 1, 2] if deaf else [2, 3, 4]] * 3


NARROW = MarkovModel(0.9 * torch.eye(3).roll(1, 1).double() + 0.1 / 3)
WIDE = MarkovModel(0.9 * torch.eye(6)[[0, 1, 2, 4, 5, 3]].double() + 0.1 / 6)


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_a_draft_of_another_vocabulary_that_sat_out_reads_on_in_its_own_tokens(way, monkeypatch):
    """Which are fewer than the target's; and it reads them once."""
    words = Words(letters("xyzabc"), "target"), Words(letters("abc"), "draft")
    if way == "tli":
        drafter = TLIDrafter(NARROW, Common(*words), way)
    else:
        drafter = SLEMDrafter(NARROW, *words, way)
    widths = []
    forward = NARROW.forward

    def noted(tokens, *args, **options):
        widths.append(tokens.shape[1])
        return forward(tokens, *args, **options)

    monkeypatch.setattr(NARROW, "forward", noted)
    engine = Engine(WIDE, drafter)
    Script(engine, lambda n: Pick(0, 3) if n < 3 or n > 60 else None)
    run(engine, [3, 4, 5], 90)
    assert engine.controller._prices.reading[0].count >= 1
    assert sum(width > 40 for width in widths) == 1
    assert engine.stats.accepted > 0.8 * engine.stats.proposed > 0


def test_a_model_without_positions_left_is_not_timed():
    """It would seem to draft in no time."""
    short = MarkovModel(TURN, context_length=40)
    engine = Engine(CYCLE, ModelDrafter(short))
    script = Script(engine, lambda n: Pick(0, 4))
    run(engine, tokens=100)
    assert 0 < engine.stats.drafters["draft model"] < engine.stats.rounds / 2
    assert script._prices.rounds[0] == engine.stats.drafters["draft model"]


def test_a_text_is_plain_decodings_whatever_the_script():
    for script in (lambda n: None, lambda n: Pick(n % 3, n % 5), lambda n: Pick(2, 1 + n % 2)):
        members = [NgramDrafter(2), RecyclingDrafter(6), ModelDrafter(TARGET)]
        engine = Engine(TARGET, CascadeDrafter(members), max_batch=1)
        Script(engine, script)
        assert run(engine).emitted == run(Engine(TARGET)).emitted


def test_what_is_thought_about_a_look_is_no_price_of_it(monkeypatch):
    """Else looks would seem so dear that they become rare, whatever they find."""
    tick, thoughts = ticking(monkeypatch), []

    class Thinks(Controller):
        def _choose(self, asks, crowded, last):
            thoughts.append(tick(1000.0))
            return super()._choose(asks, crowded, last)

    engine = Engine(CYCLE, NgramDrafter(), "auto")
    control = Thinks(engine.controller.members, clock=lambda: tick(0.0))
    engine.controller = engine._drafting.controller = control
    run(engine, [1, 2, 3] * 4, 200)
    control.report()
    assert thoughts
    assert control._prices.look(0, 1) < 10
    assert control._prices.seconds > 1000 * len(thoughts)  # it is a part of the round, though


def test_what_it_takes_to_tell_of_a_round_is_a_part_of_one_round():
    """Of the next, though that and others behind it go along and are told of later, all at once."""
    drafting, rests = Engine(CYCLE, ModelDrafter(CYCLE), "auto")._drafting, []

    class Notes:
        def add(self, *went):
            rests.append(went[5])
            return True

    drafting._along = Notes()
    drafting._telling, drafting._each = 40.0, 2.0
    for _ in range(3):
        drafting.spent({DRAFT: 1.0}, 10.0, 2)
    assert rests == [49.0, 11.0, 11.0]


@pytest.mark.parametrize("once", [False, True])
def test_reading_in_a_round_that_is_like_no_other_is_not_timed(once):
    drafting = Engine(CYCLE, ModelDrafter(CYCLE), "auto")._drafting
    drafting.controller.open(0, 0.0)
    drafting._begin(1)
    drafting.spent({Lap(0, 50): 9.0}, 20.0, 1, once)
    assert drafting.controller._prices.reading[0].count == (not once)


class Slow(Notes):
    """One without a model, that takes its time to open a text."""

    reads = True

    def __init__(self, tick) -> None:
        super().__init__(instant=True)
        self.tick = tick

    def open(self, context, features=()):
        self.tick(1000.0)


@pytest.mark.parametrize("words", [300, 9])
def test_to_open_a_text_is_to_read_it_and_no_part_of_the_look(words, monkeypatch):
    """As a look behind a pause it would make such looks dear for good."""
    tick = ticking(monkeypatch)
    engine = Engine(CYCLE, Slow(tick))

    class Seldom(Script):
        def looks(self):
            return [0] if self._round in (1, 2, 60) else []

    prices = Seldom(engine, lambda n: None)._prices
    run(engine, [1, 2, 3] * (words // 3), 100)
    reading, long = prices.reading[0], words > 32
    assert (reading.count > 0) is long
    assert reading.value == pytest.approx(1001 / words if long else 0.0)
    assert 0 < prices.look(0, 1, late=True) < 10
    assert prices._late[0].count > 0


@pytest.mark.parametrize("instant", [True, False])
def test_what_runs_between_a_look_and_the_pass_is_part_of_the_round(instant, monkeypatch):
    """Where no model runs it is nobody's draft, and has no other price."""
    tick, found = ticking(monkeypatch), []

    def slowly(*parts):
        tick(10.0)
        return together(*parts)

    class Tells(Script):
        def spent(self, picks, spent):
            found.append(spent)
            super().spent(picks, spent)

    monkeypatch.setattr("outpace.engine.drafting.together", slowly)
    engine = Engine(CYCLE, Notes(instant))
    Tells(engine, lambda n: Pick(0, 2))
    run(engine)
    assert found
    for spent in found[:-1]:  # nothing may be drafted in the last one
        assert (spent.draft > 0) is not instant
        assert (spent.rest > 10) is instant


def test_what_is_told_of_a_round_and_of_texts_that_end_is_paid_for(monkeypatch):
    """Plain decoding takes none of it, by no clock that stops before."""
    tick, found = ticking(monkeypatch, "drafting"), []

    class Tells(Script):
        def spent(self, picks, spent):
            found.append(spent)
            tick(10.0)
            super().spent(picks, spent)

        def close(self, slot):
            tick(100.0)
            super().close(slot)

    engine = Engine(CYCLE, Notes(instant=True))
    Tells(engine, lambda n: Pick(0, 2))
    run(engine)
    first, rounds = found[0], len(found)
    run(engine)
    assert all(spent.rest > 10 + first.rest / 2 for spent in found[1:])
    assert first.rest < 10
    assert [i for i, spent in enumerate(found) if spent.choosing > 100] == [rounds]


class Rests(Controller):
    """Rests in every round, and need not be asked about so many behind one."""

    def __init__(self, engine: Engine, on: int) -> None:
        super().__init__(engine.controller.members, clock=lambda: 0.0)
        engine.controller = engine._drafting.controller = self
        self.on, self.asked, self.lasted, self.opened = on, 0, [], 0

    def open(self, slot, key):
        super().open(slot, key)
        self.opened = sum(self.lasted)

    def rests(self, batch):
        self.asked += 1
        return True

    def rests_on(self, waiting):
        return self.on

    def rested(self, *seconds, once=False):
        self.lasted.append(len(seconds))


@pytest.mark.parametrize("on", [0, 5])
def test_who_rests_is_not_asked_in_every_round_but_told_of_all_before_a_text_begins_or_ends(on):
    engine = Engine(TARGET, ModelDrafter(CYCLE), k="auto", max_batch=2)
    control = Rests(engine, on)
    run(engine, tokens=40)
    assert sum(control.lasted) == engine.stats.rounds == 40
    assert control.asked == len(control.lasted) == -(-40 // (on + 1))
    params = SamplingParams(max_new_tokens=40, eos_token_ids=())
    first = engine.submit([1, 2, 3], params)
    for _ in range(8):
        engine.step()
    second = engine.submit([1, 2, 3], params)
    engine.step()
    assert control.opened == 48
    while engine.busy:
        engine.step()
    assert first.emitted == second.emitted
    assert sum(control.lasted) == 40 + 48


class LooksOnce(Rests):
    """Looks in the first round, and rests in all others."""

    def __init__(self, engine: Engine, on: int) -> None:
        super().__init__(engine, on)
        self.chosen, self.judged = 0, []

    def rests(self, batch):
        return super().rests(batch) and self.asked > 1

    def again(self, slots, budgets, late=()):
        return None

    def looks(self):
        return self._instant

    def choose(self, asks, crowded=False):
        self.chosen += 1
        return [None] * len(asks)

    def spent(self, picks, spent):
        pass

    def told(self, told):
        self.judged.append((sum(self.lasted), told.reached, told.accepted))


@pytest.mark.parametrize("on", [0, 6])
@pytest.mark.parametrize("right", [True, False])
def test_what_was_looked_at_is_judged_by_the_text_while_the_controller_rests(on, right):
    """Without a round in which it is asked; as soon as it is asked whether to rest further."""
    look = Notes(instant=True)
    engine = Engine(CYCLE if right else MarkovModel(TURN.T), look, k="auto")
    control = LooksOnce(engine, on)
    run(engine, tokens=60)
    ((rounds, reached, accepted),) = control.judged
    assert control.chosen == 1
    assert sum(control.lasted) == 59
    assert (reached, accepted) == ((look.most, look.most) if right else (1, 0))
    if right:  # the first of its tokens is the looking round's own
        assert look.most - 1 <= rounds <= look.most + on
    else:
        assert rounds == 0


class Along(Controller):
    """Counts what it is asked and told."""

    def __init__(self, engine: Engine, clock) -> None:
        super().__init__(engine.controller.members, clock=clock)
        engine.controller = engine._drafting.controller = self
        self.asked, self.told_of, self.closed = 0, 0, []

    def again(self, *args):
        self.asked += 1
        return super().again(*args)

    def emitted(self, slot, tokens):
        self.told_of += tokens
        super().emitted(slot, tokens)

    def _went_on(self, along, rounds):
        self.told_of += sum(emitted for _, _, _, emitted, *_ in rounds)
        super()._went_on(along, rounds)

    def close(self, slot):
        self.closed.append(self.told_of)
        super().close(slot)


class Forgets(Drafting):
    """Tells of no rounds that went along."""

    def _tell(self, once=False) -> None:
        self._along = None
        super()._tell(once)


@pytest.mark.parametrize("kind", [Drafting, Forgets])
def test_of_rounds_that_go_along_all_is_told_before_the_text_ends(kind, monkeypatch):
    tick = ticking(monkeypatch)

    class Quick(Notes):
        def draft(self, *args):
            tick(0.01)
            return super().draft(*args)

    monkeypatch.setattr("outpace.engine.engine.Drafting", kind)
    engine = Engine(CYCLE, Quick(instant=False), k="auto")
    control = Along(engine, tick)
    for texts in (1, 2, 3):
        run(engine, tokens=400)
        plain = engine.stats.rounds - engine.stats.drafted_rounds
        known = control.closed[-1] + plain >= 400 * texts
        assert known is (kind is Drafting)
    assert control.asked < engine.stats.drafted_rounds / 3
