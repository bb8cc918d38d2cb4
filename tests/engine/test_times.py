"""What parts of a round cost: means that little moves, and lines where nothing was measured."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.engine.control import Pick, Profile, Spent
from outpace.engine.control.prices import Prices
from outpace.engine.control.times import Mean, Times


def measured(times: Times, batch: int, by_size: dict[int, float], count: int = 4) -> Times:
    for size, seconds in by_size.items():
        for _ in range(count):
            times.add(size, batch, seconds)
    return times


def sizes(*some: int) -> np.ndarray:
    return np.array(some, dtype=np.float64)


def test_the_first_ones_count_by_the_shortest():
    """What runs for the first time takes long."""
    mean = Mean()
    for seconds in (9.0, 1.0, 5.0):
        mean.add(seconds)
    assert mean.value == 1.0


def test_what_takes_exceptionally_long_hardly_moves_a_mean():
    mean, plain = Mean(), []
    for i in range(200):
        mean.add(30.0 if i % 20 == 19 else 1.0)
        plain.append(30.0 if i % 20 == 19 else 1.0)
    assert mean.value < 1.2 < 2 < np.mean(plain)


def test_a_mean_follows_what_has_changed():
    mean = Mean()
    for seconds in [1.0] * 50 + [2.0] * 50:
        mean.add(seconds)
    assert mean.value == pytest.approx(2.0, rel=0.05)


def test_between_sizes_and_beyond_there_is_a_line():
    times = measured(Times(), 1, {1: 10.0, 5: 12.0})
    assert times.at(sizes(1, 3, 5, 9), 1) == pytest.approx([10, 11, 12, 14])
    drafting = measured(Times(0.0), 1, {4: 8.0})
    assert drafting.at(sizes(0, 1, 4, 8), 1) == pytest.approx([0, 2, 8, 16])
    assert Times().at(sizes(1, 2), 1) == pytest.approx([0, 0])


def test_more_rows_never_promise_to_take_less():
    """Noise may make a longer one look shorter; beyond what was measured that goes no further."""
    times = measured(Times(), 1, {1: 10.0, 2: 9.0})
    assert times.at(sizes(2, 20), 1) == pytest.approx([9, 9])


def test_other_batches_stand_in_by_rows_in_all():
    times = measured(Times(), 1, {1: 10.0, 8: 17.0})
    assert times.one(2, 4) == pytest.approx(17.0)
    measured(times, 4, {1: 26.0})  # of what is next to it 2.6 times as much
    assert times.one(1, 4) == 26.0
    assert times.one(2, 4) == pytest.approx(2.6 * 17.0)


def test_what_was_not_measured_is_hoped_to_take_a_little_less():
    times = measured(Times(), 1, {1: 10.0, 5: 14.0})
    found = times.hoped(sizes(1, 3, 5), 1) / times.at(sizes(1, 3, 5), 1)
    assert found[0] == found[2] == 1
    assert 0.9 < found[1] < 1


def test_a_first_measurement_that_was_slow_is_tried_again():
    """By chance, or as nothing was warm: it counts as little more than what others promise."""
    times = Times(0.0)
    times.add(4, 1, 40.0)
    assert times.at(sizes(4), 1) == pytest.approx([40])  # there is nothing else
    measured(times, 1, {1: 1.0, 2: 2.0})
    assert times.at(sizes(4), 1)[0] <= 1.5 * 4.0
    measured(times, 1, {4: 40.0})
    assert times.at(sizes(4), 1) == pytest.approx([40])  # it was no chance
    late = measured(Times(0.0), 1, {1: 1.0, 2: 2.0})
    late.add(4, 1, 400.0)
    assert late.at(sizes(4), 1)[0] <= 1.5 * 4.0


# --- of rounds --------------------------------------------------------------------------------

MODEL, LOOK = Profile("model", False, 8, 0.25), Profile("n-gram", True, 8)
EARLY = Profile("early exit", False, 8, 0.25, begun=True)


def told(prices: Prices, picks, rows: int, *, draft=0.0, rest=10.0, looks=None, reading=0.0):
    for _ in range(4):
        prices.add(picks, Spent(looks or {}, draft, reading, rest, rows, 1))


def test_before_a_draft_was_timed_it_costs_what_its_weights_do():
    prices = Prices([MODEL], 8)
    told(prices, [None], 1)
    assert not prices.tried(0)
    assert prices.draft(0, 1)[:3] == pytest.approx([0, 2.5, 5.0])
    told(prices, [Pick(0, 4)], 5, draft=2.0)
    assert prices.tried(0)
    assert prices.draft(0, 1)[[0, 2, 4]] == pytest.approx([0, 1, 2])
    assert (prices.plain(1), prices.plain_rounds(1)) == (10.0, 4)


def test_a_round_that_the_draft_has_begun_has_a_rest_of_its_own():
    prices = Prices([MODEL, EARLY], 8)
    told(prices, [None], 1)
    told(prices, [Pick(1, 3)], 4, draft=3.0, rest=6.0)
    told(prices, [Pick(0, 3)], 4, draft=3.0, rest=11.0)
    assert prices.rest(sizes(4), 1, 1)[0] == pytest.approx(6.0)
    assert prices.rest(sizes(4), 1, 0)[0] == pytest.approx(11.0)
    assert prices.plain(1) == 10.0


def test_rows_of_trees_are_learned():
    prices = Prices([MODEL], 8)
    assert prices.rows(0)[:4].tolist() == [1, 2, 3, 4]
    told(prices, [Pick(0, 2)], 9)
    assert prices.rows(0)[:4].tolist() == [1, 2, 9, 4]


def test_what_is_looked_at_and_read_is_paid_for():
    prices = Prices([MODEL, LOOK], 8)
    told(prices, [None], 1, looks={1: 0.5}, reading=3.0)
    prices.read(0, 30, 3.0)
    assert prices.look[1].value == 0.5
    assert prices.reading[0].value == pytest.approx(0.1)
    assert prices.seconds == pytest.approx(4 * 13.5)
    assert prices.rounds == [0, 0]
