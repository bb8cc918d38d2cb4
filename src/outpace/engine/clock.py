"""Times of a round: draft, target, the whole."""

from __future__ import annotations

import time

import torch


class Clock:
    """Laps. On CUDA they are events on the stream, read after the round's own sync."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._marks = [self._mark()]

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self) -> None:
        """One part is over."""
        self._marks.append(self._mark())

    def laps(self) -> list[float]:
        """Seconds of each part; on CUDA the device must have been synchronised."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [
            b - a if isinstance(a, float) and isinstance(b, float) else a.elapsed_time(b) / 1e3  # type: ignore[union-attr, arg-type]
            for a, b in pairs
        ]

    def whole(self) -> float:
        """Seconds since the beginning, by the host."""
        return time.perf_counter() - self._began
