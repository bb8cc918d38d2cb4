"""What trying may cost beside plain decoding, all of it together.

Whatever is chosen, probed, looked at or thought about, a round that took longer than plain
decoding takes for as much is a loss, and one that took less is a gain. Losses are paid from a
purse, which holds what was gained, up to a limit, and `SHARE` of all time. When it is empty, rounds
of plain decoding follow until it holds enough to try again. So however wrong estimates are, it
cannot go on at a loss.
What a drafter takes to read a text is an outlay for all that follows: it empties no purse, but
nothing goes into one until it is paid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.01
"""Of the time that may be lost."""

_HOLDS = 24, 32
"""Plain rounds that it holds at the start, and at most."""

_ONCE, _OWES = 4.0, 4.0
"""Plain rounds that a round may lose as far as it counts, and that may be owed at most: what runs
for the first time takes long, and machines have hiccups."""

_ENOUGH = 0.5, 8.0
"""Plain rounds that it shall hold before it is opened again, if it was emptied by probes, and by
drafts that were thought to pay: with less, a few unlucky ones would empty it every time."""


@dataclass(slots=True)
class Purse:
    """Seconds that may be lost."""

    seconds: float | None = None
    owed: float = 0.0  # for what was read
    needs: float = 0.0  # plain rounds, until it is opened again

    @property
    def empty(self) -> bool:
        """Whether nothing may be lost: it was empty, and does not hold enough since then."""
        return self.needs > 0

    def spent(self, seconds: float, saved: float, plain: float, paid: bool = False) -> None:
        """A round, or some.

        Args:
            saved: seconds that plain decoding takes for as much.
            plain: seconds of a round of plain decoding.
            paid: whether it was thought to pay.
        """
        before = _HOLDS[0] * plain if self.seconds is None else self.seconds
        more = SHARE * seconds - min(seconds - saved, _ONCE * plain)
        back = min(max(more, 0.0), self.owed)
        self.owed -= back
        after = before + more - back
        self.seconds = min(max(after, -_OWES * plain), _HOLDS[1] * plain)
        if self.seconds < 0 and not self.needs:
            self.needs = _ENOUGH[paid]
        elif self.seconds >= self.needs * plain:
            self.needs = 0.0

    def read(self, seconds: float, plain: float) -> None:
        """Something was read."""
        self.owed = min(self.owed + seconds, _HOLDS[1] * plain)

    def rounds(self, plain: float) -> int:
        """Of plain decoding before it holds enough to try something again."""
        return max(1, math.ceil((self.needs - (self.seconds or 0.0) / plain) / SHARE))
