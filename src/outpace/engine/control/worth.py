"""What a token is worth of sequences that run together, in seconds of plain decoding.

Where others wait for a place, all are worth the same. Where nobody does, the time to the end is
that of the sequence that goes on for longest: a token of it saves a round of a sequence alone, and
one of those that end before only what a row costs. What is left to all, l_b tokens each, takes

    V(l) = more Σ_b l_b + last max_b l_b

and a round has saved what V fell by. Which sequence will be the last is not settled before the end,
as drafts spread them by about the root of what they emit. So what a round is expected to save is
told by a smooth maximum, τ log Σ_b exp(l_b / τ), where τ is so much of the root of the longest l.
That is convex: a round that brings one sequence four tokens and another none saves less than one
that brings two to both, as the other ends last then. Counting each token by what the first one of
its sequence is worth, drafts of four sequences, of 128 tokens and two a round, are promised to save
a tenth more than they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .plan import Ask
from .survival import Floats

_SPREAD, _LEAST = 0.75, 2.0
"""τ over the root of what is left to the longest, and at least, in tokens. E max of four normal
variables is 1.03 of their deviation, which is about the root of their tokens; τ log 4 shall be as
much."""

_GOES_ON = 96.0
"""Tokens, on average, for which sequences go on as they are expected to."""


class Worth:
    """Of these sequences' tokens, from now on.

    Args:
        plain: seconds of a round of plain decoding for all of them; `alone` for one.
        asks: of whom, with what each may still emit: how long it goes on is not known.
        crowded: whether others wait until one of them ends.

    Attributes:
        each: of the next token of each sequence. `[B]`
    """

    def __init__(self, plain: float, alone: float, asks: Sequence[Ask], crowded: bool = False):
        n = len(asks)
        self._left = {a.slot: float(a.left) for a in asks}
        self._more, self._last = plain / n, 0.0
        if n > 1 and not crowded:
            self._more = max(0.0, plain - alone) / (n - 1)
            self._last = plain - n * self._more
        self.each: Floats = np.full(n, self._more)
        if self._last:
            left = np.array(list(self._left.values()))
            self._lefts, self._lasts = left, min(left.max(), _GOES_ON)
            self._near = max(_LEAST, _SPREAD * math.sqrt(left.max()))
            self._shares = self._ends_last(np.ones((n, 1)))[:, 0]
            self.each += self._last * self._shares

    def saved(self, tokens: Floats, varies: Floats) -> Floats:
        """What rounds are expected to save, by K: to the second order.

        Args:
            tokens: that they are expected to emit for each sequence, and `varies` their variance.
                `[B, K + 1]`

        Returns: `[K + 1]` seconds; of one token for each, what plain decoding takes.
        """
        found: Floats = self._more * tokens.sum(0)
        if self._last:
            shares = self._ends_last(tokens)
            mean = (shares * tokens).sum(0)
            spread = (shares * (tokens**2 + (1 - shares) * varies)).sum(0) - mean**2
            found = found + self._last * (mean - spread / (2 * self._near))
        return found

    def _ends_last(self, tokens: Floats) -> Floats:
        """How likely each sequence is to be the last, by K, if rounds go on like that: those that
        are expected to emit more than others are ahead of them in the end. `[B, K + 1]`"""
        left = self._lefts[:, None] - tokens * (self._lasts / tokens.mean(0))
        odds = np.exp((left - left.max(0)) / self._near)
        shares: Floats = odds / odds.sum(0)
        return shares

    def emitted(self, tokens: Mapping[int, int]) -> float:
        """A round is over that has emitted so many tokens by slot: the seconds it has saved."""
        before = max(self._left.values())
        for slot in self._left:
            self._left[slot] -= tokens.get(slot, 0)
        return self._more * sum(tokens.values()) + self._last * (before - max(self._left.values()))


_PROMISED = 4.0
"""Plain rounds of promised gains that are believed before any was seen."""

_FADES = 1024
"""Rounds, whatever they were, after which what became of a promise has faded to 1/e."""

_LEAST_KEPT = 0.05


class Promises:
    """What rounds for several sequences gained, of what they were promised to.

    It is the best of many estimates that is chosen, and before a sequence has shown that it goes
    unlike others the last one is taken to go as they do: of sixteen greedy texts of the shipped
    target, half of which end in a loop, rounds behind an early exit saved a fifth less than was
    expected, which is more than such rounds are ahead.

    Args:
        clock: rounds so far.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # by member and sequences: promised, gained, and the round of the last one
        self._seen: dict[tuple[int, int], tuple[float, float, int]] = {}

    def kept(self, member: int, batch: int) -> float:
        """The share of promised gains that came, at most 1.

        Args:
            member: who drafts for most, or -1 for those without a model.
        """
        promised, gained = self._now(member, batch)
        return min(1.0, max(_LEAST_KEPT, (gained + _PROMISED) / (promised + _PROMISED)))

    def add(self, member: int, batch: int, promised: float, gained: float) -> None:
        """Of a round; both in plain rounds, beside the one that plain decoding takes."""
        before = self._now(member, batch)
        sums = before[0] + promised, before[1] + gained
        self._seen[member, batch] = *sums, self._clock()

    def _now(self, member: int, batch: int) -> tuple[float, float]:
        promised, gained, last = self._seen.get((member, batch), (0.0, 0.0, 0))
        fades = math.exp((last - self._clock()) / _FADES)
        return fades * promised, fades * gained
