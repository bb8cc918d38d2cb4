"""What trying may cost beside plain decoding, all of it together.

Whatever is chosen, probed, looked at or thought about, a round that took longer than plain
decoding takes for as much is a loss, and one that took less is a gain. Losses are paid from a
purse, which holds what was gained, up to a limit, and `SHARE` of all time. When it is empty, rounds
of plain decoding follow until it holds enough to try again. So however wrong estimates are, it
cannot go on at a loss.
What a drafter takes to read a text is an outlay for all that follows: it empties no purse, but
nothing goes into one until it is paid. Thoughts have some rounds of their own, into which half of
that share goes: of a small model a thought takes longer than a round, and while little is known
there are many, which would leave nothing for what they find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.01
"""Of the time that may be lost."""

_HOLDS = 24, 64
"""Plain rounds that it holds at the start, and at most."""

_THOUGHTS = 32, 16
"""Plain rounds that may be thought, at the start and at most, before that is paid from it: of one
sequence and of several, whose rounds take longer, and thoughts hardly."""

_FEW = 4
"""Sequences of which it holds as much as of one; of more, less, as a round tells of all of them.
(With 24 rounds, and 32 for thoughts, sixteen greedy free texts took 7 to 10 % longer over 512.)"""

_AGAIN = 12
"""Plain rounds that it holds at least when a temperature is new."""

ONCE, _OWES = 4.0, 4.0
"""Plain rounds that a round may lose as far as it counts, and that may be owed at most: what runs
for the first time takes long, and machines have hiccups."""

_ENOUGH, _THINKS = (1.0, 8.0), 2
"""Plain rounds that it shall hold before it is opened again, beside so many thoughts. If drafts
that were thought to pay have emptied it, twice as many rounds as the last time, and at most: with
less, a few unlucky ones would empty it every time."""

_LAST = 8
"""Rounds with thoughts over which what they take is averaged."""

_ASKED = 48
"""Rounds before it is asked whether it holds enough, at least: the round in which it is asked takes
a tenth or two longer, which as many as ten or twenty rounds do not bring in."""

_PAYS = 16
"""Plain rounds in it that show that drafts do pay: when it is empty again, it begins anew."""


@dataclass(slots=True)
class Purse:
    """Seconds that may be lost."""

    seconds: float | None = None
    owed: float = 0.0  # for what was read
    needs: float = 0.0  # plain rounds, until it is opened again
    enough: float = _ENOUGH[0]  # the next time
    thoughts: float | None = None  # seconds that may be thought
    thought: float = 0.0  # seconds of the last ones, on average

    @property
    def empty(self) -> bool:
        """Whether nothing may be lost: it was empty, and does not hold enough since then."""
        return self.needs > 0

    def spent(
        self,
        seconds: float,
        saved: float,
        plain: float,
        paid: bool = False,
        thought: float = 0.0,
        rounds: int = 1,
        sequences: int = 1,
    ) -> None:
        """A round, or some.

        Args:
            saved: seconds that plain decoding takes for as much.
            plain: seconds of a round of plain decoding.
            paid: whether it was thought to pay.
            thought: seconds of it in which was thought what to do.
            rounds: of whose losses so many count as far as one does.
            sequences: that each of them went on with.
        """
        unit = _unit(plain, sequences)
        before = _HOLDS[0] * unit if self.seconds is None else self.seconds
        most = _for_thoughts(unit, sequences)
        thoughts = most if self.thoughts is None else self.thoughts
        if thought:
            self.thought += (thought - self.thought) / (_LAST if self.thought else 1)
        free = min(thought, thoughts)
        given, thoughts = SHARE * seconds, thoughts - free
        self.thoughts = min(thoughts + given / 2, max(thoughts, most))
        given -= self.thoughts - thoughts
        more = given - min(seconds - free - saved, rounds * ONCE * plain)
        back = min(max(more, 0.0), self.owed)
        self.owed -= back
        after = before + more - back
        self.seconds = min(max(after, -_OWES * plain), _HOLDS[1] * unit)
        if self.seconds >= _PAYS * unit:
            self.enough = _ENOUGH[0]
        if self.seconds < 0 and not self.needs:
            self.needs = self.enough if paid else _ENOUGH[0]
            self.needs += _THINKS * self.thought / unit
            if paid:
                self.enough = min(2 * self.enough, _ENOUGH[1])
        elif self.seconds >= self.needs * unit:
            self.needs = 0.0

    def begin(self, plain: float) -> None:
        """Something begins that what was lost before says little about."""
        if self.seconds is not None:
            self.seconds = max(self.seconds, _AGAIN * plain)
            self.thoughts = max(self.thoughts or 0.0, _AGAIN * plain)
            self.needs, self.enough = 0.0, _ENOUGH[0]

    def read(self, seconds: float, plain: float) -> None:
        """Something was read."""
        self.owed = min(self.owed + seconds, _HOLDS[1] * plain)

    def rounds(self, plain: float, sequences: int = 1) -> int:
        """Of plain decoding before it holds enough to try something again, or is asked again."""
        unit = _unit(plain, sequences)
        lacks = (self.needs * unit - (self.seconds or 0.0)) / plain
        shared = self.thoughts is not None and self.thoughts < _for_thoughts(unit, sequences)
        return max(_ASKED, math.ceil(lacks / (SHARE / 2 if shared else SHARE)))


def _for_thoughts(unit: float, sequences: int) -> float:
    """Seconds that may be thought."""
    return _THOUGHTS[sequences > 1] * unit


def _unit(plain: float, sequences: int) -> float:
    """Of what it holds: a round, of up to a few sequences."""
    return plain * _FEW / max(_FEW, sequences)
