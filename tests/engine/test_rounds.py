"""What one round or text leaves to the next: nothing that was the other's."""

from __future__ import annotations

import itertools
import random

import pytest
from simulation import CHEAP, LOOK, MODEL, Run, World, alike, steady, still

from outpace.engine.control import Ask, Controller, Pick, Spent, Told
from outpace.engine.control.along import Along
from outpace.engine.control.estimates import Estimates
from outpace.engine.control.gaps import Gaps
from outpace.engine.control.held import PLAIN
from outpace.engine.control.looks import Looks
from outpace.engine.control.prices import Prices
from outpace.engine.control.probes import Probe
from outpace.engine.control.survival import FAILED
from outpace.engine.control.times import EARLY, MOVED, SETTLED


def experienced() -> Controller:
    """It has drafted for a text, with thoughts that take half a plain round, and begins another."""
    control = Controller([MODEL], clock=itertools.count(0.0, 5.0).__next__)
    World(CHEAP, [MODEL], [steady(0.9)]).generate(control, 600, Run())
    control.open(0, 0.0)
    return control


def timed(control: Controller) -> Controller:
    """A text begins, and plain decoding is timed."""
    control.open(0, 0.0)
    while control.rests(1):
        control.rested(10.0)
    control._settle()
    return control


def drafts(control: Controller) -> None:
    """A round: all but the last of what is drafted is right, if anything is drafted."""
    picks = control.again([0], [16])
    if picks is None:
        picks = control.choose([Ask(0, 16, 400, {}, {0: 0})])
    k = picks[0].k if picks[0] else 0
    control.emitted(0, max(k, 1))
    if k:
        control.told(Told(0, 0, 0, k, k - 1))
    control.spent(picks, Spent({}, 1.0 * k, 0.0, 10.3 + 0.3 * k, 1 + k))


def test_a_gap_ends_with_its_text():
    """However long that was: the next one is in a gap of its own, or in none."""
    control, before = timed(still(members=(MODEL, LOOK))), Gaps().hazard

    def look(found: int) -> float:
        if control.again([0], [16]) is None:
            assert control.looks() == [1]
            control.choose([Ask(0, 16, 2000, {1: range(found + 1)}, {0: 0})])
        control.emitted(0, 1)
        control.spent([None], Spent({1: 0.1}, 0.0, 0.0, 10.0, 1))
        return control._gaps[0.0].hazard

    control.emitted(0, 2000)
    assert look(0) == before
    control.close(0)
    control.open(0, 0.0)
    assert look(4) == before
    assert look(0) == before
    assert look(4) != before  # within a text one is told of


def test_a_round_that_nobody_may_draft_in_is_not_one_of_those_before():
    control = experienced()
    rounds = 0
    while not control._along and rounds < 200:
        drafts(control)
        rounds += 1
    assert control._along
    began = control._round
    control.sits_out()
    control.emitted(0, 1)
    control.spent([None], Spent({}, 0.0, 0.0, 10.3, 1))
    assert control._round == began + 1
    assert control._aftermath.tail == [10.3]
    assert not control._stride.rounds  # nothing is promised of it


@pytest.mark.parametrize(
    ("looks", "phase", "cold", "learned"),
    [
        ({0: 0.1}, SETTLED, False, True),
        ({}, SETTLED, False, False),
        ({0: 0.1}, MOVED, False, False),
        ({0: 0.1}, EARLY, False, False),
        ({0: 0.1}, SETTLED, True, False),
    ],
)
def test_what_comparing_takes_is_learned_where_it_is_done_and_nothing_else(
    looks, phase, cold, learned
):
    """Neither behind a draft nor behind a prompt, where all takes longer."""
    prices = Prices([LOOK], 16)
    prices.rested(1, [10.0] * 6, timing=True)
    prices.add([None], [Spent(looks, 0.0, 0.0, 15.0, 1)], phase, cold)
    assert (prices.compared(1) > 0) is learned


def test_a_probe_that_took_the_last_of_the_purse_is_over():
    """The plain rounds until it is filled again are no part of it."""
    control = experienced()
    control._pause_for([0], 0)
    control._purse.seconds, control._purse.needs = 0.0, 5.0
    control._probes.now = Probe(0, 2, [0], 1.3, False, reached=2, passed=2)
    count, seconds = control._probes.count, control._probes.seconds
    for _ in range(64):
        assert control.rests(1)
        control.rested(10.3)
    control._settle()
    assert (control._probes.count, control._probes.seconds) == (count, seconds)


@pytest.mark.parametrize(("rounds", "counts"), [(2, False), (9, True)])
def test_plain_decoding_is_timed_by_enough_rounds_or_by_none(rounds, counts):
    """A text that begins may cut that short, when rounds still take longer for the draft before."""
    control = timed(still())
    before = control._prices.plain(1)
    control._aftermath.drafted(False)
    control._pause_for([0], rounds)
    control._timing = True
    for _ in range(rounds):
        assert control.rests(1)
        control.rested(12.0)
    control.open(1, 0.0)
    assert (control._prices.plain(1) > before + 0.1) is counts


def test_rounds_that_vary_end_where_something_else_is_chosen():
    """They go on as long as that is chosen."""
    for other, expected in ((alike(0, 5, 1), [6] * 16), (alike(0, 8), [6, 6] + [8] * 14)):
        control = experienced()
        control._batch, control._turns, control._varies = 1, 1, control._drafted + 1
        drafted = [control._varied([0], alike(0, 5, 1) if n < 2 else other) for n in range(16)]
        assert drafted == expected


