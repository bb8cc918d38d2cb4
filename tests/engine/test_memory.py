"""Many requests, and long ones, through one engine: memory stays where it was."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import pytest
import torch

from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel, base
from outpace.models.base import prefill

V = 8


class Keeping(Engine):
    """The control: remembers every request."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = []

    def submit(self, *args, **options):
        self.kept.append(super().submit(*args, **options))
        return self.kept[-1]


GOLDEN = 0.618034
"""Its multiples are temperatures that do not recur."""


def growth(kind, requests, k=4):
    """Bytes and objects that the second or the third third of so many requests left behind, what is
    less: what is kept of requests is kept of all, and what is allocated once is not."""
    target, draft = (MarkovModel.random(V, 1, seed) for seed in (0, 1))
    engine = kind(target, ModelDrafter(draft), k)

    def run(first, last):
        for seed in range(first, last):
            params = SamplingParams(
                temperature=seed % 2 * (seed * GOLDEN % 1), seed=seed, max_new_tokens=2 + seed % 3
            )
            engine.submit([1, 2, 3], params)
            while engine.free_slots <= seed % 8 and engine.busy:
                engine.step()
        while engine.busy:
            engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects())

    tracemalloc.start()
    try:
        third = requests // 3
        seen = [run(i * third, (i + 1) * third) for i in range(3)]
    finally:
        tracemalloc.stop()
    assert engine.stats.emitted == sum(2 + seed % 3 for seed in range(3 * third))
    return tuple(
        min(b - a for a, b in itertools.pairwise(each)) for each in zip(*seen, strict=True)
    )


@pytest.mark.parametrize("k", [4, "auto"])
def test_many_requests_leave_nothing_behind(k):
    grown, objects = growth(Engine, 3_000, k)
    assert grown < 20_000  # 20 bytes per request
    assert objects < 100


def test_what_is_left_behind_would_be_noticed():
    grown, objects = growth(Keeping, 600)
    assert grown > 200_000  # a kilobyte per request
    assert objects > 1_000


@pytest.mark.parametrize("long", [20_000, 32_000])
def test_prefill_goes_in_chunks_of_bounded_work(long):
    """Rows times positions, which masks and scores are made of, do not grow with the text."""
    model, passes = MarkovModel.random(V, 1, 0, context_length=32_768), []

    class Watched(MarkovModel):
        def forward(self, tokens, positions, *args, **options):
            passes.append((tokens.shape[1], int(positions.max()) + 1))
            return super().forward(tokens, positions, *args, **options)

    watched = Watched(model.table, 32_768)
    cache = watched.new_cache(1, 32_768)
    prefill(watched, cache, 0, torch.arange(long).remainder(V).tolist())
    assert cache.lengths == [long]
    assert sum(rows for rows, _ in passes) == long
    assert max(rows for rows, _ in passes) == base.PREFILL_CHUNK
    assert max(rows * end for rows, end in passes) <= base.PREFILL_WORK
