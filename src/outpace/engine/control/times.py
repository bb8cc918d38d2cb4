"""What the parts of a round cost: estimates of seconds, by size and by sequences.

A cell is a size (rows of the target's pass, or tokens drafted) for so many sequences. Every
measurement is noisy, the first ones of a size most of all, and much of the noise is common to
all that runs within some rounds: the machine's pace, which is filtered beside the cells (Kalman,
of logarithms), so that what was measured while it was slow does not seem dearer. Cells of
neighbouring sizes are smoothed together (Rauch, Tung, Striebel 1965), as a walk with small steps
around what is expected without them: a shape, or what other numbers of sequences have shown. A size
that was measured once, and was slow by chance, is so believed by its neighbours' standard, and one
that is uncertain can be hoped to be better.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST, _NOISE = 0.5, 0.2
"""Standard deviations of the logarithm of a size's first measurement, and of the others until it is
known how much they vary."""

_LEAST = 0.015
"""They are not taken to vary less, and means of many of them neither."""

_MOVED = 0.03
"""How much more those vary that are right behind one of another size: else a size that is changed
to again and again would seem dearer by what changing takes. Single rounds of it, counted as much as
twenty of the same in a row, made the best K of the shipped pair seem 4 to 7 % dearer than it is."""

_EARLY = 0.05
"""How much longer a size may take before it is settled, a standard deviation: the caches, and what
the processor puts into them, follow rounds of another size only after some. On the shipped pair
K = 6 takes 3 to 8 % longer than always in the first four rounds behind some of K = 5, and 2 % in
the next ones; most other K do not."""

_WARM, _VARIES = 3, 50
"""Measurements of a size before they show how much they vary, and over how many that is taken."""

_COLD = 1.0
"""The same of the very first of all: what runs for the first time takes long."""

_LONG = 0.4
"""A measurement counts as no more than so much above what is known, in logarithms."""

_BEYOND = 2.0
"""The same of the very first, beside a guess: what runs for the first time may take far longer, as
where a GPU's graph is recorded, and would seem too dear to be tried again."""

_DRIFT = 2e-6
"""Variance that an estimate gains with each round in which it is not measured; at most
`_FORGOTTEN`."""

_FORGOTTEN = 0.02

_WANDERS = 5e-4, 0.02
"""Variance that the machine's pace gains with each round, and at most."""

_LASTS = 16
"""Measurements over which its mean is taken, that is expected of what is to come."""

_WINDOW = 32
"""Measurements of a size that its estimate is about at most."""

SETTLES = 4
"""Rounds of a size, one behind the other, before those that follow are `SETTLED`."""

MOVED, EARLY, SETTLED = range(3)
"""What is measured: right behind another size, soon after that, and later."""

_RISES, _MOST_RISE = 32, 0.2
"""Measurements behind one of another size over which it is taken how much longer they take, and
at most, in logarithms."""

_STEP = 0.008
"""Variance of the step from one size to the next; where rows count, from one row to the next."""

HOPE = 0.5
"""Standard deviations by which an uncertain size may be better than it seems: else what was slow
once would not be tried again."""

_KNOWN = 0.05
"""Standard deviation of one that is well known."""

_BEGIN, _MOST_TO_BEGIN = 0.5, 4.0
"""Steps that a draft takes to begin with: before that is known, and at most."""

_ROW, _UNLIKE, _DEAR_ROW = 0.02, 0.05, 1.0
"""What a row adds to a pass, of what one without rows would take: before that is known, the
standard deviation of that, and at most."""

_SOON, _ANEW = 1 / 32, 64
"""After how many more measurements, as a share of all, and after how many rounds estimates are
smoothed anew. That takes as long as all else that is done for a choice."""

_TABLE = 17
"""Sizes that are worked out at once, at least."""

_GUESS = 1.0
"""Variance of the logarithm of what is expected before anything was measured."""


@dataclass(slots=True)
class Mean:
    """A running mean of seconds that is hardly moved by what takes exceptionally long."""

    value: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= _WARM:  # what runs for the first time takes long
            self.value = seconds if self.count == 1 else min(self.value, seconds)
            return
        seconds = min(seconds, math.exp(_LONG) * self.value)
        self.value += (seconds - self.value) / min(self.count, 12)


