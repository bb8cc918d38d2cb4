"""Times of a round: draft, target, the whole."""

from __future__ import annotations

import time
from collections.abc import Hashable

import torch

from ..models.graphs import RECORDINGS


class Clock:
    """Laps by name. On CUDA they are events on the stream, read after the round's own sync."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings = RECORDINGS.count
        self._began = time.perf_counter()
        self._marks: list[tuple[Hashable, float | torch.cuda.Event]] = [("", self._mark())]

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self, name: Hashable) -> None:
        """A part is over."""
        self._marks.append((name, self._mark()))

    def laps(self) -> dict[Hashable, float]:
        """Seconds of the parts of each name; on CUDA the device must have been synchronised."""
        found: dict[Hashable, float] = {}
        for (_, a), (name, b) in zip(self._marks, self._marks[1:], strict=False):
            host = isinstance(a, float) and isinstance(b, float)
            seconds = b - a if host else a.elapsed_time(b) / 1e3  # type: ignore[operator, union-attr, arg-type]
            found[name] = found.get(name, 0.0) + seconds
        return found

    @property
    def recorded(self) -> bool:
        """Whether passes were recorded since the beginning, which takes long, and happens once."""
        return RECORDINGS.count > self._recordings

    def whole(self) -> float:
        """Seconds since the beginning, by the host."""
        return time.perf_counter() - self._began
