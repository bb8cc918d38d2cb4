"""What a round that drafted takes of the plain rounds behind it.

They may take longer for it, as what it computed with has driven what they need out of the
processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_BEHIND, _MUCH, _LASTS = 6, 3, 8
"""Rounds that may, those of them that take much longer, and times over which the mean is taken."""

_FAINT = 0.5
"""Plain rounds of it that do not count: noise is never less than nothing."""


@dataclass(slots=True)
class Aftermath:
    """Of the last round that drafted.

    Attributes:
        probe: whether it was one; None once it is counted.
        tail: seconds of the plain rounds since then.
        usual: plain rounds that those behind it take longer, together.
    """

    probe: bool | None = None
    tail: list[float] = field(default_factory=list)
    usual: float = 0.0

    def drafted(self, probe: bool) -> None:
        """A round is over in which somebody drafted."""
        self.probe, self.tail = probe, []

    @property
    def rounds(self) -> int:
        """How many of those that follow take much longer."""
        return 0 if self.probe is None else max(0, _MUCH - len(self.tail))

    def followed(self, seconds: float) -> None:
        """One is over in which nobody did."""
        if len(self.tail) < _BEHIND:
            self.tail.append(seconds)

    def counted(self, rested: Sequence[float], plain: float) -> tuple[float, bool]:
        """Rounds of rest follow: the seconds that those behind it took longer, of late, and whether
        it was a probe.

        Args:
            plain: what a plain round takes.
        """
        if self.probe is None:
            return 0.0, False
        more = sum(min(s / plain, 2.0) - 1 for s in (self.tail + list(rested))[:_BEHIND])
        self.usual += (more - self.usual) / _LASTS
        probe, self.probe = self.probe, None
        return max(0.0, self.usual - _FAINT) * plain, probe
