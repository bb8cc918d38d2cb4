"""What the parts of a round cost: running means of seconds, by size and by sequences.

A cell is a size (rows of the target's pass, or tokens drafted) for so many sequences. What
was not measured follows from its neighbours: of the same number of sequences along a line,
else by the product of both, as most of a pass is work per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...trees.topology import MOST_NODES

Floats = NDArray[np.float64]

_WINDOW = 12
"""Measurements that a running mean is about."""

_FEW = 3
"""The first ones, of which the shortest counts: what runs for the first time takes long."""

_OUTLIER = 1.5
"""A measurement counts as no more than so many times the mean: something else ran, too."""

_FAR = 3.0
"""The first measurement of a size counts as no more than so many times what was expected."""

_HOPE = 0.95
"""Of what is expected, where it was not measured."""

_SLOPE = 0.02
"""Of a row beyond the first, in passes of one row, where only one size was measured."""

Cell = tuple[int, int]
"""Size and sequences."""


@dataclass(slots=True)
class Mean:
    """A running mean that is hardly moved by what takes exceptionally long."""

    value: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= _FEW:
            self.value = seconds if self.count == 1 else min(self.value, seconds)
            return
        seconds = min(seconds, _OUTLIER * self.value)
        self.value += (seconds - self.value) / min(self.count, _WINDOW)


class Times:
    """Seconds by size, for so many sequences.

    Args:
        origin: what size 0 takes, if that is known; without it there is no size 0.
    """

    def __init__(self, origin: float | None = None) -> None:
        self._cells: dict[Cell, Mean] = {}
        self._origin = origin
        self._curves: dict[int, tuple[Floats, Floats]] = {}
        self._hopes: dict[int, Floats] = {}

    def add(self, size: int, batch: int, seconds: float) -> None:
        cell = self._cells.get((size, batch))
        if cell is None:
            if self._cells:  # nor is a first one believed that is far above its neighbours
                seconds = min(seconds, _FAR * max(self.one(size, batch), 1e-9))
            cell = self._cells[size, batch] = Mean()
            self._hopes.pop(batch, None)
        before = cell.value
        cell.add(seconds)
        if abs(cell.value - before) > 0.01 * before or cell.count == _FEW:
            self._curves.clear()

    def count(self, size: int, batch: int) -> int:
        """Measurements of a cell."""
        cell = self._cells.get((size, batch))
        return 0 if cell is None else cell.count

    @property
    def measured(self) -> int:
        """How often."""
        return sum(cell.count for cell in self._cells.values())

    @property
    def known(self) -> bool:
        return bool(self._cells)

    def one(self, size: int, batch: int) -> float:
        """Seconds of one size."""
        cell = self._cells.get((size, batch))
        return float(self.at(np.array([float(size)]), batch)[0]) if cell is None else cell.value

    def at(self, sizes: Floats, batch: int) -> Floats:
        """Seconds of these sizes; 0 if nothing at all was measured."""
        if not self._cells:
            return np.zeros(len(sizes))
        if batch not in self._curves:
            self._curves[batch] = self._curve(batch)
        x, y = self._curves[batch]
        found: Floats = np.interp(sizes, x, y)
        return found

    def hoped(self, sizes: Floats, batch: int) -> Floats:
        """The same, somewhat less where it was not measured: else that would never be tried."""
        found = self.at(sizes, batch)
        if batch not in self._hopes:
            hopes = self._hopes[batch] = np.full(MOST_NODES + 2, _HOPE)
            hopes[[size for size, b in self._cells if b == batch]] = 1.0
        return found * self._hopes[batch][sizes.astype(np.intp)]

    def _curve(self, batch: int) -> tuple[Floats, Floats]:
        """Points to interpolate between, the last one far out."""
        points = self._points(batch)
        others = {
            size * b / batch: m.value for (size, b), m in sorted(self._cells.items()) if b != batch
        }
        if points and others:  # as many rows in all; levelled to what was measured here
            near = min(others, key=lambda size: min(abs(size - own) for own in points))
            own = min(points, key=lambda size: abs(size - near))
            scale = points[own] / others[near] if others[near] > 0 else 1.0
            low, high = min(points), max(points)
            points |= {s: v * scale for s, v in others.items() if not low <= s <= high}
        return self._line(points or others)

    def _points(self, batch: int) -> dict[float, float]:
        """What was measured. One that was measured but a few times counts as no more than so many
        times what others promise: it would not be tried again if it had been slow by chance."""
        cells = {float(size): m for (size, b), m in self._cells.items() if b == batch}
        points = {size: m.value for size, m in cells.items() if m.count >= _FEW}
        if not points:
            return {size: m.value for size, m in cells.items()}
        x, y = self._line(points)
        few = {size: m.value for size, m in cells.items() if m.count < _FEW}
        most = {size: _OUTLIER * float(np.interp(size, x, y)) for size in few}
        return points | {size: min(value, most[size]) for size, value in few.items()}

    def _line(self, points: dict[float, float]) -> tuple[Floats, Floats]:
        if self._origin is not None:
            points = {0: self._origin} | points
        x = sorted(points)
        y = [points[size] for size in x]
        slope = _SLOPE * y[0]
        if len(x) > 1:
            slope = max(0.0, (y[-1] - y[0]) / (x[-1] - x[0]))  # of all: two neighbours are noise
        far = 1e4
        return np.array([*x, x[-1] + far]), np.array([*y, y[-1] + far * slope])