@dataclass(slots=True)
class Pace:
    """The machine's, which wanders: all that runs takes longer for some rounds, and what is
    measured then must not seem dearer than what is measured later. The logarithm of a factor.

    Args:
        clock: tells how many rounds there were.
    """

    clock: Callable[[], int]
    value: float = 0.0
    variance: float = 0.0
    seen: int = 0
    slow: float = 0.0  # its running mean

    @property
    def factor(self) -> float:
        """By which what is to come is expected to take longer."""
        return math.exp(self.slow)

    def now(self) -> float:
        """The variance by now."""
        step, most = _WANDERS
        return min(self.variance + step * (self.clock() - self.seen), max(most, self.variance))

    def add(self, error: float, spread: float) -> None:
        """Something took longer than expected, where the variance of that is so much."""
        before = self.now()
        self.value += before / spread * error
        self.slow += (self.value - self.slow) / _LASTS
        self.variance, self.seen = before * (1 - before / spread), self.clock()


@dataclass(slots=True)
class _Cell:
    """The logarithm of seconds at an ordinary pace, once it is settled, its variance, and the round
    it was last seen in.

    Attributes:
        early, unsure, shared: by how much more it is before, the variance of that, and their
            covariance.
    """

    value: float
    variance: float
    seen: int
    count: int = 1
    early: float = 0.0
    unsure: float = _EARLY * _EARLY
    shared: float = 0.0

    def now(self, clock: int) -> float:
        """The variance by now."""
        return min(self.variance + _DRIFT * (clock - self.seen), _FORGOTTEN + self.variance)

    def add(self, value: float, pace: Pace, noise: float, least: float, early: bool) -> float:
        """Count a measurement with this variance, as so much of what is known then at least; how
        far it is from that."""
        clock = pace.clock()
        before, wanders = self.now(clock), pace.now()
        # how what is known, and what it takes longer before it is settled, go with what was seen
        with_value, with_early = before, self.shared
        if early:
            with_value, with_early = before + self.shared, self.shared + self.unsure
        spread = with_value + (with_early if early else 0.0) + wanders + noise
        error = min(value - self.value - early * self.early - pace.value, _LONG)
        gain, more = with_value / spread, with_early / spread
        self.value += max(gain, least) * error
        self.early = max(0.0, self.early + more * error)
        self.variance, self.seen = before - gain * with_value, clock
        self.unsure -= more * with_early
        self.shared -= gain * with_early
        self.count += 1
        pace.add(error, spread)
        return error


@dataclass(slots=True)
class _Walk:
    """What was measured, smoothed: logarithms of what it is beside what was expected, by size.

    Attributes:
        places, means, variances: sizes that were measured, ascending.
        step: variance from one size to the next.
    """

    places: Floats
    means: Floats
    variances: Floats
    step: float

    @classmethod
    def smoothed(cls, seen: Sequence[tuple[float, float, float]], step: float) -> _Walk:
        """Of places, what was measured there, and its variances."""
        forward = [seen[0]]
        for place, value, variance in seen[1:]:
            before, mean, spread = forward[-1]
            spread += step * (place - before)
            gain = spread / (spread + variance)
            forward.append((place, mean + gain * (value - mean), (1 - gain) * spread))
        back = [forward[-1]]
        for place, mean, spread in reversed(forward[:-1]):
            after, later, width = back[-1]
            ahead = spread + step * (after - place)
            gain = spread / ahead
            width = spread + gain * gain * (width - ahead)
            back.append((place, mean + gain * (later - mean), width))
        places, means, variances = np.array(back[::-1]).T
        return cls(places, means, variances, step)

    def at(self, sizes: Floats) -> Floats:
        found: Floats = np.interp(sizes, self.places, self.means)
        return found

    def doubt(self, sizes: Floats) -> Floats:
        """Standard deviations beyond that of a size that is well known."""
        places = self.places
        right = places.searchsorted(sizes).clip(max=len(places) - 1)
        near, far = abs(places[right] - sizes), abs(sizes - places[(right - 1).clip(0)])
        inside = (sizes > places[0]) & (sizes < places[-1])
        away = np.where(inside, near * far / np.maximum(near + far, 1), np.minimum(near, far))
        variances = np.interp(sizes, places, self.variances) + self.step * away
        found: Floats = np.maximum(np.sqrt(variances) - _KNOWN, 0)
        return found


