"""How far drafts are accepted: running estimates of α by depth.

α_d is the share of rounds that reached depth d and accepted a token there. Evidence fades
as text is emitted, so that an estimate is about the last few hundred tokens. A sequence
begins with what other sequences have shown; what it shows itself soon outweighs that. A
depth that nobody has reached is taken to be as its shallower neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lengths = NDArray[np.int_]

FIRST = 0.7
"""What α_1 is taken for where nothing is known."""

_TRUST = 2.0
"""Rounds that outweigh what is known of the next shallower depth."""

_LIKE = 0.2, 16.0
"""How much a sequence's rounds are like its round before, at first, and rounds of evidence that
this counts as."""

_PRIOR = 12.0, 24.0
"""Rounds that outweigh what other sequences have shown, at least and at most."""

_LEAST = 0.002
"""No α is thought to be nearer to 0 or 1."""

_LARGE = 1e9


class Survival:
    """Counts by depth, in which later rounds weigh more.

    Args:
        most: depths.
        memory: tokens after which a round counts 1/e of a new one.
    """

    def __init__(self, most: int, memory: float) -> None:
        self.depths = most
        # of rounds, by how many depths they reached and accepted: to count one is one addition
        self._reached, self._accepted = [0.0] * (most + 1), [0.0] * (most + 1)
        self._memory = memory
        self._tokens = 0.0
        self.weight = 1.0
        """Of a round now."""

    def pass_by(self, tokens: float) -> None:
        """Text was emitted."""
        self._tokens += tokens
        self.weight = math.exp(self._tokens / self._memory)
        if self.weight > _LARGE:
            self._reached = [x / self.weight for x in self._reached]
            self._accepted = [x / self.weight for x in self._accepted]
            self._tokens, self.weight = 0.0, 1.0

    def add(self, reached: int, accepted: int) -> None:
        """Count a round: depths that it reached, and of these the first that it accepted."""
        self._reached[min(reached, self.depths)] += self.weight
        self._accepted[min(accepted, self.depths)] += self.weight

    def gain(self, other: Survival, tokens: float) -> None:
        """Count what another has counted, as so many tokens later."""
        weight = self.weight / other.weight * math.exp(-tokens / self._memory)
        self._reached = [x + weight * y for x, y in zip(self._reached, other._reached, strict=True)]
        more = zip(self._accepted, other._accepted, strict=True)
        self._accepted = [x + weight * y for x, y in more]

    @property
    def reached(self) -> list[float]:
        """Rounds that reached a depth, by depth."""
        return _or_deeper(self._reached)

    @property
    def accepted(self) -> list[float]:
        """Of these those that accepted a token there."""
        return _or_deeper(self._accepted)

    def alpha(self, prior: Sequence[float] | None = None, trust: float = _TRUST) -> list[float]:
        """α by depth.

        Args:
            prior: what others show, by depth. Who was accepted more often at one depth is
                expected to be so at the next: by the same factor of the odds. By default
                each depth is expected to be as the one before.
            trust: rounds that outweigh it.
        """
        found: list[float] = []
        before, held, factor = FIRST, trust * self.weight, 1.0
        for depth, (n, a) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if prior is not None:
                expected = factor * prior[depth] / (1 - prior[depth])
                before = expected / (1 + expected)
            before = min(max((a + held * before) / (n + held), _LEAST), 1 - _LEAST)
            if prior is not None:
                factor = before / (1 - before) / prior[depth] * (1 - prior[depth])
            found.append(before)
        return found


def _or_deeper(counts: Sequence[float]) -> list[float]:
    """Of counts by depth from 0 those of each depth or more, from 1."""
    return list(accumulate(reversed(counts[1:])))[::-1]


class Likeness:
    """How much a round of a sequence is like the one before: ρ, the correlation of what they have
    accepted, over all sequences. Where rounds are independent, it is 0 and others tell as much as
    the sequence itself; where some sequences are always right and others never, it is 1, and a
    single round tells all.

    Args:
        memory: rounds after which one counts 1/e of a new one.
    """

    def __init__(self, memory: float) -> None:
        self._keep = math.exp(-1 / memory)
        self._n = self._x = self._y = self._xx = self._yy = self._xy = 0.0

    def add(self, before: int, now: int) -> None:
        """What two rounds have accepted, one behind the other."""
        keep = self._keep
        self._n = keep * self._n + 1
        self._x, self._y = keep * self._x + before, keep * self._y + now
        self._xx, self._yy = keep * self._xx + before**2, keep * self._yy + now**2
        self._xy = keep * self._xy + before * now

    @property
    def rho(self) -> float:
        first, rounds = _LIKE
        if not self._n:
            return first
        x, y = self._x / self._n, self._y / self._n
        spread = (self._xx / self._n - x * x) * (self._yy / self._n - y * y)
        found = (self._xy / self._n - x * y) / math.sqrt(spread) if spread > 1e-12 else first
        return (first * rounds + found * self._n) / (rounds + self._n)

    def trust(self, tokens: int, memory: float) -> float:
        """Rounds of its own that outweigh what others have shown, of a sequence so long: (1 - ρ) /
        ρ, as where acceptance is Beta distributed among sequences."""
        least, most = _PRIOR
        rho = max(self.rho, 1e-3)
        trust = min(max((1 - rho) / rho, least), most)
        return max(least, trust * math.exp(-tokens / memory))


def expected(alpha: Sequence[float]) -> Floats:
    """Tokens that a round emits, for every K from 0: 1 + Σ Π α. `[K + 1]`"""
    found, reach, total = [1.0], 1.0, 1.0
    for a in alpha:
        reach *= a
        total += reach
        found.append(total)
    return np.array(found)


_FARTHER = 2
"""Times as far, at most, behind a draft that passed: what follows a short one is not known by what
follows others."""


class Policy(NamedTuple):
    """K behind a draft that passed, for every K behind one that failed; and of the rounds of both,
    as frequent as they become: tokens and seconds. `[K + 1]`"""

    passed: Lengths
    tokens: Floats
    seconds: Floats


class Outlook(NamedTuple):
    """What rounds of the same K are expected to emit, one after the other, by K from 0.

    Text comes in easy stretches and hard ones. Behind a draft that was accepted as a whole the
    next one is more likely to be, and a longer draft leaves fewer rounds in an easy stretch: by
    what rounds of this K show alone, a longer one would seem better than it is. So rounds behind
    such a draft are told apart from all others, and are as frequent as they become with that K, as
    in a Markov chain of two states.

    Attributes:
        tokens: mean, in the long run. `[K + 1]`
        apart: the same behind a draft that failed, or none, and behind one that passed.
        whole: how likely the draft is to pass, apart. `[2, K + 1]`
    """

    tokens: Floats
    apart: tuple[Floats, Floats]
    whole: Floats

    @classmethod
    def of(cls, failed: Sequence[float], passed: Sequence[float], most: int) -> Outlook:
        """By α behind a draft that failed, and behind one that passed; longer drafts than there are
        depths emit no more."""
        depths = min(len(failed), most)
        reach = np.ones((2, most + 1))  # by depth
        np.cumprod([failed[:depths], passed[:depths]], axis=1, out=reach[:, 1 : depths + 1])
        whole = reach[:, np.minimum(np.arange(most + 1), depths)]
        whole[:, 0] = 0.0
        reach[:, depths + 1 :] = 0.0
        first, second = reach.cumsum(axis=1)
        share = _share(*whole)
        return cls(first + share * (second - first), (first, second), whole)

    def policy(
        self, seconds: Floats, most: int, kept: tuple[int, int] = (0, 0), share: float = 1.0
    ) -> Policy:
        """For every K, up to this one, behind a draft that failed, that behind one that passed.

        Args:
            seconds: that rounds take. `[K + 1]`
            kept: two K that are kept as long as they promise this share of the best.
        """
        (first, second), (low, high) = self.apart, self.whole
        often = _share(low[:, None], high[None, : most + 1])
        tokens = first[:, None] + often * (second[None, : most + 1] - first[:, None])
        spent = seconds[:, None] + often * (seconds[None, : most + 1] - seconds[:, None])
        rows, columns = np.ogrid[: len(seconds), : most + 1]
        usable = (columns >= np.minimum(rows, most)) & (columns <= _FARTHER * rows)
        rates = np.where(usable, tokens / spent, 0)
        best, rows = rates.argmax(axis=1), rows[:, 0]
        k, passed = kept
        if passed <= most and rates[k, passed] > share * rates[k, best[k]]:
            best[k] = passed
        return Policy(best, tokens[rows, best], spent[rows, best])

    def variance(self, k: int, passed: int) -> float:
        """Of the tokens that rounds emit of K, and of another one behind a draft that passed."""
        first, second = self.apart
        share = float(_share(self.whole[0, k], self.whole[1, passed]))
        one, other = variance(first, k), variance(second, passed)
        differ = float(second[passed] - first[k])
        return one + share * (other - one) + share * (1 - share) * differ**2


def _share(low: Floats, high: Floats) -> Floats:
    """Of rounds behind a draft that passed, where one does with these probabilities behind one that
    failed, and behind one that passed."""
    return low / (1 - high + low)


def variance(gains: Floats, k: int) -> float:
    """Of the tokens that a round of K emits, if by K so many are expected (`expected`)."""
    mean = gains[k] - 1.0
    return max(0.0, float(2 * (k * gains[k] - gains[:k].sum()) - mean - mean * mean))
