"""A clock that tests wind by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace


def ticking(monkeypatch, *modules: str) -> Callable[..., float]:
    """For the laps of rounds, and for these modules of the engine: it goes on by a second, or more,
    whenever it is asked."""
    now = 0.0

    def tick(seconds: float = 1.0) -> float:
        nonlocal now
        now += seconds
        return now

    for module in ("clock", *modules):
        monkeypatch.setattr(f"outpace.engine.{module}.time", SimpleNamespace(perf_counter=tick))
    return tick
