"""Machines and texts with known numbers: recommendations follow from these alone."""

from __future__ import annotations

import numpy as np

from outpace.planner import Added, Machine, Survey, Text
from outpace.planner.survey import Played
from outpace.trees import PassTimes

ROWS, BATCHES = (1, 2, 3, 5, 9, 17), (1, 4, 16)


def machine(base: float = 10.0, row: float = 0.2, free: int = 16) -> Machine:
    """A pass takes `base` ms and `row` for every row beyond the first; twice that where more than
    `free` rows are computed."""

    def seconds(rows: int, batch: int) -> float:
        busy = max(1.0, rows * batch / free)
        return 1e-3 * busy * (base + row * (rows - 1))

    grid = PassTimes({(rows, batch): seconds(rows, batch) for rows in ROWS for batch in BATCHES})
    return Machine(passes=grid, greedy=grid, sampled=grid, weight_bytes=10**9)


def added(step: float, begun: float = 0.0) -> Added:
    """Drafting takes `step` ms per token; `begun` ms of the pass are done by then."""
    points = {
        (k, batch): 1e-3 * (k * step - (begun if k else 0)) for k in range(17) for batch in BATCHES
    }
    return Added(points, dict.fromkeys(BATCHES, 1e-3 * step))


def text(alpha: float, k: int, tokens: int, seed: int = 0, offers: float = 1.0) -> Text:
    """Rounds with K, in which every token passes with a chance of its own.

    Args:
        offers: how often there is something to propose.
    """
    rng = np.random.default_rng(seed)
    found, left = [], tokens
    while left:
        length = min(k, left - 1) if rng.random() < offers else 0
        kept = int((rng.random(length) < alpha).cumprod().sum())
        found.append(Played(length, length, kept, kept + 1, kept == length))
        left -= kept + 1
    return Text(tuple(found))


def survey(
    name: str,
    alpha: float,
    step: float,
    *,
    temperature: float = 0.0,
    rule: str = "token",
    longest: int = 16,
    texts: int = 6,
    offers: float = 1.0,
    seed: int = 0,
    begun: float = 0.0,
) -> Survey:
    """A drafter with an α and a cost per token in ms."""
    runs = [text(alpha, longest, 120, 1000 * seed + i, offers) for i in range(texts)]
    return Survey(name, temperature, rule, {longest: runs}, added(step, begun), offers < 1)
