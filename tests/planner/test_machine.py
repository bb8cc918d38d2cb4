"""What is timed are the rounds that were asked for; how long they take decides nothing here."""

from __future__ import annotations

import json
import statistics

import pytest

from outpace import OptionError
from outpace.drafters import ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.models.loading import memory_of
from outpace.planner import Added, machine, measure_drafting, measure_machine
from outpace.planner.machine import cache_bytes, eased
from outpace.planner.rounds import (
    FillerDrafter,
    faster_half,
    read_seconds,
    spread_of,
    time_rounds,
)

TARGET = MarkovModel.random(5, 2, 0, sharpness=2)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * MarkovModel.random(5, 2, 1).table)
QUICK = {"repeats": 2, "seconds": 0.02}


def engine_of(drafter, slots=2, max_len=256) -> Engine:
    return Engine(TARGET, drafter, 16, None, slots, max_len)


def test_the_grid_has_every_row_of_every_batch():
    rows = (1, 2, 5, 9)
    found = measure_machine(
        TARGET, [1, 2], temperatures=(0.0, 0.7), asked=(3,), batches=(1, 2), rows=rows, **QUICK
    )
    for times in (found.passes, found.greedy, found.sampled):
        batches = {batch for _, batch in times.points}
        assert 3 in batches
        assert set(times.points) == {(r, b) for r in rows for b in batches}
    assert found.rounds(0.0) is found.greedy
    assert found.rounds(0.3) is found.sampled
    assert found.bandwidth is None
    json.dumps(found.to_dict())


def test_time_that_is_up_leaves_what_was_asked_for():
    found = measure_machine(TARGET, [1], asked=(2,), rows=(1, 2), repeats=1, seconds=1e-9)
    assert found.batches == (2,)
    assert found.sampled is None
    assert found.rounds(0.9) is found.greedy


@pytest.mark.parametrize("batch", [1, 2])
def test_rounds_are_those_that_were_asked_for(batch):
    engine = engine_of(FillerDrafter())
    before = engine.stats
    laps = time_rounds(engine, [1, 2, 3], (0, 1, 7), batch=batch, temperature=0.9, **QUICK)
    assert {k: {lap.rows for lap in each} for k, each in laps.items()} == {0: {1}, 1: {2}, 7: {8}}
    assert all(lap.whole >= lap.target > 0 for each in laps.values() for lap in each)
    assert all(len(each) >= 2 for each in laps.values())
    assert engine.stats is before
    assert not engine.busy
    assert engine.free_slots == 2
    assert engine.k == 16


def test_texts_that_end_are_begun_again():
    engine = engine_of(ModelDrafter(NEAR), max_len=24)
    laps = time_rounds(engine, [1] * 50, (0, 16), repeats=6)
    assert all(lap.k == 16 for lap in laps[16])
    assert len(laps[16]) >= 6
    with pytest.raises(OptionError, match="do not fit 16 positions"):
        time_rounds(engine_of(ModelDrafter(NEAR), max_len=16), [1], (16,))


class Noting(FillerDrafter):
    """Notes how long the texts are that it is asked to draft for."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def propose(self, context, budget):
        self.lengths.append(len(context.tokens))
        return super().propose(context, budget)


@pytest.mark.parametrize(
    ("prompt", "tokens", "positions", "longest"),
    [(60, 40, 4096, 145), (1000, 64, 4096, 1315), (60, 300, 4096, 385), (200, 40, 256, 256)],
)
def test_texts_are_as_long_as_they_are_in_use(prompt, tokens, positions, longest):
    """Which the positions of the engine leave open: until they end they would be far longer."""
    drafter = Noting()
    engine = engine_of(drafter, max_len=positions)
    time_rounds(engine, [1] * prompt, (0, 1, 7), tokens=tokens, repeats=120, seconds=5.0)
    assert statistics.fmean(drafter.lengths) == pytest.approx(prompt + tokens / 2, rel=0.1)
    assert max(drafter.lengths) <= longest


def test_what_drafting_adds_is_known_for_every_k():
    engine = engine_of(ModelDrafter(NEAR))
    here = measure_machine(TARGET, [1], asked=(1, 2), batches=(), rows=(1, 2, 3, 5), **QUICK)
    found = measure_drafting(engine, here, [1, 2], (1, 4), batches=(1, 2), **QUICK)
    assert set(found.points) == {(k, b) for k in (0, 1, 4) for b in (1, 2)}
    assert found(0, 1) == 0
    assert found.step(1) > 0
    looks = measure_drafting(engine_of(NgramDrafter()), here, [1, 2], (1, 4), **QUICK)
    assert looks(0, 1) == looks(4, 1) > 0
    assert read_seconds(engine, [1, 2, 3]) > 0


def test_between_points_lie_lines_also_below_zero():
    found = Added({(0, 1): 0.0, (2, 1): -4.0, (6, 1): 4.0, (0, 3): 0.0, (2, 3): 4.0, (6, 3): 8.0})
    assert found(1, 1) == -2
    assert found(4, 1) == 0
    assert found(2, 2) == 0
    assert found(8, 1) == 8


def test_fewer_rows_never_take_longer():
    points = {(1, 1): 3.0, (2, 1): 2.0, (4, 1): 5.0, (1, 2): 4.0, (2, 2): 4.0, (4, 2): 4.5}
    assert eased(points) == points | {(1, 1): 2.0, (4, 1): 4.5}


def test_what_else_runs_is_left_out():
    assert faster_half([1.0, 1.2, 9.0, 8.0]) == pytest.approx(1.1)
    assert faster_half([2.0]) == 2
    assert spread_of([1.0]) == 0
    assert spread_of([1.0, 1.0, 1.0, 50.0]) > 1
    assert spread_of([2.0] * 5) == 0


def test_sequences_that_have_no_room_are_refused(monkeypatch):
    """At 8 bytes per position, of which 256 are there."""
    monkeypatch.setattr(machine, "memory_of", lambda device: (10**6, 8 * 256 * 3))
    how = {"batches": (), "rows": (1, 2), "max_len": 256} | QUICK
    assert measure_machine(TARGET, [1], asked=(3,), **how).batches == (3,)
    with pytest.raises(OptionError, match=r"4 sequences need .* plan for fewer"):
        measure_machine(TARGET, [1], asked=(4,), **how)


def test_memory_is_told():
    assert cache_bytes(TARGET) == 8  # one int64 per position
    total, free = memory_of(TARGET.device)
    assert total is None or 0 < free <= total
