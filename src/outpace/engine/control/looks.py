"""Looks at drafters without a model: what they proposed is compared with the text that follows.

That costs little, and tells all that there is to know. If it costs more than it brings, looks
become rare. Where they were right, or a longer draft by a model has passed as a whole, they are
looked at in the next round; whoever then looks in vain waits, each time for twice as many rounds,
until another text begins.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from .plan import LATE, Profile
from .prices import Prices

_PAUSE = 4
"""A drafter whose looks cost more than they bring is looked at once in so many rounds at most."""

REPEATS = 4
"""Tokens that were right, from which on the text may be one that repeats itself."""

_SURELY = 2.0
"""Times what they take that looks bring in every round where models draft, too: it is promises that
are compared, and the better of two is promised more than comes."""

_LOOKS = 0.005
"""Of the time that such looks may take."""

_OF_SEVERAL = 0.5
"""Times that, where they are looks at several sequences, as one tells as much as some at one."""

_SETTLED = 32
"""Looks before that is judged, at one sequence; at several fewer, by the root of how many."""

_LATELY, _AGAIN, _AMONG = 24, 4, 16
"""Looks over which what they bring is averaged: usually, where one has paid, as what pays again is
to be noticed soon, and where models draft, too, beside which they gain little."""


class Looks:
    """When to look, and what that was worth.

    Args:
        always: whether somebody is looked at in every round.

    Attributes:
        eager: who was right when last judged, and is looked at in the next round.
    """

    def __init__(self, members: Sequence[Profile], prices: Prices, always: bool) -> None:
        self._prices, self._always = prices, always
        self._instant = [i for i, m in enumerate(members) if m.instant]
        self._worth = [0.0] * len(members)  # of a look: by how much it raised the rate
        self._looked = [0] * len(members)
        self._last = [0] * len(members)  # rounds of the last looks, of those in turn where `_among`
        self._early: set[int] = set()  # those that are looked at in this round as they are eager
        self._let_down: dict[int, tuple[int, int]] = {}  # until when nobody is eager, for how long
        self._right = [0.0] * len(members)  # running means of tokens that were right
        self._among = len(self._instant) < len(members)  # models, which draft where nobody looks
        self._batch = 1
        self._unaided = 1.0  # the best rate without looks, times plain decoding's
        self._rows = np.arange(1.0, 2 + max(m.most for m in members))
        self._passes: Sequence[float] = ()  # seconds of the target's, by K, worked out if needed
        self.eager: set[int] = set()

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
        for i in in_turn if self._among else due:
            self._last[i] = round_
        return sorted(due)

    def _in_turn(self, round_: int, paid: bool) -> set[int]:
        """Who is looked at even if nobody is eager to."""
        return {i for i in self._instant if self._wait(i, round_, paid) <= 0}

    def rest(self, round_: int, paid: bool) -> int | None:
        """Rounds before it is time for one; None where there never is."""
        waits = [max(0, self._wait(i, round_, paid) - 1) for i in self._instant]
        return min(waits, default=None)

    def _wait(self, i: int, round_: int, paid: bool) -> int:
        """Rounds until it is looked at, even if nobody is eager to."""
        return self._last[i] + self._pause(i, paid) - round_

    def seldom(self, i: int, paid: bool) -> bool:
        """Whether it is not looked at in every round."""
        return self._pause(i, paid) > 1

    def _pause(self, i: int, paid: bool) -> int:
        """In how many rounds it is looked at once."""
        prices, n = self._prices, self._batch
        if self._always or self._looked[i] < _SETTLED / math.sqrt(n):
            return 1
        share = _LOOKS if n == 1 else _OF_SEVERAL * _LOOKS
        plain, compared = prices.plain(n), prices.compared(n)
        look = prices.look(i, n) + compared
        if self._worth[i] * plain > (_SURELY if self._among else 1.0) * look:
            return 1
        rare = max(_PAUSE, int(look / (share * plain)))
        if rare > LATE:
            look = prices.look(i, n, late=True) + compared
            rare = max(LATE, int(look / (share * plain)))
        return min(rare, 2 * _PAUSE) if paid else rare  # instead of plain decoding it is worth more

    # --- what came of it -----------------------------------------------------------

    def of(self, batch: int) -> None:
        """From this round on there are so many sequences."""
        self._batch, self._passes = batch, ()

    def priced(self, unaided: float) -> None:
        """A choice was made.

        Args:
            unaided: its rate if nobody were looked at, times plain decoding's.
        """
        self._unaided, self._passes = unaided, ()

    def new_text(self) -> None:
        """Another one begins."""
        self._let_down.clear()

    def count(self, looked: Collection[int], gain: float, round_: int) -> None:
        """By how much looks at these have raised the best rate."""
        n = self._batch
        for i in looked:
            self._looked[i] += 1
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
        slow = _AGAIN if gain > self._worth[i] else _LATELY
        if self._among:
            if i in self._early:
                return
            slow = _AMONG
        self._worth[i] += (gain - self._worth[i]) * max(1 / slow, 1 / self._looked[i])

    def drafted(self, passed: int, round_: int) -> None:
        """All of a draft by a model has passed, so many tokens."""
        if passed >= REPEATS:
            self.eager.update(i for i in self._instant if self._hopeful(i, round_))

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
        n, right = self._batch, self._right
        right[i] += (accepted - right[i]) / (2 * n)
        if accepted < REPEATS:
            return False
        self._passes = self._passes or self._prices.rest(self._rows, n).tolist()
        drafted = min(round(right[i]), len(self._passes) - 1)
        seconds = self._prices.look(i, n) + self._passes[drafted]
        return (right[i] + 1) * self._prices.plain(n) > self._unaided * seconds