class Times(ABC):
    """Seconds by size, for so many sequences.

    Args:
        pace: the machine's.
        noise: how much measurements vary, until that is known: a standard deviation of the
            logarithm.
    """

    rows: ClassVar[bool]
    """Whether as many rows in all take as long whoever they belong to; else as many of each
    sequence do."""

    _fits: ClassVar[Sequence[int]] = (_WARM, _WINDOW)
    """Measurements of a size with which it shows more of the shape."""

    def __init__(self, pace: Pace, noise: float = _NOISE) -> None:
        self._pace, self._clock = pace, pace.clock
        self._cells: dict[int, dict[int, _Cell]] = {}  # by sequences and size
        self._walks: dict[tuple[int, int | None], _Walk] = {}
        self._tables: dict[tuple[int, float], tuple[Floats, Floats]] = {}  # sizes from 0, seconds
        self._fresh = 0, 0  # measurements and rounds until which that is as good as new
        self._guess, self._noise = 0.0, noise * noise
        self.rise = 0.0
        """The logarithm of what one behind another size takes longer."""
        self.measured = 0
        """How often."""

    @abstractmethod
    def _shape(self, sizes: Floats, batch: int) -> Floats:
        """What they are expected to be, up to a factor."""

    @abstractmethod
    def _fit(self, batch: int) -> None:
        """Find that shape, now that another size is known, of so many sequences."""

    def expect(self, seconds: float) -> None:
        """What size 1 may take, before anything was measured."""
        self._guess = seconds / self._pace.factor
        self._tables.clear()

    def add(
        self, size: int, batch: int, seconds: float, phase: int = SETTLED, rounds: int = 1
    ) -> None:
        """Count a measurement.

        Args:
            phase: whether the one before was of another size (`MOVED`), or one soon before that.
                What this one runs is not in the processor's caches then, as it would be were it
                always so.
            rounds: of which it is the mean.
        """
        moved = phase == MOVED
        value = math.log(max(seconds, 1e-9)) - (self.rise if moved else 0.0)
        cells, now = self._cells.get(batch, {}), self._clock()
        if size in cells:
            noise = max(self._noise / rounds, _LEAST * _LEAST) + (_MOVED * _MOVED if moved else 0)
            least = 0.0 if moved else 1 / _WINDOW
            error = cells[size].add(value, self._pace, noise, least, phase != SETTLED)
            if cells[size].count > _WARM:
                seen = max(error * error, _LEAST * _LEAST)
                self._noise += (seen - self._noise) / (_VARIES * rounds)
                if moved:
                    self.rise = min(max(0.0, self.rise + error / _RISES), _MOST_RISE)
        else:
            if cells or (self._guess > 0 and not self.measured):
                above = _LONG if cells else _BEYOND
                value = min(value, math.log(max(self.one(size, batch), 1e-9)) + above)
            value -= self._pace.value
            cells[size] = _Cell(value, (_FIRST if self.measured else _COLD) ** 2, now)
            self._cells[batch], self._fresh = cells, (0, 0)
        self.measured += 1
        if cells[size].count in self._fits:
            self._fit(batch)

    def longest(self, batch: int) -> int:
        """The largest size that was measured for so many sequences; 0 if none was."""
        return max(self._cells.get(batch, {}), default=0)

    def one(self, size: int, batch: int) -> float:
        """Seconds of one size; by its own measurements, where there are enough."""
        cell = self._cells.get(batch, {}).get(size)
        if cell is not None and cell.count >= _WARM:
            return math.exp(cell.value) * self._pace.factor
        return float(self.at(np.array([float(size)]), batch)[0])

    def at(self, sizes: Floats, batch: int, hope: float = 0.0) -> Floats:
        """Seconds of these sizes; 0 if nothing at all is known.

        Args:
            hope: standard deviations by which it is taken to be better where it is uncertain.
        """
        now = self._clock()
        if self.measured >= self._fresh[0] or now >= self._fresh[1]:
            self._walks.clear()
            self._tables.clear()
            self._fresh = self.measured + 1 + int(_SOON * self.measured), now + _ANEW
        largest = float(sizes.max())
        table = self._tables.get((batch, hope))
        if table is None or largest > table[0][-1]:
            whole = np.arange(max(_TABLE, 2 * int(largest)) + 1.0)
            table = self._tables[batch, hope] = whole, self._at(whole, batch, hope)
        return np.interp(sizes, *table) * self._pace.factor

    def early(self, sizes: Floats) -> Floats:
        """Seconds that these sizes of a single sequence take longer before they are settled, as far
        as that is known."""
        cells = self._cells.get(1, {})
        logs = [cells[n].early if n in cells else 0.0 for n in sizes.astype(int).tolist()]
        found: Floats = np.expm1(logs) * self.at(sizes, 1) if any(logs) else np.zeros(len(sizes))
        return found

    def _at(self, sizes: Floats, batch: int, hope: float) -> Floats:
        """The same, worked out."""
        others = [b for b in self._cells if b != batch]
        other = min(others, key=lambda b: abs(math.log(b / batch)), default=None)
        seconds = self._expected(sizes, batch, other)
        if batch in self._cells:
            walk = self._walk(batch, other)
            seconds *= np.exp(walk.at(sizes) - (hope * walk.doubt(sizes) if hope else 0))
        elif other is None:
            seconds *= self._guess / float(self._shape(np.ones(1), batch)[0])
        return seconds

    def _expected(self, sizes: Floats, batch: int, other: int | None) -> Floats:
        """The shape, or what another number of sequences has shown."""
        if other is None:
            return self._shape(sizes, batch)
        sizes = sizes * (batch / other) if self.rows else sizes
        found: Floats = self._shape(sizes, other) * np.exp(self._walk(other, None).at(sizes))
        return found

    def _walk(self, batch: int, other: int | None) -> _Walk:
        """Of so many sequences, beside what is expected."""
        walk = self._walks.get((batch, other))
        if walk is None:
            now = self._clock()
            cells = sorted(self._cells[batch].items())
            sizes = np.array([float(size) for size, _ in cells])
            logs = np.log(np.maximum(self._expected(sizes, batch, other), 1e-9)).tolist()
            seen = [
                (float(size), cell.value - log, cell.now(now))
                for (size, cell), log in zip(cells, logs, strict=True)
            ]
            if other is None and self._guess > 0:
                first = float(self._shape(np.ones(1), batch)[0])
                seen.insert(0, (0.0, math.log(self._guess / first), _GUESS))
            walk = _Walk.smoothed(seen, _STEP * batch if self.rows else _STEP)
            self._walks[batch, other] = walk
        return walk


