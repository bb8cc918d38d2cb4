"""Statistics follow the glossary, and merging them is adding them."""

from __future__ import annotations

import pytest

from outpace import Stats


def example() -> Stats:
    stats = Stats()
    stats.count(proposed=4, accepted=4, emitted=5, steps=4, ended=True)
    stats.count(proposed=4, accepted=1, emitted=2, steps=4)
    stats.count(proposed=2, accepted=0, emitted=1, steps=2)
    stats.count(proposed=0, accepted=0, emitted=1, steps=0)
    stats.spend(0.2, 0.4, 0.7)
    return stats


def test_definitions():
    s = example()
    assert s.acceptance_rate == 5 / 10
    assert s.alpha == (2 / 3, 1 / 2, 1.0, 1.0)
    assert s.tokens_per_pass == 9 / 4
    assert s.full_accept_fraction == 1 / 3
    assert s.draft_cost == pytest.approx((0.2 / 10) / (0.4 / 4))


def test_a_short_branch_of_a_tree_that_is_accepted_whole_reaches_no_further():
    s = Stats()
    s.count(proposed=6, accepted=2, emitted=3, steps=4, ended=True)
    s.count(proposed=6, accepted=2, emitted=3, steps=4)
    assert s.alpha == (1.0, 1.0, 0.0)
    assert s.reached == [2, 2, 1]
    assert s.full_accept_fraction == 1 / 2


def test_merging():
    both = example().merge(example())
    assert both.rounds == 8
    assert both.reached == [6, 4, 2, 2]
    assert both.alpha == example().alpha
    assert both.round_seconds == pytest.approx(1.4)
    assert example().merge(Stats()).to_dict() == example().to_dict()


def test_nothing_drafted():
    s = Stats()
    s.count(0, 0, 1, 0)
    assert s.acceptance_rate is None
    assert s.full_accept_fraction is None
    assert s.alpha == ()
