"""What trying may cost beside plain decoding, all of it together.

Whatever is chosen, probed, looked at or thought about, a round that took longer than plain
decoding takes for as much is a loss, and one that took less is a gain. Losses are paid from a
purse, which holds what was gained, up to a limit, and `SHARE` of all time. When it is empty, rounds
of plain decoding follow until it is not. So however wrong estimates are, it cannot go on at a loss.
What a drafter takes to read a text is an outlay for all that follows: it empties no purse, but
nothing goes into one until it is paid.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.01
"""Of the time that may be lost."""

_HOLDS = 12, 32
"""Plain rounds that it holds at the start, and at most."""

_ONCE, _OWES = 4.0, 4.0
"""Plain rounds that a round may lose as far as it counts, and that may be owed at most: what runs
for the first time takes long, and machines have hiccups."""

_ENOUGH = 0.5
"""Plain rounds that it shall hold before it is opened again."""


@dataclass(slots=True)
class Purse:
    """Seconds that may be lost."""

    seconds: float | None = None
    owed: float = 0.0  # for what was read

    @property
    def empty(self) -> bool:
        return self.seconds is not None and self.seconds < 0

    def spent(self, seconds: float, saved: float, plain: float) -> None:
        """A round, or some.

        Args:
            saved: seconds that plain decoding takes for as much.
            plain: seconds of a round of plain decoding.
        """
        before = _HOLDS[0] * plain if self.seconds is None else self.seconds
        more = SHARE * seconds - min(seconds - saved, _ONCE * plain)
        paid = min(max(more, 0.0), self.owed)
        self.owed -= paid
        after = before + more - paid
        self.seconds = min(max(after, -_OWES * plain), _HOLDS[1] * plain)

    def read(self, seconds: float, plain: float) -> None:
        """Something was read."""
        self.owed = min(self.owed + seconds, _HOLDS[1] * plain)

    def rounds(self, plain: float) -> int:
        """Of plain decoding before it holds enough to try something again."""
        return int((_ENOUGH - (self.seconds or 0.0) / plain) / SHARE)