class RowTimes(Times):
    """Of passes by rows: a line. Before it is known better, a row adds two per cent; soon it must
    be, as in a batch a token more is many rows more, and each K is measured but once at first.

    Args:
        like: other passes, whose rows add as much.
    """

    rows = True
    _fits = (1, 2, _WARM, _WINDOW)

    def __init__(self, pace: Pace, like: RowTimes | None = None, noise: float = _NOISE) -> None:
        super().__init__(pace, noise)
        self._row = _ROW
        self._like, self._seen = like, _ROW

    @property
    def row(self) -> float:
        """What a row adds, of what a pass without rows would take."""
        if self._like is not None and sum(map(len, self._cells.values())) < 2:
            return self._like.row
        return self._row

    def at(self, sizes: Floats, batch: int, hope: float = 0.0) -> Floats:
        if self._seen != self.row:
            self._seen, self._fresh = self.row, (0, 0)
        return super().at(sizes, batch, hope)

    def _fit(self, batch: int) -> None:
        now = self._clock()
        rows, seconds, spreads = np.array(
            [
                (k * b, math.exp(c.value), math.sqrt(c.now(now)))
                for b, cells in self._cells.items()
                for k, c in cells.items()
            ]
        ).T
        # least squares of what is known as well as it is, and of what was to be expected
        row = _ROW if self._like is None else self._like.row
        at = int(rows.argmin())
        first = seconds[at] / (1 + row * rows[at])
        weights = 1 / np.array([*(np.maximum(spreads, _LEAST) * seconds), _UNLIKE * first])
        lines = np.array([[1.0, n] for n in rows] + [[0.0, 1.0]])
        values = np.array([*seconds, row * first])
        (first, slope), *_ = np.linalg.lstsq(lines * weights[:, None], values * weights)
        self._row = min(max(0.0, slope / first), _DEAR_ROW) if first > 0 else _DEAR_ROW
        self._fresh = 0, 0

    def _shape(self, sizes: Floats, batch: int) -> Floats:
        found: Floats = 1 + self.row * sizes * batch
        return found


class StepTimes(Times):
    """Of drafts by tokens: a step for each, and something to begin with, in steps."""

    rows = False

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self._begin = _BEGIN

    def _fit(self, batch: int) -> None:
        slope, first = _line(self._cells[batch].items())
        if slope > 0:
            self._begin = min(max(0.0, first / slope), _MOST_TO_BEGIN)

    def _shape(self, sizes: Floats, batch: int) -> Floats:
        found: Floats = sizes + np.minimum(sizes, 1) * self._begin
        return found


def _line(cells: Iterable[tuple[int, _Cell]]) -> tuple[float, float]:
    """What one more adds, and what none takes, by sizes that were measured some times; 0 where that
    is not known."""
    known = [(float(size), cell) for size, cell in cells if cell.count >= _WARM]
    if len({size for size, _ in known}) < 2:
        return 0.0, 0.0
    weights = np.sqrt([min(cell.count, _WINDOW) for _, cell in known])
    sizes, seconds = [s for s, _ in known], [math.exp(cell.value) for _, cell in known]
    slope, first = np.polyfit(sizes, seconds, 1, w=weights)
    return float(slope), float(first)
