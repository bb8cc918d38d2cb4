"""What parts of a round cost: estimates that little moves, between and beyond what was measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.engine.control import Ask, Controller, Pick, Profile, Spent
from outpace.engine.control import prices as cost_prices
from outpace.engine.control import times as cost_times
from outpace.engine.control.held import PLAIN
from outpace.engine.control.options import Option
from outpace.engine.control.prices import Prices, settled
from outpace.engine.control.times import (
    EARLY,
    HOPE,
    MOVED,
    SETTLED,
    SETTLES,
    Mean,
    Pace,
    RowTimes,
    StepTimes,
    Times,
)


def passes() -> Times:
    times = RowTimes(Pace(lambda: times.measured))
    return times


def drafts() -> Times:
    times = StepTimes(Pace(lambda: times.measured))
    return times


def measured(times: Times, batch: int, by_size: dict[int, float], count: int = 30) -> Times:
    for _ in range(count):
        for size, seconds in by_size.items():
            times.add(size, batch, seconds)
    return times


def sizes(*some: int) -> np.ndarray:
    return np.array(some, dtype=np.float64)


def near(*some: float, within: float = 0.1):
    return pytest.approx(list(some), rel=within)


def test_the_first_ones_count_by_the_shortest():
    """What runs for the first time takes long."""
    mean = Mean()
    for seconds in (9.0, 1.0, 5.0):
        mean.add(seconds)
    assert mean.value == 1.0


@pytest.mark.parametrize("what", [Mean, passes])
def test_what_takes_exceptionally_long_hardly_moves_it(what):
    found, plain = what(), []
    for i in range(200):
        seconds = 30.0 if i % 20 == 19 else 1.0
        plain.append(seconds)
        found.add(seconds) if isinstance(found, Mean) else found.add(1, 1, seconds)
    value = found.value if isinstance(found, Mean) else found.one(1, 1)
    assert value < 1.2 < 2 < np.mean(plain)


def test_it_follows_what_has_changed():
    mean, times = Mean(), passes()
    for seconds in [1.0] * 50 + [2.0] * 60:
        mean.add(seconds)
        times.add(3, 1, seconds)
    assert mean.value == pytest.approx(2.0, rel=0.05)
    assert times.one(3, 1) == pytest.approx(2.0, rel=0.05)


def test_between_sizes_it_is_between_them_and_beyond_as_the_shape():
    times = measured(passes(), 1, {1: 10.0, 5: 12.0})
    assert times.at(sizes(1, 3, 5), 1) == near(10, 11, 12, within=0.03)
    further = times.at(sizes(9), 1)[0]
    assert 12 < further < 14
    drafting = measured(drafts(), 1, {4: 9.0})
    assert drafting.at(sizes(0, 4, 9), 1) == near(0, 9, 19, within=0.03)
    assert passes().at(sizes(1, 2), 1).tolist() == [0, 0]


def test_what_a_row_adds_is_found_out(monkeypatch):
    """Else what lies far between two sizes would be taken for a growth by factors, and what lies
    beyond all of them for hardly more than they are."""
    between, beyond = {1: 14.0, 17: 78.0}, {2: 18.0, 4: 26.0, 3: 22.0, 6: 34.0}

    def found() -> tuple[float, float]:
        once = measured(measured(passes(), 4, {1: 14.0}, count=5), 4, beyond, count=1)
        return (
            float(measured(passes(), 4, between, count=20).at(sizes(5), 4)[0]),
            float(once.at(sizes(17), 4)[0]),
        )

    line = measured(passes(), 4, {1: 14.0, 2: 18.0, 17: 78.0}, count=20)
    assert line.at(sizes(5, 9), 4) == near(30, 46, within=0.1)
    assert line.at(sizes(9), 1)[0] == pytest.approx(19, rel=0.15)
    assert found() == near(30, 78, within=0.2)
    monkeypatch.setattr(RowTimes, "_fit", lambda self, batch: None)
    assert found()[0] < 25
    assert found()[1] < 60


def test_what_a_draft_takes_to_begin_with_is_found_out():
    proportional = measured(drafts(), 1, {1: 2.0, 2: 4.0})
    assert proportional.at(sizes(8), 1) == near(16, within=0.1)
    with_overhead = measured(drafts(), 1, {1: 4.0, 2: 5.0})
    assert with_overhead.at(sizes(8), 1) == near(11, within=0.1)


def test_neighbours_that_were_measured_well_are_believed_as_they_are():
    """Steps are real, such as from eight rows to nine where eight are computed at once."""
    times = measured(passes(), 1, {7: 10.0, 8: 10.0, 9: 16.0, 10: 16.0}, count=50)
    assert times.at(sizes(7, 8, 9, 10), 1) == near(10, 10, 16, 16, within=0.08)
    assert times.one(9, 1) == pytest.approx(16.0, rel=0.01)


def test_what_was_slow_once_is_believed_by_its_neighbours_standard():
    times = measured(passes(), 1, {1: 10.0, 2: 10.0, 4: 10.4})
    times.add(3, 1, 40.0)
    assert times.at(sizes(3), 1) == near(10.2, within=0.1)
    for _ in range(10):
        times.add(3, 1, 15.0)
    assert times.at(sizes(3), 1) == near(15, within=0.15)  # it was no chance


def test_the_very_first_measurement_is_believed_least():
    """Beside what weights let expect, and what comes behind it."""
    times = drafts()
    times.expect(1.0)
    times.add(3, 1, 40.0)
    assert times.at(sizes(3), 1)[0] < 20
    for _ in range(5):
        times.add(2, 1, 1.5)
    assert times.at(sizes(2, 3), 1) == near(1.5, 2.0, within=0.35)


def test_what_was_measured_long_ago_follows_its_neighbours():
    """Machines drift: what has not run since is taken to have drifted with the rest."""
    times = measured(passes(), 1, {1: 10.0, 2: 10.2, 3: 10.4})
    before = times.at(sizes(2), 1)[0]
    for _ in range(400):
        times.add(1, 1, 20.0)
        times.add(3, 1, 20.8)
    assert times.at(sizes(2), 1)[0] > 1.3 * before
    assert not passes()._cells
    assert times._cells[1][2].count == 30


def on_an_unsteady_machine() -> float:
    """A size beside another that takes as long, but mostly runs while the machine is slower."""
    times, rng = passes(), np.random.default_rng(0)
    for turn in range(40):
        slow = turn % 2 == 0
        for _ in range(30):
            size = 6 if (rng.random() < 0.8) == slow else 5
            times.add(size, 1, 10.0 * np.exp(0.25 * slow + 0.05 * rng.standard_normal()))
    return float(times.one(6, 1) / times.one(5, 1))


def test_what_was_measured_while_the_machine_was_slow_does_not_seem_dearer(monkeypatch):
    assert on_an_unsteady_machine() < 1.04
    monkeypatch.setattr(cost_times, "_WANDERS", (0.0, 0.0))
    assert on_an_unsteady_machine() > 1.07


@pytest.mark.parametrize("told", [True, False])
def test_a_size_that_is_tried_now_and_then_is_as_dear_as_if_it_always_were(told):
    """What one behind another size takes longer, 8 % here, is told apart."""
    times, rng, before, counts = passes(), np.random.default_rng(0), 4, (24, 2)
    for turn in range(400):
        size = (4, 5)[turn % 2]
        for _ in range(counts[turn % 2]):
            moved = size > before  # the way back takes no longer here
            seconds = (20.0, 21.0)[turn % 2] * np.exp(0.08 * moved + 0.03 * rng.standard_normal())
            times.add(size, 1, seconds, MOVED if moved and told else SETTLED)
            before = size
    assert (times.one(5, 1) / times.one(4, 1) < 1.065) == told
    early = times.early(np.array([5.0]))[0] / times.one(5, 1)  # it never settles here
    assert early + times.rise == pytest.approx(0.08 if told else 0.0, abs=0.03)


@pytest.mark.parametrize("told", [True, False])
def test_a_size_that_settles_late_is_as_dear_as_once_it_is(told):
    """Of four rounds each takes 8 % longer; it is tried in two, and in twelve now and then."""
    times, rng = passes(), np.random.default_rng(0)
    for turn in range(200):
        for _ in range(24):
            times.add(4, 1, 20.0 * np.exp(0.03 * rng.standard_normal()))
        for n in range(12 if turn % 4 == 3 else 2):
            seconds = 21.0 * np.exp(0.08 * (n < SETTLES) + 0.03 * rng.standard_normal())
            phase = SETTLED if n >= SETTLES else EARLY if n else MOVED
            times.add(5, 1, seconds, phase if told or phase == MOVED else SETTLED)
    assert (times.one(5, 1) / times.one(4, 1) < 1.065) == told
    early = times.early(np.arange(7.0)) / times.at(np.arange(7.0), 1)
    assert early[5] == pytest.approx(0.08 if told else 0.0, abs=0.03)
    assert not early[[4, 6]].any()


def believed_of_both(rounds: int) -> float:
    """Of a size that takes 10 ms in as many rounds, one after the other, and 11 in single ones."""
    times, rng = passes(), np.random.default_rng(0)
    for turn in range(200):
        single = turn % 2
        noise = 0.07 * rng.standard_normal() / (1 if single else math.sqrt(20))
        times.add(7, 1, (11.0 if single else 10.0) * np.exp(noise), rounds=1 if single else rounds)
    return times.one(7, 1)


def test_the_mean_of_many_rounds_counts_for_more_than_a_single_one():
    assert believed_of_both(20) < 10.3
    assert believed_of_both(1) > 10.35


def test_rounds_right_behind_a_prompt_are_not_what_others_take():
    """They count where nothing else is known."""
    model, picks = Profile("model", False, 16), [Pick(0, 4)]
    cold, usual = (Spent({}, 2.0 * slow, 0.0, 10.0 * slow, 5) for slow in (1.4, 1.0))
    for counted in (False, True):
        prices = Prices([model], 16)
        prices.add(picks, [cold], cold=True)
        assert prices.draft(0, 1)[4] == pytest.approx(2.8)
        for _ in range(20):
            prices.add(picks, [usual])
            prices.add(picks, [cold], cold=not counted)
        takes = float((prices.draft(0, 1) + prices.rest(np.arange(1.0, 18.0), 1))[4])
        assert takes == pytest.approx(12.0 * (1.17 if counted else 1.0), rel=0.08)
        assert (takes < 12.6) != counted


def test_other_batches_stand_in():
    """Of passes by rows in all, of drafts by their steps."""
    times = measured(passes(), 1, {1: 10.0, 8: 17.0})
    assert times.one(2, 4) == pytest.approx(17.0, rel=0.05)
    measured(times, 4, {1: 26.0})
    assert times.one(1, 4) == pytest.approx(26.0, rel=0.02)
    beside = times.at(sizes(1, 2), 4)
    apart = times.one(8, 1) / times.one(4, 1)
    assert beside[1] / beside[0] == pytest.approx(apart, rel=0.07)
    drafting = measured(drafts(), 1, {1: 1.0, 4: 3.0})
    assert drafting.at(sizes(1, 4), 16) == near(1, 3, within=0.03)


def test_where_it_is_uncertain_it_can_be_hoped_to_be_better():
    """Else what was slow would not be tried again: the more so the less is known of it."""
    times = measured(passes(), 1, {1: 10.0, 5: 14.0})
    hoped = times.at(sizes(1, 3, 5, 12), 1, HOPE) / times.at(sizes(1, 3, 5, 12), 1)
    assert hoped[[0, 2]] == near(1, 1, within=0.01)
    assert 0.8 < hoped[3] < hoped[1] < 0.99
    assert times.longest(1) == 5
    assert times.longest(4) == 0


# --- of rounds --------------------------------------------------------------------------------

MODEL, LOOK = Profile("model", False, 8, 0.25), Profile("n-gram", True, 8)
EXIT = Profile("early exit", False, 8, 0.25, begun=True)


def told(
    prices: Prices, picks, rows: int, *, draft=0.0, rest=10.0, looks=None, reading=0.0, count=4
):
    for _ in range(count):
        prices.add(picks, [Spent(looks or {}, draft, reading, rest, rows)])


def test_before_a_draft_was_timed_it_costs_what_its_weights_do():
    prices = Prices([MODEL], 8)
    told(prices, [None], 1)
    assert prices.longest(0, 1) == 0
    assert prices.draft(0, 1)[:3] == pytest.approx([0, 3.75, 6.25])
    told(prices, [Pick(0, 4)], 5, draft=2.0, count=30)
    assert prices.longest(0, 1) == 4
    assert prices.draft(0, 1)[[0, 4]] == near(0, 2)
    assert prices.plain(1) == pytest.approx(10.0)


def test_rounds_of_plain_decoding_are_told_together():
    prices = Prices([MODEL], 8)
    prices.rested(2, [10.0, 10.0, 90.0, 10.0])
    assert prices.plain(2) == pytest.approx(11.25)
    assert prices.seconds == 120.0
    prices = Prices([MODEL], 8)
    prices.rested(2, [30.0, 20.0, 10.0, 10.0, 90.0], timing=True)
    assert prices.plain(2) == pytest.approx(10.0)
    assert prices.seconds == 160.0


def test_plain_decoding_is_timed_until_it_becomes_no_faster():
    def counted(*seconds):
        return next((n for n in range(len(seconds)) if settled(seconds[:n])), None)

    assert counted(10.0, 10.5, 9.5, 10.0) == 3
    assert counted(5.3, 4.3, 3.8, 2.7, 2.4, 6.4, 2.4, 2.4) == 7
    assert counted(*(0.8**n for n in range(20))) == 12


def believed_behind_prompts(cold: int, rounds: int = 1, batch: int = 4) -> float:
    """Of a round of plain decoding that takes 10 ms, and 16 right behind a prompt: after 64 that
    were timed, and 128 texts of so many rounds."""
    prices = Prices([MODEL], 8)
    for _ in range(8):
        prices.rested(batch, [10.0] * 8)
    for _ in range(128):
        prices.rested(batch, [16.0] * rounds, cold=cold)
    return prices.plain(batch)


def test_plain_rounds_right_behind_a_prompt_are_not_what_others_take(monkeypatch):
    """Of several sequences; they count where there are no others."""
    monkeypatch.setattr(cost_prices, "_LATELY", 10**6)
    assert believed_behind_prompts(cold=1) == pytest.approx(10.0)
    assert believed_behind_prompts(cold=0) > 12
    assert believed_behind_prompts(cold=1, rounds=8) > 12  # of which seven are warm
    assert believed_behind_prompts(cold=1, batch=1) > 12
    monkeypatch.undo()
    assert believed_behind_prompts(cold=1) > 12


def test_the_controller_tells_which_plain_rounds_are_right_behind_a_prompt():
    control, told_of = Controller([MODEL]), []
    rested = control._prices.rested

    def note(batch, seconds, timing, behind, cold):
        told_of.append((len(seconds), cold))
        rested(batch, seconds, timing, behind, cold)

    control._prices.rested = note
    for rounds in (40, 1, 2, 30):
        for slot in range(4):
            control.open(slot, 0.0)
        control._resting, control._resters = 10**6, control._keys.copy()
        for _ in range(rounds):
            assert control.rests(4)
            control.rested(10.0)
        control._settle()
    assert told_of == [(40, 3), (1, 1), (2, 2), (30, 3)]


def test_what_a_sequence_adds_to_plain_decoding_is_known_from_drafts(monkeypatch):
    """As each of them is a row, and those of drafts are more: before fewer decode plainly."""

    def of_one() -> float:
        prices = Prices([MODEL], 8)
        for _ in range(4):
            prices.rested(16, [2.0 + 16] * 4)
        for k in (1, 2, 4):
            told(prices, [Pick(0, k)] * 16, k + 1, rest=2.0 + 16 * (k + 1))
        return prices.plain(1)

    assert of_one() < 4
    monkeypatch.setattr(RowTimes, "row", property(lambda self: self._row))
    assert of_one() > 10


def test_a_round_that_the_draft_has_begun_has_a_rest_of_its_own():
    prices = Prices([MODEL, EXIT], 8)
    told(prices, [None], 1)
    told(prices, [Pick(1, 3)], 4, draft=3.0, rest=6.0)
    told(prices, [Pick(0, 3)], 4, draft=3.0, rest=11.0)
    assert prices.rest(sizes(4), 1, 1) == near(6)
    assert prices.rest(sizes(4), 1, 0) == near(11)
    assert prices.plain(1) == pytest.approx(10.0)
    assert prices.rest(sizes(1), 1, 1) == pytest.approx(10.0)  # it has begun nothing


def test_where_others_draft_as_well_no_pass_is_begun():
    prices = Prices([EXIT, LOOK], 8)
    told(prices, [None, None], 1)
    told(prices, [Pick(0, 3), None], 4, draft=3.0, rest=6.0)
    told(prices, [Pick(0, 3), Pick(1, 3)], 4, draft=3.0, rest=12.0, looks={1: 0.1})
    assert prices.rest(sizes(4), 2, 0) == near(6)
    assert prices.rest(sizes(4), 2, 1) == near(12)


def promised(members, batch: int, offers=None) -> tuple[Prices, Option]:
    """What the first of them is to take for so many sequences, of which rounds of one token are
    known."""
    control = Controller(members)
    prices = control._prices
    prices.rested(batch, [10.0] * 6, timing=True)
    told(prices, [Pick(0, 1)] * batch, 2, draft=2.0, rest=6.0 if members[0].begun else 16.0)
    for slot in range(batch):
        control.open(slot, 0.0)
    asks = [Ask(slot, 8, 100, offers or {}) for slot in range(batch)]
    worth = control._options.worth(asks, crowded=False)
    return prices, control._options.of_all(asks, worth, PLAIN)[1]


@pytest.mark.parametrize("batch", [4, 16])
def test_of_several_sequences_less_is_hoped_for_but_not_of_a_probe(batch):
    """By the root of how many they are."""
    prices, option = promised([MODEL], batch)
    sober = prices.draft(0, batch) + prices.rest(prices.rows(0), batch, 0, hope=0.0)
    chosen, probed = (np.log(seconds[4:] / sober[4:]) for seconds in (option.seconds, option.one))
    assert probed.max() < -0.01
    assert chosen / probed == pytest.approx(batch**-0.5, abs=0.05)


def test_who_would_begin_the_pass_is_held_against_all_of_it_where_others_propose():
    beside = {1: range(5)}
    (prices, alone), (_, among) = (promised([EXIT, LOOK], 4, some) for some in ({}, beside))
    begun, whole = (prices.rest(sizes(2), 4, member)[0] for member in (0, -1))
    assert among.one[1] - alone.one[1] == pytest.approx(whole - begun)
    assert whole > 1.3 * begun


def test_rows_of_trees_are_learned():
    prices = Prices([MODEL], 8)
    assert prices.rows(0)[:4].tolist() == [1, 2, 3, 4]
    told(prices, [Pick(0, 2)], 9)
    assert prices.rows(0)[:5].tolist() == [1, 5, 9, 13, 17]  # deeper, as many for each level
    told(prices, [Pick(0, 4)], 33)
    assert prices.rows(0)[:6].tolist() == [1, 5, 9, 21, 33, 41]


def test_plain_rounds_so_soon_behind_a_draft_count_only_if_nothing_else_is_known():
    prices = Prices([MODEL], 8)
    prices.rested(1, [10.0] * 4)
    for _ in range(3):
        prices.rested(1, [15.0, 13.0, 12.0, 10.0, 10.0], behind=3)
    assert prices.plain(1) == pytest.approx(10.0, rel=0.05)
    assert prices.seconds == 40 + 3 * 60  # they are part of all time, though
    assert prices.plain_rounds() == 1
    prices.rested(1, [15.0, 13.0, 12.0, 10.0, 10.0, 10.0], behind=3)
    assert prices.plain_rounds() == 2
    assert prices.plain(1) == pytest.approx(10.0, rel=0.05)
    new = Prices([MODEL], 8)
    new.rested(1, [15.0, 13.0, 12.0], timing=True, behind=6)
    assert new.plain(1) > 11


def test_a_few_measurements_of_plain_decoding_tell_what_it_takes(monkeypatch):
    """What drafts alone take longer is taken for the machine's pace at first."""

    def believed() -> float:
        prices = Prices([MODEL], 8)
        for _ in range(4):
            prices.rested(1, [10.0] * 4, timing=True)
        told(prices, [Pick(0, 4)], 5, rest=11.0, count=60)
        for _ in range(4):
            told(prices, [Pick(0, 4)], 5, rest=13.2, count=200)
            prices.rested(1, [10.0] * 6, timing=True)
        return prices.plain(1)

    assert believed() < 10.2
    monkeypatch.setattr("outpace.engine.control.prices._TOGETHER", 0.2)
    assert believed() > 10.25


