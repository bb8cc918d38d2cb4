"""Rounds that go along with a choice, which a controller is told of later, many at once.

A pass drives what keeping books needs out of the processor's caches: behind one, any call takes two
or three microseconds, a dozenth of that right behind another such call. So while one sequence is
drafted for by one model as was chosen, and goes as expected, of each round is noted only what came
of it. What the next one does follows from that: a K by the state of the text, and from time to time
another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .held import Choice
from .survival import FAILED, LASTING, LONG, PASSED

Went = tuple[int, int, int, int, float, float, int, bool]
"""What came of a round: how far was drafted, or 0 if there was nothing to propose; depths that were
judged, and of these those that passed; tokens that it emitted; seconds of the draft, and of the
rest; rows of the target's pass, and whether it has something in it that runs `once` (`Spent`). A
plain tuple: with a class, and calls, to note a round took twice as long behind a pass."""


def other(k: int, more: int) -> int:
    """The K of a round that drafts so many tokens more than was chosen: at most twice as many."""
    return max(1, k + min(more, k))


@dataclass(slots=True)
class Along:
    """The rounds of a sequence from this one on.

    Attributes:
        most: the longest K.
        state: of the text (`Outlook`), and `passed`: tokens since a draft was refused.
        varies, more, lasts: after so many rounds so many tokens more are drafted, and in how many;
            `counts`: whether these are to go about as others do.
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
    lasts: int
    counts: bool
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
    apart: bool = False  # whether that says nothing of what is expected
    went: list[Went] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next()

    def _next(self) -> None:
        k = self.choice.lengths[self.state]
        varied = self.varies <= len(self.went) < self.varies + self.lasts
        self.apart = varied and not self.counts
        self.k = min(other(k, self.more) if varied else k, self.most)

    def add(
        self,
        k: int,
        reached: int,
        accepted: int,
        emitted: int,
        draft: float,
        rest: float,
        rows: int,
        once: bool = False,
    ) -> bool:
        """A round is over, with what is to be told of it (`Went`); whether the next goes along."""
        went = self.went
        went.append((k, reached, accepted, emitted, draft, rest, rows, once))
        self.tokens = left = self.tokens - emitted
        # where nothing was judged that was drafted, what comes next is for others to say
        goes_on = left > 0 and reached and not once and len(went) < self.rounds
        if accepted < reached:
            self.state = FAILED
        else:
            self.passed = (0 if self.state == FAILED else self.passed) + accepted + 1
            self.state = LASTING if self.passed >= LONG else PASSED
            goes_on = goes_on and not self.tells
        if not self.apart:
            self.missed = missed = 0 if accepted else self.missed + 1
            self.beside = beside = self.beside + emitted - self.expected
            self.since = since = self.since + 1
            as_expected = beside * beside <= self.odd * self.odd * since
            goes_on = goes_on and missed < self.misses and as_expected
        if not goes_on:
            return False
        self._next()
        return True
