"""How far drafts are accepted: running estimates of α by depth.

α_d is the share of rounds that reached depth d and accepted a token there. Evidence fades
as text is emitted, so that an estimate is about the last few hundred tokens. A sequence
begins with what other sequences have shown; what it shows itself soon outweighs that. A
depth that nobody has reached is taken to be as its shallower neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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

_LEAST, _MOST = 0.002, 0.998
"""Every α is thought to be between these."""

_LARGE, _LONG_AGO = 1e9, 700.0
"""Weights from where on counts are scaled, and times the memory that no count outlasts."""


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
        self._tokens = self._weighed = 0.0  # since a round weighed 1, and for which that is known
        self._weight = 1.0
        self.empty = True
        """Whether nothing was counted."""

    def pass_by(self, tokens: float) -> None:
        """Text was emitted."""
        if not self.empty:
            self._tokens += tokens

    @property
    def weight(self) -> float:
        """Of a round now."""
        if self._tokens != self._weighed:
            self._weight = math.exp(min(self._tokens / self._memory, _LONG_AGO))
            self._weighed = self._tokens
            if self._weight > _LARGE:
                self._reached = [n / self._weight for n in self._reached]
                self._accepted = [n / self._weight for n in self._accepted]
                self._tokens, self._weighed, self._weight = 0.0, 0.0, 1.0
        return self._weight

    def add(self, reached: int, accepted: int) -> None:
        """Count a round: depths that it reached, and of these the first that it accepted."""
        self.empty, weight = False, self.weight
        self._reached[min(reached, self.depths)] += weight
        self._accepted[min(accepted, self.depths)] += weight

    def gain(self, other: Survival, tokens: float) -> None:
        """Count what another has counted, as so many tokens later."""
        if other.empty:
            return
        self.empty = False
        weight = self.weight / other.weight * math.exp(-tokens / self._memory)
        self._reached = _sum(self._reached, weight, other._reached)
        self._accepted = _sum(self._accepted, weight, other._accepted)

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
        if self.empty and prior is not None:
            return list(prior)
        found: list[float] = []
        before, held, factor, others = FIRST, trust * self.weight, 1.0, 1.0
        for depth, (n, a) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if prior is not None:
                others = prior[depth] / (1 - prior[depth])
                odds = factor * others
                before = odds / (1 + odds)
            before = (a + held * before) / (n + held)
            if not _LEAST <= before <= _MOST:
                before = _LEAST if before < _LEAST else _MOST
            factor = before / (1 - before) / others
            found.append(before)
        return found


def _sum(counts: list[float], weight: float, more: list[float]) -> list[float]:
    return [n + weight * m for n, m in zip(counts, more, strict=True)]


def _or_deeper(counts: list[float]) -> list[float]:
    """Of counts by depth from 0 those of each depth or more, from 1."""
    return [*accumulate(counts[:0:-1])][::-1]


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


_FARTHER = 2
"""Times as far, at most, behind a draft that passed: what follows a short one is not known by what
follows others."""

FAILED, PASSED, LASTING = range(3)
"""States of a text: behind a draft that failed, or none, behind one that passed, and where nothing
has been refused for `LONG` tokens."""

STATES = 3

LONG = 32
"""24 to 40 do as well for greedy texts of the shipped pair, half of which end in a loop."""

_LASTS = 96.0
"""Tokens that stretches are taken to last on average at most, whatever they show: texts end, and
what they show is theirs alone."""

_UNLIKE = 0.98
"""One K for all states is taken where it promises so much of the best three. A round behind a draft
that passed takes longer, whatever its K, and it is by these that the longest of three is known:
those that promised as much as one were 6 % slower, on the shipped pair at T = 0.8."""

_SEARCHES = 3
"""Iterations of Dinkelbach's method."""


class Policy(NamedTuple):
    """K behind a draft that passed and in a long stretch, for every K behind one that failed; and
    of the rounds of all, as frequent as they become: tokens and seconds. `[K + 1]`

    That in a long stretch is one for all, the best for the best of all pairs, but no less than K
    behind a draft that passed.
    """

    passed: Lengths
    long: Lengths
    tokens: Floats
    seconds: Floats


