"""Looks at drafters without a model: what they proposed is compared with the text that follows.

That costs little, and tells all that there is to know. If it costs more than it brings, looks
become rare. Where they were right, or a longer draft by a model has passed as a whole, they are
looked at in the next round; whoever then looks in vain waits, each time for twice as many rounds,
until another text begins. Behind drafts by a model that is as rare if it does not pay, together
with the looks behind what it found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .plan import LATE, Profile
from .prices import Prices
from .survival import Floats

_PAUSE = 4
"""A drafter whose looks cost more than they bring is looked at once in so many rounds at most."""

REPEATS = 4
"""Tokens that were right, from which on the text may be one that repeats itself."""

_SURELY = 1.5
"""Times what they take that looks must bring where models draft, too, or for several sequences: it
is promises that are compared, of which the best is more than comes."""

_LOOKS = 0.005
"""Of the time that such looks may take."""

_HALF = 0.5
"""Times that, where they are looks at several sequences, as one tells as much as some at one; and
where models draft, too, as no round with a look goes along with a choice, nor the one behind it: of
the shipped pair both together take 1 ms longer, a look itself 0.3 ms."""

_SETTLED = 32
"""Looks before that is judged, at one sequence; at several fewer, by the root of how many."""

_LATELY, _AGAIN, _AMONG = 24, 4, 16
"""Looks over which what they bring is averaged: usually, where one at a sequence alone has paid, as
what pays again is to be noticed soon, and where models draft, too, beside which they gain little.
(At several something is always found for one of them: were those that pay counted for more, one
that saves a round would make up for sixty that take a twelfth of one each.)"""

_SEVERAL = -1
"""Instead of an age, of looks at several sequences."""


@dataclass(slots=True)
class _Seen:
    """Of looks at a drafter: by how much they raised the rate, lately; how many there were; and the
    round of the last one, of those in turn where models draft, too."""

    worth: float = 0.0
    count: int = 0
    last: int = 0


class Looks:
    """When to look, and what that was worth. Where models draft, too, that is told apart by a
    single text's age: what repeats itself mostly does so later.

    Args:
        always: whether somebody is looked at in every round.

    Attributes:
        eager: who was right when last judged, and is looked at in the next round.
        age: of a single text (`Estimates.age`).
        thought: seconds that it takes to think what to do about one.
    """

    def __init__(self, members: Sequence[Profile], prices: Prices, always: bool) -> None:
        self._prices, self._always = prices, always
        self._instant = [i for i, m in enumerate(members) if m.instant]
        self._seen: defaultdict[tuple[int, int], _Seen] = defaultdict(_Seen)  # by age, too
        self._turn = [0] * len(members)  # rounds of the last looks in turn where these are rare
        self._early: set[int] = set()  # those that are looked at in this round as they are eager
        self._behind = [_Runs() for _ in members]  # of looks that begin behind a model's draft
        self._passed: set[int] = set()  # those that are eager as such a draft has passed
        self._let_down: dict[int, tuple[int, int]] = {}  # until when nobody is eager, for how long
        depths = 1 + max(m.most for m in members)
        # parts of sequences whose proposals were right down to a depth, running means
        self._right = np.zeros((len(members), depths))
        self._among = len(self._instant) < len(members)  # models, which draft where nobody looks
        self._batch, self.age, self.thought = 1, 0, 0.0
        self._unaided = 1.0  # the best rate without looks, times plain decoding's
        self._rows = np.arange(1.0, 1 + depths)
        self._passes: Floats | None = None  # seconds of the target's, by K, worked out if needed
        self.eager: set[int] = set()

    def _known(self, i: int) -> _Seen:
        """What is known of looks at a drafter: at several sequences, or at one, at this age where
        that is told apart."""
        age = self.age if self._among else 0
        return self._seen[i, age if self._batch == 1 else _SEVERAL]

    # --- when ----------------------------------------------------------------------

    def due(self, round_: int, paid: bool) -> set[int]:
        """Who is worth looking at in this round.

        Args:
            paid: whether nobody drafts, and what drafting gained before pays for looks.
        """
        return self.eager | self._in_turn(round_, paid)

    def take(self, round_: int, paid: bool) -> list[int]:
        """The same, now that they are looked at."""
        in_turn = self._in_turn(round_, paid)
        due, self._early, self.eager = self.eager | in_turn, self.eager - in_turn, set()
        for i in self._early & self._passed:
            self._behind[i].begin(round_)
        self._passed = set()
        for i in in_turn if self._among else due:
            if self.seldom(i, paid):
                self._turn[i] = round_
            self._known(i).last = round_
        return sorted(due)

    def _in_turn(self, round_: int, paid: bool) -> set[int]:
        """Who is looked at even if nobody is eager to."""
        return {i for i in self._instant if self._wait(i, round_, paid) <= 0}

    def rest(self, round_: int, paid: bool) -> int | None:
        """Rounds before it is time for one; None where there never is."""
        waits = [max(0, self._wait(i, round_, paid) - 1) for i in self._instant]
        return min(waits, default=None)

    def _wait(self, i: int, round_: int, paid: bool) -> int:
        """Rounds until it is looked at, even if nobody is eager to: where that is rare, one of a
        text's ages takes the turn of another."""
        last = max(self._known(i).last, self._turn[i])
        return last + self._pause(i, paid) - round_

    def seldom(self, i: int, paid: bool) -> bool:
        """Whether it is not looked at in every round."""
        return self._pause(i, paid) > 1

    def _pause(self, i: int, paid: bool) -> int:
        """In how many rounds it is looked at once."""
        n, seen = self._batch, self._known(i)
        if self._always or seen.count < _SETTLED / math.sqrt(n):
            return 1
        if seen.worth > (_SURELY if self._among or n > 1 else 1.0) * self._takes(i):
            return 1
        rare = self._rare(i)
        # instead of plain decoding it is worth more, and of several sequences it tells more
        return min(rare, round(2 * _PAUSE * math.sqrt(n))) if paid else rare

    def _rare(self, i: int) -> int:
        """In how many rounds it is looked at once where that does not pay."""
        share = _LOOKS * (_HALF if self._among or self._batch > 1 else 1.0)
        # at several it is mostly thought about, as what it finds is seldom the same
        thought = self.thought if self._batch > 1 else 0.0
        rare = max(_PAUSE, int(self._takes(i, thought) / share))
        if rare > LATE:
            rare = max(LATE, int(self._takes(i, thought, late=True) / share))
        return rare

    def _takes(self, i: int, thought: float = 0.0, late: bool = False) -> float:
        """What a look at one takes, and so many seconds of thought about it, in plain rounds."""
        prices, n = self._prices, self._batch
        seconds = prices.look(i, n, late) + prices.compared(n) + thought
        return seconds / max(prices.plain(n), 1e-9)

    # --- what came of it -----------------------------------------------------------

    def of(self, batch: int) -> None:
        """From this round on there are so many sequences."""
        self._batch, self._passes = batch, None

    def priced(self, unaided: float) -> None:
        """A choice was made.

        Args:
            unaided: its rate if nobody were looked at, times plain decoding's.
        """
        self._unaided, self._passes = unaided, None

    def new_text(self, alone: bool) -> None:
        """Another one begins.

        Args:
            alone: whether there is no other, so that who was right was it elsewhere.
        """
        self._let_down.clear()
        if alone:
            self.eager.clear()
            self._passed.clear()

    def count(self, looked: Collection[int], gain: float, round_: int) -> None:
        """By how much looks at these have raised the best rate."""
        n = self._batch
        for i in looked:
            self._known(i).count += 1
            self._right[i] /= 2
            if gain and gain * self._prices.plain(n) >= self._prices.look(i, n):
                self._let_down.pop(i, None)
            elif i in self._early:
                rounds = 2 * self._let_down.get(i, (0, 1))[1]
                self._let_down[i] = round_ + rounds, rounds
            self._average(i, gain)

    def _average(self, i: int, gain: float) -> None:
        """What a look at one is worth. Among models it decides whether to look in every round or
        now and then, beside those that follow on what was right: how often these pay says little of
        all others, and a mean is not to be drawn to those that do."""
        seen = self._known(i)
        slow = _AGAIN if self._batch == 1 and gain > seen.worth else _LATELY
        if self._among:
            if i in self._early:
                self._behind[i].add(gain, self._takes(i))
                return
            slow = _AMONG
        seen.worth += (gain - seen.worth) * max(1 / slow, 1 / seen.count)

    def drafted(self, passed: int, round_: int) -> None:
        """All of a draft by a model has passed, so many tokens."""
        if passed >= REPEATS:
            for i in self._instant:
                if self._hopeful(i, round_) and self._behind[i].worth_it(round_, self._rare(i)):
                    self.eager.add(i)
                    self._passed.add(i)

    def judged(self, i: int, accepted: int, round_: int) -> None:
        """So many tokens that one has proposed were right."""
        if self._hopeful(i, round_) and self._pays(i, accepted):
            self.eager.add(i)

    def _hopeful(self, i: int, round_: int) -> bool:
        """Whether somebody may be eager to look: who looked in vain waits for two rounds, and then
        for twice as many as before."""
        return round_ >= self._let_down.get(i, (0, 0))[0]

    def _pays(self, i: int, accepted: int) -> bool:
        """Whether it seems to pay to look at a drafter again and to take what it proposes, rather
        than to do without."""
        n, right = self._batch, self._right[i]
        right[1 : accepted + 1] += 0.5 / n
        if accepted < REPEATS:
            return False
        if self._passes is None:
            self._passes = self._prices.rest(self._rows, n)
        saved = (1 + np.cumsum(right)) * self._prices.plain(n)
        pays = saved > self._unaided * (self._prices.look(i, n) + self._passes)
        return bool(pays[1:].any())


class _Runs:
    """Looks one behind the other, each run of which begins behind a draft by a model: what they
    have brought, and what they took, in plain rounds."""

    def __init__(self) -> None:
        self._gained = self._took = 0.0
        self._count = self._last = 0

    def begin(self, round_: int) -> None:
        self._count, self._last = self._count + 1, round_
        fades = 1 - 1 / _AMONG
        self._gained, self._took = fades * self._gained, fades * self._took

    def add(self, gain: float, took: float) -> None:
        self._gained, self._took = self._gained + gain, self._took + took

    def worth_it(self, round_: int, rare: int) -> bool:
        """Whether another one may begin: one in so many rounds in any case."""
        pays = self._count < _AMONG or self._gained > _SURELY * self._took
        return pays or round_ - self._last >= rare