def test_what_is_looked_at_and_read_is_paid_for():
    prices = Prices([MODEL, LOOK], 8)
    told(prices, [None], 1, looks={1: 0.5}, reading=3.0)
    prices.read(0, 30, 3.0)
    assert prices.look(1, 1) == 0.5
    assert prices.reading[0].value == pytest.approx(0.1)
    assert prices.seconds == pytest.approx(4 * 13.5)
    assert prices.rounds == [0, 0]


def test_what_a_look_takes_is_for_each_of_so_many_sequences():
    prices = Prices([MODEL, LOOK], 8)
    told(prices, [None] * 4, 1, looks={1: 2.0})
    assert prices.look(1, 1) == 0.5
    assert prices.look(1, 4) == 2.0
    assert prices.look(1, 8) == 4.0


def test_looks_behind_a_pause_do_not_make_others_dearer():
    prices = Prices([MODEL, LOOK], 8)
    late = Spent({1: 5.0}, 0.0, 0.0, 10.0, 1, late={1})
    prices.add([None], [late])
    assert prices.look(1, 1) == 5.0  # nothing else is known
    told(prices, [None], 1, looks={1: 0.5})
    prices.add([None], [late])
    assert prices.look(1, 1) == 0.5
    assert prices.look(1, 1, late=True) == 5.0