@dataclass(frozen=True, eq=False)
class Outlook:
    """What rounds are expected to emit, one after the other, by K from 0.

    Text comes in easy stretches and hard ones. Behind a draft that was accepted as a whole the
    next one is more likely to be, even more so behind many, and a longer draft leaves fewer rounds
    in an easy stretch: by what rounds of this K show alone, a longer one would seem better than it
    is. So rounds are told apart by the state of the text (`FAILED`, `PASSED`, `LASTING`), and
    states are as frequent as they become with their K, as in a Markov chain.

    Attributes:
        apart: mean, in each state. `[STATES, K + 1]`, or one row where they are not told apart.
        goes_on: how likely the draft is to pass and its stretch to go on, the same.
    """

    apart: Floats
    goes_on: Floats

    @classmethod
    def of(cls, alphas: Sequence[Sequence[float]], most: int) -> Outlook:
        """By α in each state; longer drafts than there are depths emit no more."""
        depths = min(len(alphas[0]), most)
        reach = np.zeros((len(alphas), most + 1))  # by depth
        reach[:, 0], reach[:, 1 : depths + 1] = 1.0, [alpha[:depths] for alpha in alphas]
        reach = reach.cumprod(axis=1)
        apart = reach.cumsum(axis=1)
        reach[:, depths + 1 :] = reach[:, depths : depths + 1]
        reach[:, 0] = 0.0
        return cls(apart, reach * _constants(most, LONG, _FARTHER).fades)

    def worth(self, worths: Floats) -> Outlook:
        """The same, where a token at each depth is worth so much of one. `[K + 1]`"""
        worth = np.diff(self.apart, axis=1, prepend=0.0) * worths
        return Outlook(worth.cumsum(axis=1), self.goes_on)

    @cached_property
    def tokens(self) -> Floats:
        """That rounds of the same K in all states emit in the long run: mean. `[K + 1]`"""
        found: Floats = self.apart[0]
        if len(self.apart) == 1:
            return found
        ks = np.arange(self.apart.shape[1])
        behind, often, stay = self._stretch(ks, ks, ks)
        rounds = np.array([np.ones(len(ks)), behind, often * stay])
        found = (rounds * self.apart).sum(axis=0) / rounds.sum(axis=0)
        return found

    @cached_property
    def varies(self) -> Floats:
        """By how much the tokens of such rounds vary, where states are not told apart: variance.
        `[K + 1]`"""
        return variances(self.tokens)

    def policy(
        self,
        seconds: Floats,
        most: int,
        kept: tuple[int, int, int] = (0, 0, 0),
        share: float = 1.0,
        rises: Floats | float = 0.0,
        early: Floats | float = 0.0,
    ) -> Policy:
        """For every K, up to this one, behind a draft that failed, those in the other states.

        Args:
            seconds: that rounds take. `[K + 1]`
            kept: three K, as far as this, that are kept as long as they promise this share of the
                best; 0 for none.
            rises: seconds that a round takes longer behind one of a smaller K. `[K + 1]`
            early: seconds that rounds take longer where K changes again and again. `[K + 1]`
        """
        constants = _constants(most, LONG, _FARTHER)
        ks, usable = constants.ks, constants.usable
        behind, often, stay = self._stretch(ks[:, None], ks[None, :], ks)
        first, second, third = self.apart[:, : most + 1]
        alone = seconds[: most + 1]
        spent = alone + np.broadcast_to(early, seconds.shape)[: most + 1]
        rise = np.broadcast_to(rises, seconds.shape)[: most + 1]
        often_up = self.goes_on[0][: most + 1, None] * constants.unlike
        tokens = first[:, None] + behind * second
        takes = spent[:, None] + behind * spent + often_up * rise
        more, longer = stay * third, stay * spent

        def rates(long: Lengths) -> Floats:
            up = (long != ks) * rise[long]
            found = (tokens + often * more[long]) / (takes + often * (longer[long] + up))
            return np.where(usable, found, 0.0)

        found = np.where(usable, tokens / takes, 0.0)
        for _ in range(_SEARCHES):  # Dinkelbach 1967: of a ratio, by the best of a difference
            long = np.maximum((more - found.max() * longer).argmax(), ks)
            found = rates(long)
        rounds = 1 + behind.diagonal() + often.diagonal() * stay
        emitted = tokens.diagonal() + often.diagonal() * more
        same = np.diag(np.where(usable.diagonal(), emitted / (rounds * alone), 0.0))
        alike = same.max() >= _UNLIKE * found.max()
        if alike:
            long, found = ks, same
        k, passed, before = (min(length, most) for length in kept)
        if k:
            last = rates(np.maximum(before, ks))
            if k == passed == before:
                last[k, k] = same[k, k]
            elif alike:
                share = 1.0
            if last[k, passed] > share * found.max():
                long, found = np.maximum(before, ks), last
                found[k, passed] = np.inf
        best = found.argmax(axis=1)
        at, long = (ks, best), long[best]
        rounds = 1 + behind[at] + often[at] * stay[long]
        policy = Policy(
            np.arange(len(seconds)),
            np.arange(len(seconds)),
            np.ones(len(seconds)),
            np.array(seconds, dtype=float),
        )
        policy.passed[: most + 1], policy.long[: most + 1] = best, long
        policy.tokens[: most + 1] = (tokens[at] + often[at] * more[long]) / rounds
        up = (long != best) * rise[long]
        takes = (takes[at] + often[at] * (longer[long] + up)) / rounds
        policy.seconds[: most + 1] = np.where((best == ks) & (long == ks), alone, takes)
        return policy

    def shares(self, k: int, passed: int, long: int) -> Floats:
        """Of rounds in each state, with these K. `[STATES]`"""
        behind, often, stay = self._stretch(*np.array([k, passed, long]))
        rounds = np.array([1.0, behind, often * stay])
        found: Floats = rounds / rounds.sum()
        return found

    def moments(self, k: int, passed: int, long: int) -> tuple[float, float]:
        """Of the tokens that rounds emit of these K: mean and variance."""
        shares, at = self.shares(k, passed, long), (range(STATES), (k, passed, long))
        means, each = self.apart[at], variances(self.apart)[at]
        mean = float(shares @ means)
        return mean, float(shares @ (each + (means - mean) ** 2))

    def _stretch(self, k: Lengths, passed: Lengths, long: Lengths) -> tuple[Floats, ...]:
        """For each round behind a draft that failed: how many follow behind one that passed, how
        often they come to a long stretch, and how many rounds there are in one."""
        first, then, on = self.goes_on[0][k], self.goes_on[1][passed], self.goes_on[2][long]
        all_pass = (
            then ** _constants(self.goes_on.shape[1] - 1, LONG, _FARTHER).until_long[k, passed]
        )
        return first * (1 - all_pass) / (1 - then), first * all_pass, 1 / (1 - on)


class _Constants(NamedTuple):
    """Of all K up to the longest: that a text goes on for as long, by K; rounds behind a draft that
    passed before a stretch is long, which pairs may be chosen, and which are unlike, by K behind
    one that failed and behind one that passed."""

    ks: Lengths
    fades: Floats
    until_long: Floats
    usable: NDArray[np.bool_]
    unlike: NDArray[np.bool_]


@cache
def _constants(most: int, long: int, farther: int) -> _Constants:
    ks = np.arange(most + 1)
    rows, columns = ks[:, None], ks[None, :]
    return _Constants(
        ks,
        np.exp(-(ks + 1) / _LASTS),
        np.maximum(np.ceil((long - (rows + 1)) / (columns + 1)), 0),
        (columns >= rows) & (columns <= farther * rows),
        columns != rows,
    )


def variances(gains: Floats) -> Floats:
    """Of the tokens that rounds emit, by K, if so many are expected. `[..., K + 1]`, both"""
    means, ks = gains - 1.0, np.arange(gains.shape[-1])
    shallower = gains.cumsum(axis=-1) - gains
    found: Floats = np.maximum(2 * (ks * gains - shallower) - means - means * means, 0.0)
    return found
