"""When something breaks inside a round: slots come back, others go on, nothing hangs."""

from __future__ import annotations

import gc

import pytest

import outpace
from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel

V = 8
PARAMS = SamplingParams(max_new_tokens=20, eos_token_ids=())


class Fragile(MarkovModel):
    """Raises at chosen forward passes."""

    def __init__(self, table):
        super().__init__(table)
        self.calls, self.break_at, self.error = 0, set(), RuntimeError("out of memory")

    def forward(self, *args, **options):
        self.calls += 1
        if self.calls in self.break_at:
            raise self.error
        return super().forward(*args, **options)


def make(max_batch: int = 2) -> tuple[Fragile, Engine]:
    target = Fragile(MarkovModel.random(V, 2, 0).table)
    drafter = ModelDrafter(MarkovModel.random(V, 2, 1))
    return target, Engine(target, drafter, 3, max_batch=max_batch)


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_error_ends_who_took_part_and_frees_the_slots(call, error):
    """In prefill or in a round, of the first or a later request."""
    target, engine = make()
    target.break_at, target.error = {call}, error
    requests = [engine.submit([1, 2, 3], PARAMS) for _ in range(3)]
    with pytest.raises(type(error)):
        drain(engine)
    assert engine.free_slots == 2
    assert requests[0].failure is error
    assert requests[2].failure is None
    drain(engine)  # the one that waited goes on, in a clean slot
    plain = Engine(MarkovModel(target.table))
    twin = plain.submit([1, 2, 3], PARAMS)
    drain(plain)
    assert requests[2].emitted == twin.emitted
    again = engine.submit([1, 2, 3], PARAMS)
    drain(engine)
    assert again.emitted == twin.emitted


@pytest.mark.parametrize("call", [1, 2, 4])
def test_generate_raises_and_the_generator_stays_usable(call):
    target = Fragile(MarkovModel.random(V, 2, 0).table)
    generator = outpace.Generator(target, ModelDrafter(MarkovModel.random(V, 2, 1)), 3, max_batch=1)
    target.break_at = {call}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            generator.generate([1, 2, 3], params=PARAMS)
        assert generator.engine.free_slots == 1
        target.break_at = {target.calls + call}
    target.break_at = set()
    assert len(generator.generate([1, 2, 3], params=PARAMS).token_ids) == 20


def test_a_neighbour_learns_of_the_failure():
    target = Fragile(MarkovModel.random(V, 2, 0).table)
    generator = outpace.Generator(target, ModelDrafter(MarkovModel.random(V, 2, 1)), 3)
    a, b = generator.stream([1, 2], params=PARAMS), generator.stream([3, 4], params=PARAMS)
    next(a)
    target.break_at = {target.calls + 1}
    with pytest.raises(RuntimeError, match="out of memory"):
        list(a)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(b)
    assert not generator.engine.busy


def test_a_cancel_from_within_a_round_waits_for_its_end():
    """A garbage collector may drop an abandoned stream while a pass runs."""
    target = Fragile(MarkovModel.random(V, 2, 0).table)
    generator = outpace.Generator(target, ModelDrafter(MarkovModel.random(V, 2, 1)), 3)
    doomed = [generator.stream([1, 2], params=PARAMS)]
    kept = generator.stream([3, 4], params=PARAMS)
    next(kept)
    honest = MarkovModel.forward

    def collecting(self, *args, **options):
        doomed.clear()
        gc.collect()
        return honest(self, *args, **options)

    target.__class__ = type("Collecting", (Fragile,), {"forward": collecting})
    events = list(kept)
    assert len(events) == 19
    assert generator.engine.free_slots == 8


def test_a_cancel_while_slots_are_given_back_is_no_exception():
    """A garbage collector may drop an abandoned stream there, too."""
    _, engine = make(max_batch=3)
    requests = [engine.submit([1, 2, 3], PARAMS) for _ in range(3)]
    engine.step()
    honest = engine.drafter.close

    def cancelling(slot):
        honest(slot)
        for request in requests[:2]:
            engine.cancel(request)

    engine.drafter.close = cancelling
    engine.cancel(requests[1])
    assert [r.finish_reason for r in requests] == ["cancelled", "cancelled", None]
    assert engine.free_slots == 2
    drain(engine)
    assert engine.free_slots == 3
    assert len(requests[2].emitted) == 20


def test_times_of_a_batch_are_counted_once():
    import time

    generator = outpace.Generator(MarkovModel.random(V, 2, 0), max_batch=8)
    stream = generator.stream([[1]] * 8, params=PARAMS)
    began = time.perf_counter()
    list(stream)
    wall = time.perf_counter() - began
    assert stream.stats.emitted == 160
    assert stream.stats.seconds <= wall
    assert sum(r.stats.round_seconds for r in stream.results) > 4 * stream.stats.round_seconds
