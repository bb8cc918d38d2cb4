"""What a machine takes for the rounds of a target, by rows and sequences.

A round without its drafting is timed with drafts of no cost (`FillerDrafter`), for the whole grid
of rows and sequences. What a drafter adds is `drafting`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine import Engine
from ..errors import OptionError
from ..models.base import LanguageModel
from ..models.loading import Progress, memory_of
from ..models.tokenizer import Tokenizer
from ..trees import PassTimes
from .rounds import (
    REPEATS,
    TOKENS,
    FillerDrafter,
    faster_half,
    read_seconds,
    spread_of,
    time_rounds,
)

ROWS = (1, 2, 3, 5, 9, 17, 33, 65)
BATCHES = (1, 2, 4, 8, 16, 32)

_GROWTH = 2.5
"""How much longer the next batch may take."""

_MEMORY_SHARE = 0.5
"""Of the available memory, that caches may take for timing."""

_FAR = 2048
"""Positions that a sequence will not go beyond while it is timed."""

SECONDS = 60.0
"""For the grid of passes, beyond the batches that were asked for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of a target on a machine.

    Attributes:
        passes: seconds of the target's pass alone.
        greedy, sampled: seconds of a round without drafting, of requests at temperature 0 and
            above; None where that was not asked for.
        spread: how much a cell's times vary: the middle half of them, over their median; the
            median of all cells.
        weight_bytes: of the target's weights; None where the runner does not tell.
        cache_bytes: of keys and values, per token.
        memory, free_memory: bytes that the device has, and that were free; None if unknown.
        reading: seconds to read a token of a prompt.
    """

    passes: PassTimes
    greedy: PassTimes | None
    sampled: PassTimes | None
    spread: float = 0.0
    weight_bytes: int | None = None
    cache_bytes: float = 0.0
    memory: int | None = None
    free_memory: int | None = None
    reading: float = 0.0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    def rounds(self, temperature: float) -> PassTimes:
        """Of requests at a temperature."""
        found = self.sampled if temperature > 0 else self.greedy
        return found or self.greedy or self.sampled or self.passes

    @property
    def batches(self) -> tuple[int, ...]:
        """Those that were timed."""
        return tuple(sorted({batch for _, batch in self.passes.points}))

    @property
    def bandwidth(self) -> float | None:
        """Bytes of weights per second in a pass over one row."""
        return None if self.weight_bytes is None else self.weight_bytes / self.passes(1, 1)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "pass_seconds": table(self.passes.points),
            "greedy_round_seconds": None if self.greedy is None else table(self.greedy.points),
            "sampled_round_seconds": None if self.sampled is None else table(self.sampled.points),
            "spread": self.spread,
            "weight_bytes": self.weight_bytes,
            "cache_bytes_per_token": self.cache_bytes,
            "bandwidth": self.bandwidth,
            "memory": self.memory,
            "free_memory": self.free_memory,
            "reading_seconds_per_token": self.reading,
        }


def table(points: Mapping[tuple[int, int], float]) -> list[dict[str, float]]:
    """Points as rows for JSON."""
    return [
        {"rows": rows, "batch": batch, "seconds": seconds}
        for (rows, batch), seconds in sorted(points.items())
    ]


def measure_machine(
    target: LanguageModel,
    prompt: Sequence[int],
    *,
    temperatures: Sequence[float] = (0.0,),
    asked: Sequence[int] = (1,),
    batches: Sequence[int] = BATCHES,
    rows: Sequence[int] = ROWS,
    max_len: int | None = None,
    tokens: int = TOKENS,
    tokenizer: Tokenizer | None = None,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    progress: Progress = lambda what, done, total: None,
) -> Machine:
    """Time the target's rounds by rows and batch, behind a prompt.

    Args:
        temperatures: greedy rounds are timed if 0 is among them, sampled ones at the highest.
        asked: batches that are timed in any case.
        batches: those that are timed besides, the small ones first, while there is time and
            memory.
        max_len: positions per sequence; by default the model's context.
        tokens: that such prompts are continued by in use.
        tokenizer: where tokens are to become text within a round, as they do in use.
        seconds: for all of it, roughly.

    Raises:
        OptionError: no draft fits the context, or memory has no room for so many sequences.
    """
    began = time.perf_counter()
    max_len = min(max_len or target.context_length, target.context_length)
    ks = [count - 1 for count in rows if count == 1 or count <= max_len // 2]
    per_token, (total, free) = cache_bytes(target), memory_of(target.device)
    order = [*sorted(set(asked)), *sorted(set(batches) - set(asked))]
    heats = sorted({max(temperatures)} | {t for t in temperatures if t == 0})
    how = {"repeats": repeats, "seconds": seconds / (len(order) * len(heats))}
    grid, spent = _Grid(heats, how | {"tokens": tokens, "tokenizer": tokenizer}), (1, 0.0)
    for number, batch in enumerate(order):
        progress("timing passes", number, len(order))
        memory = batch * min(max_len, _FAR) * per_token
        if batch in asked:
            _check_memory(batch, memory, free)
        else:
            expected = _GROWTH / 2 * spent[1] * batch / spent[0]
            late = time.perf_counter() - began + expected > seconds
            if late or (free is not None and memory > _MEMORY_SHARE * free):
                break
        start = time.perf_counter()
        grid.add(Engine(target, FillerDrafter(), max(*ks, 1), None, batch, max_len), prompt, ks)
        spent = batch, time.perf_counter() - start
    progress("timing passes", len(order), len(order))
    return Machine(
        passes=PassTimes(eased(grid.passes)),
        greedy=PassTimes(eased(grid.rounds[0.0])) if 0.0 in heats else None,
        sampled=PassTimes(eased(grid.rounds[heats[-1]])) if heats[-1] > 0 else None,
        spread=statistics.median(grid.spreads),
        weight_bytes=getattr(target, "weight_bytes", None),
        cache_bytes=per_token,
        memory=total,
        free_memory=free,
        reading=read_seconds(Engine(target, None, 0, None, 1, max_len), prompt),
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def _check_memory(batch: int, needed: float, free: int | None) -> None:
    """Whether there is room for the keys and values of so many sequences.

    Raises:
        OptionError: there is not.
    """
    if free is not None and needed > free:
        raise OptionError(
            f"{batch} sequences need {needed / 1e9:.1f} GB for keys and values, and "
            f"{free / 1e9:.1f} GB are free: plan for fewer at once"
        )


class _Grid:
    """Rounds and passes by (rows, batch), as they are timed.

    Args:
        heats: temperatures.
        how: rounds are timed, of each of them and each batch.
    """

    def __init__(self, heats: Sequence[float], how: Mapping[str, Any]) -> None:
        self.rounds: dict[float, dict[tuple[int, int], float]] = {heat: {} for heat in heats}
        self.passes: dict[tuple[int, int], float] = {}
        self.spreads: list[float] = []
        self._how = how

    def add(self, engine: Engine, prompt: Sequence[int], ks: Sequence[int]) -> None:
        """Time a batch, with as many requests as the engine has slots."""
        batch = engine.free_slots
        for heat, rounds in self.rounds.items():
            laps = time_rounds(engine, prompt, ks, batch=batch, temperature=heat, **self._how)
            for k in ks:
                mine = [lap for lap in laps[k] if lap.rows == k + 1] or laps[k]
                times = [lap.whole - lap.draft for lap in mine]
                rounds[k + 1, batch] = faster_half(times)
                self.spreads.append(spread_of(times))
                self.passes.setdefault((k + 1, batch), faster_half([m.target for m in mine]))


def eased(points: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The same, but none longer than one with as many rows or more, and sequences or more."""
    return {
        (rows, batch): min(s for (r, b), s in points.items() if r >= rows and b >= batch)
        for rows, batch in points
    }


def cache_bytes(target: LanguageModel) -> float:
    """Bytes of keys and values per token."""
    storage = target.new_cache(1, min(64, target.context_length)).storage
    return sum(t.numel() * t.element_size() / (t.shape[0] * t.shape[1]) for t in storage)
