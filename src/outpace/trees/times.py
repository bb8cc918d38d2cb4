"""Measured seconds of passes, and what lies between the points that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import OptionError
from ..types import check_whole_number


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass by rows and batch, as measured.

    Called with rows and a batch it goes along the rows of every batch that was measured,
    and then along the batches, each as in `along`. With a single point it is constant.

    Attributes:
        points: seconds by (rows, batch): a pass over so many rows of each of so many
            sequences. Every batch has the same rows: a batch that was only measured with few
            would make many look free.

    Raises:
        OptionError: there are no points, they are not rows, batches and seconds, or there
            are holes between them.
    """

    points: Mapping[tuple[int, int], float]

    def __post_init__(self) -> None:
        by_batch = self._by_batch()
        for batch, points in by_batch.items():
            check_whole_number("the batch of a pass", batch, 1, "sequences in it")
            check_points("timed", points)
            if not all(points.values()):
                raise OptionError("a timed pass takes no time: give measured seconds")
        check_points("timed", next(iter(by_batch.values()), {}))
        every = {rows for rows, _ in self.points}
        for batch, points in by_batch.items():
            if missing := every - points.keys():
                raise OptionError(
                    f"seconds of {min(missing)} rows are missing for batch {batch}: measure the "
                    "same rows for every batch"
                )

    def __call__(self, rows: float, batch: float = 1) -> float:
        """Seconds of a pass over `rows` rows of each of `batch` sequences."""
        return along({size: along(line, rows) for size, line in self._by_batch().items()}, batch)

    def _by_batch(self) -> dict[int, dict[int, float]]:
        found: dict[int, dict[int, float]] = {}
        for (rows, batch), seconds in self.points.items():
            found.setdefault(batch, {})[rows] = seconds
        return found


def along(points: Mapping[int, float], at: float) -> float:
    """The line through the points; flat below the first, beyond the last with the last slope.

    It never falls beyond the last.
    """
    rows = sorted(points)
    seconds = [points[count] for count in rows]
    if at > rows[-1] and len(rows) > 1:
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        return seconds[-1] + max(slope, 0.0) * (at - rows[-1])
    return float(np.interp(at, rows, seconds))


def check_points(name: str, points: Mapping[int, float]) -> None:
    """Raises OptionError if they are not rows and seconds."""
    if not points:
        raise OptionError(f"no {name} pass was measured: give seconds for one number of rows")
    for rows, seconds in points.items():
        check_whole_number(f"rows of a {name} pass", rows, 1, "the root's row at least")
        if not 0 <= seconds < math.inf:
            raise OptionError(f"a {name} pass of {rows} rows cannot take {seconds} seconds")