def test_nor_do_they_go_on_for_more_sequences():
    control = experienced()
    for batch, expected in ((1, 6), (2, 5), (1, 5)):
        control._prices.add([Pick(0, 8)] * batch, [Spent({}, 8.0, 0.0, 14.0, 9)])
        control._batch = batch
        if batch == 1 and expected == 6:
            control._turns, control._varies = 1, control._drafted + 1
        assert control._varied([0], alike(0, 5, 1)) == expected


def test_nor_do_they_draft_more_than_twice_as_far_as_was_ever_drafted():
    control = timed(still())
    control._prices.add([Pick(0, 2)], [Spent({}, 2.0, 0.0, 11.0, 3)])
    control._batch, control._turns, control._varies = 1, 2, control._drafted + 1
    assert control._varied([0], alike(0, 4)) == 4  # it was to be two more
    control._prices.add([Pick(0, 3)], [Spent({}, 3.0, 0.0, 11.0, 4)])
    assert control._varied([0], alike(0, 4)) == 6


def test_how_alike_rounds_of_a_text_are_is_known_by_temperature(monkeypatch):
    """What is refused at one, and not at another, is no likeness of texts."""

    def expected(others: bool) -> list[float]:
        """Of a text at T = 0.8, behind such texts, and between them some at T = 0, if any."""
        found, rng = Estimates([MODEL], 16), random.Random(0)
        for text in range(80):
            key = 0.0 if text % 2 else 0.8
            accepted = [10 if key == 0.0 else rng.choice((0, 2)) for _ in range(8)]
            if others or key:
                found.open(0, key)
                for right in accepted:
                    found.add(Told(0, 0, 0, right + 1, right))
                found.close(0)
        found.open(0, 0.8)
        found.emitted(0, 8)
        found.add(Told(0, 0, 0, 8, 7))
        found.part(0)
        tokens: list[float] = found.tokens(0, 0, 0).tolist()
        return tokens

    assert expected(True) == pytest.approx(expected(False))
    apart = Estimates._likeness
    monkeypatch.setattr(Estimates, "_likeness", lambda self, _, m, kind: apart(self, 0.0, m, kind))
    assert expected(True) != pytest.approx(expected(False), rel=0.01)


def test_a_draft_that_was_not_chosen_shows_nothing_of_a_text_that_goes_as_expected():
    """Nor does one by another model."""
    control = still(members=(MODEL, MODEL))
    control.open(0, 0.0)
    for now, member, missed in ((PLAIN, 0, 0), (alike(0, 4), 1, 0), (alike(0, 4), 0, 1)):
        control._now = now
        control.told(Told(0, member, 0, 1, 0))
        assert control._missed == missed


@pytest.mark.parametrize(("counts", "rounds"), [(False, 3), (True, 1)])
def test_rounds_that_vary_are_not_held_against_what_was_expected(counts, rounds):
    """Unless they are to go on like that: a refused draft shows that they do not."""
    along = Along(
        slot=0,
        choice=alike(0, 4),
        most=16,
        state=FAILED,
        passed=0,
        varies=0,
        more=1,
        lasts=2,
        counts=counts,
        rounds=15,
        tokens=1000,
        expected=3.0,
        beside=0.0,
        since=0,
        odd=100.0,
        missed=0,
        misses=1,
        tells=False,
    )
    went = 0
    while along.add(along.k, 1, 0, 1, 1.0, 10.0, along.k + 1):
        went += 1
    assert went + 1 == rounds


def test_what_was_not_judged_ends_rounds_that_go_along():
    """It is not told as a refusal, nor as a draft that was accepted as a whole."""
    control, along, rounds = experienced(), None, 0
    while along is None and rounds < 200:
        drafts(control)
        along, rounds = control.along(), rounds + 1
    judged = len(control._judged)
    assert not along.add(along.k, 0, 0, 0, 1.0, 10.6, along.k + 1)
    control.went(along)
    assert len(control._judged) == judged
    assert control._missed == 0


@pytest.mark.parametrize(("alone", "eager"), [(True, set()), (False, {0})])
def test_who_was_right_about_the_last_text_is_not_eager_about_the_next(alone, eager):
    """Unless there are others, one of which it may have been."""
    looks = Looks([LOOK, MODEL], Prices([LOOK, MODEL], 16), False)
    looks.eager.add(0)
    looks.new_text(alone)
    assert looks.eager == eager


def test_looks_at_several_sequences_are_judged_by_such():
    """Not by those at a single one."""
    looks = Looks([LOOK], Prices([LOOK], 16), False)
    for batch, count in ((1, 40), (4, 2), (1, 40), (16, 2)):
        looks.of(batch)
        if looks._known(0).count < 40:
            looks.count([0] * (count - looks._known(0).count), 0.0, 1)
        assert looks._known(0).count == count


def test_a_round_that_is_like_no_other_is_counted_among_those_in_which_is_rested():
    """As a plain one, whatever it took."""
    control = timed(still())
    control._pause_for([0], 10)
    began = control._round
    assert control.rests(1)
    control.rested(10.0, 10.0, 500.0, once=True)
    assert control._round == began + 3
    assert control._rested[-3:] == [10.0, 10.0, pytest.approx(10.0)]
