"""Rounds that go along with a choice, which a controller is told of later, many at once.

A pass drives what keeping books needs out of the processor's caches: behind one, any call takes two
or three microseconds, a dozenth of that right behind another such call. So while one sequence is
drafted for by one model as was chosen, and goes as expected, of each round is noted only what came
of it. What the next one does follows from that: a K by the state of the text, and from time to time
another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .held import Choice
from .survival import FAILED, LASTING, LONG, PASSED

FOR = 2
"""Rounds of another K than was chosen, one behind the other."""


class Went(NamedTuple):
    """What came of a round.

    Attributes:
        k: how far was drafted; 0 if there was nothing to propose.
        reached, accepted: as of `Told`.
        draft, rest, rows, once: as of `Spent`.
    """

    k: int
    reached: int
    accepted: int
    emitted: int
    draft: float
    rest: float
    rows: int
    once: bool = False


def other(k: int, more: int) -> int:
    """The K of a round that drafts so many tokens more than was chosen: at most twice as many."""
    return max(1, k + min(more, k))


@dataclass(slots=True)
class Along:
    """The rounds of a sequence from this one on.

    Attributes:
        most: the longest K.
        state: of the text (`Outlook`), and `passed`: tokens since a draft was refused.
        varies, more: after so many rounds `FOR` of them draft so many tokens more.
        rounds, tokens: that may go along before the controller is told.
        expected: tokens of a round.
        beside, since, odd: tokens of rounds since the choice beside that, of how many rounds, and
            how many times the root of that is a surprise.
        missed, misses: refused drafts, one behind the other, and how many of them show that the
            text does not go as expected.
        tells: whether the controller is to be told when a draft was accepted as a whole.
        k: how far the next round is to draft.
        went: what came of those so far.
    """

    slot: int
    choice: Choice
    most: int
    state: int
    passed: int
    varies: int
    more: int
    rounds: int
    tokens: float
    expected: float
    beside: float
    since: int
    odd: float
    missed: int
    misses: float
    tells: bool
    k: int = 0
    went: list[Went] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next()

    def _next(self) -> None:
        k = self.choice.lengths[self.state]
        varied = self.varies <= len(self.went) < self.varies + FOR
        self.k = min(other(k, self.more) if varied else k, self.most)

    def add(self, went: Went) -> bool:
        """A round is over; whether the next one goes along, too."""
        self.went.append(went)
        self.tokens -= went.emitted
        accepted, goes_on = went.accepted, len(self.went) < self.rounds and self.tokens > 0
        if accepted < went.reached:
            self.state = FAILED
        else:
            self.passed = (0 if self.state == FAILED else self.passed) + accepted + 1
            self.state = LASTING if self.passed >= LONG else PASSED
            goes_on = goes_on and not self.tells
        self.missed = 0 if accepted else self.missed + 1
        self.beside += went.emitted - self.expected
        self.since += 1
        surprised = abs(self.beside) > self.odd * math.sqrt(self.since)
        if surprised or self.missed >= self.misses or went.once or not went.k or not goes_on:
            return False
        self._next()
        return True
