"""What could be done in a round: for every drafter and K, what that saves and what it takes.

A round of K saves so many seconds of plain decoding as the tokens that it is expected to emit for
each sequence (`Estimates`) are worth (`Worth`), and takes draft(K, B) + target(rows, B) seconds
(`Prices`). Their ratio is its speed, times plain decoding's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .estimates import Estimates
from .held import Choice
from .plan import Ask, Pick, Profile, kind_of
from .prices import Prices
from .purse import ONCE
from .survival import Floats, Lengths, Outlook, variances
from .times import HOPE
from .worth import Promises, Worth

KEEP = 0.99
"""Of the best rate: the last choice is kept as long as it promises so much."""

_K_FIRST = 4
"""Tokens of the first draft. None is ever more than twice as long as the longest before it."""

_HORIZON = 64
"""Rounds, at most, over which the time to catch up is spread."""


class Option(NamedTuple):
    """A drafter with a model or none (-1), for every K behind a draft that failed, or none: K
    behind one that passed, and K in a long stretch, what a round saves, in seconds of plain
    decoding, the seconds that it takes, looks apart, what it saves if nobody else were looked
    at, and the seconds of a round of this very K, at best."""

    member: int
    passed: Lengths  # [K + 1]
    long: Lengths  # [K + 1]
    saved: Floats  # [K + 1]
    seconds: Floats  # [K + 1]
    unaided: Floats  # [K + 1]
    one: Floats  # [K + 1]

    @property
    def speeds(self) -> Floats:
        return over(self.saved, self.seconds)

    @classmethod
    def alike(cls, member: int, saved: Floats, seconds: Floats, alone: Floats) -> Option:
        """The same K in all states.

        Args:
            alone: what is saved if nobody else were looked at.
        """
        ks = np.arange(len(saved))
        return cls(member, ks, ks, saved, seconds, over(alone, seconds), seconds)

    def lengths(self, k: int) -> tuple[int, int, int]:
        """By state."""
        return k, int(self.passed[k]), int(self.long[k])


class _Gains(NamedTuple):
    """Tokens that rounds are expected to emit, and their variance, by K."""

    tokens: Floats  # [..., K + 1]
    varies: Floats

    @classmethod
    def nothing(cls, batch: int, most: int) -> _Gains:
        """Of rounds in which nobody drafts: `[B, K + 1]`."""
        return cls(np.ones((batch, most + 1)), np.zeros((batch, most + 1)))

    def raise_to(self, other: _Gains, b: int | slice = slice(None)) -> None:
        """Let each sequence, or one, have more where the other has."""
        more = other.tokens > self.tokens[b]
        for own, others in zip(self, other, strict=True):
            own[b] = np.where(more, others, own[b])


class Options:
    """What is promised, by what was measured so far.

    Args:
        most: the longest K.
        fixed: whether it is that of every round.
        promises: what became of those for several sequences.
    """

    def __init__(
        self,
        members: Sequence[Profile],
        most: int,
        fixed: bool,
        estimates: Estimates,
        prices: Prices,
        promises: Promises,
    ) -> None:
        self._members, self._most, self._fixed = members, most, fixed
        self._outcomes = promises
        self._estimates, self._prices = estimates, prices
        self._ks = np.arange(most + 1)

    def worth(self, asks: Sequence[Ask], crowded: bool) -> Worth:
        """Of tokens of these sequences.

        Args:
            crowded: whether others wait for a place.
        """
        return Worth(self._prices.plain(len(asks)) or 1.0, self._prices.plain(1), asks, crowded)

    def of_all(
        self, asks: Sequence[Ask], worth: Worth, last: Choice, worths: Floats | None = None
    ) -> list[Option]:
        """That of those without a model, plain decoding being K = 0 of it, and of each with one
        beside them.

        Args:
            worth: of their tokens.
            last: the last choice.
            worths: of tokens that a model drafts for a single sequence, by depth (`Gaps`).
        """
        instants, rows = self._instants(asks)
        n, whole = len(asks), float(worth.each.sum())
        unaided = np.zeros(self._most + 1)
        unaided[0] = whole
        if any(a.offers for a in asks):
            seconds = self._prices.rest(rows, n)
            saved = worth.saved(*instants)
            if not self._fixed:
                saved = self._kept(-1, n, saved, seconds)
                saved[1:][rows[1:] <= 1] = 0.0  # nothing is offered that could be taken
        else:
            seconds = np.full(self._most + 1, self._prices.plain(n))
            saved = np.full(self._most + 1, whole) if self._fixed else unaided
        found = [Option.alike(-1, saved, seconds, unaided)]
        for m, profile in enumerate(self._members):
            if profile.instant:
                continue
            if len(asks) == 1:
                outlook = self._estimates.outlook(asks[0].slot, m, kind_beside(asks[0]))
                found.append(self._single(m, asks[0], outlook, whole, last, worths))
            else:
                found.append(self._batched(m, asks, worth, instants, rows))
        return found

    def _instants(self, asks: Sequence[Ask]) -> tuple[_Gains, Floats]:
        """Of drafters without a model, for every sequence and K: tokens; and rows."""
        found, nodes = _Gains.nothing(len(asks), self._most), np.zeros(self._most + 1)
        for b, ask in enumerate(asks):
            for i, counts in ask.offers.items():
                depth = min(len(counts) - 1, ask.budget)
                if depth:
                    found.raise_to(self._of_offer(ask, i, counts), b)
                    nodes = np.maximum(nodes, np.asarray(counts)[np.minimum(self._ks, depth)])
        return found, nodes + 1

    def _batched(
        self, m: int, asks: Sequence[Ask], worth: Worth, instants: _Gains, rows: Floats
    ) -> Option:
        """A drafter with a model for several sequences, beside those without one. A token more is
        many rows, and to try that in vain is dear: so less is hoped for than of whether it is worth
        a probe."""
        n, prices = len(asks), self._prices
        tokens = np.ones_like(instants.tokens)
        late = 0
        for b, ask in enumerate(asks):
            lag = ask.lags.get(m, 0)
            if ask.budget and lag is not None:
                at = np.minimum(self._ks, min(ask.budget, self._members[m].most))
                tokens[b] = self._estimates.tokens(ask.slot, m, kind_beside(ask))[at]
                late += lag
        if not self._fixed:
            tokens[:, self.reach(m, n) + 1 :] = 1
        found = _Gains(tokens, variances(tokens))
        alone = worth.saved(*found)
        found.raise_to(instants)
        begins = m if rows.max() <= 1 else -1  # no pass is begun where others draft for some
        rows = np.maximum(rows, prices.rows(m))
        hopes = HOPE / math.sqrt(n), HOPE
        seconds, one = (prices.draft(m, n, h) + prices.rest(rows, n, begins, h) for h in hopes)
        if late:
            rounds = np.clip(sum(a.left for a in asks) / found.tokens.sum(0), 1, _HORIZON)
            reading = late * prices.reading[m].value / rounds
            seconds, one = seconds + reading, one + reading
        saved = worth.saved(*found)
        if not self._fixed:
            saved = self._kept(m, n, saved, seconds)
        return Option.alike(m, saved, seconds, alone)._replace(one=one)

    def _kept(self, member: int, n: int, saved: Floats, seconds: Floats) -> Floats:
        """Of what rounds for several sequences are promised to save, by K, what is believed. Those
        that may lose more than the purse counts are not taken: of so many rows that is soon ten
        plain rounds, to gain one."""
        if n == 1:
            return saved
        plain = saved[0]
        found: Floats = plain + self._outcomes.kept(member, n) * (saved - plain)
        return np.where(seconds > (1 + ONCE) * self._prices.plain(n), plain, found)

    def _single(
        self,
        m: int,
        ask: Ask,
        outlook: Outlook,
        plain: float,
        last: Choice,
        worths: Floats | None,
    ) -> Option:
        """A drafter with a model for a single sequence. What its draft costs is found out step by
        step."""
        prices = self._prices
        lag = ask.lags.get(m, 0)
        most = min(ask.budget, self._members[m].most) if lag is not None else 0
        if not self._fixed:
            most = min(most, self.reach(m, 1))
        seconds = prices.draft(m, 1, HOPE) + prices.rest(prices.rows(m), 1, m)
        if lag:
            rounds = np.clip(ask.left / outlook.tokens, 1, _HORIZON)
            seconds = seconds + lag * prices.reading[m].value / rounds
        if self._fixed:
            saved = plain * outlook.tokens[np.minimum(self._ks, most)]
            return Option.alike(m, saved, seconds, saved)
        kept = last.lengths if last.member == m else (0, 0, 0)
        changes = prices.rises(prices.rows(m), m), prices.early(m)
        policy = outlook.policy(seconds, most, kept, KEEP, *changes)
        unaided = over(plain * policy.tokens, policy.seconds)
        if worths is not None:
            policy = outlook.worth(worths).policy(seconds, most, kept, KEEP, *changes)
        saved = plain * policy.tokens
        return Option(m, policy.passed, policy.long, saved, policy.seconds, unaided, seconds)

    def reach(self, m: int, n: int) -> int:
        """How far a drafter may go for so many sequences: at most twice as far as before."""
        return max(2 * self._prices.longest(m, n), _K_FIRST // n, 1)

    def expected(
        self, asks: Sequence[Ask], worth: Worth, best: Option, k: int
    ) -> tuple[float, float]:
        """The seconds of plain decoding that a round of this choice saves, and how much that
        varies: their standard deviation."""
        saves, each = float(best.saved[k]), worth.each
        if not k:
            return saves, 0.0
        if best.member >= 0:
            outlooks = [self._estimates.outlook(a.slot, best.member, kind_beside(a)) for a in asks]
            means, varies = zip(*(o.moments(*best.lengths(k)) for o in outlooks), strict=True)
            if len(asks) == 1:  # what is worth less is emitted all the same
                saves = float(each[0]) * means[0]
        else:
            varies = tuple(float(self._best_offer(a, k)[1].varies[k]) for a in asks)
        each = each * np.sqrt(varies)
        return saves, math.sqrt(each @ each)

    def assign(self, asks: Sequence[Ask], member: int, k: int) -> list[Pick | None]:
        """Who drafts for each sequence: the model that was chosen, or who promises more without
        one. Of a single sequence's both have been compared."""
        if not k:
            return [None] * len(asks)
        picks: list[Pick | None] = []
        for ask in asks:
            pick = None
            if member >= 0 and ask.lags.get(member, 0) is not None:
                pick = Pick(member, min(k, self._members[member].most), kind_beside(ask))
            offers = [i for i, counts in ask.offers.items() if len(counts) > 1]
            if member < 0 and len(offers) == 1 and not self._members[offers[0]].whole:
                pick = Pick(offers[0], k)
            elif offers and (member < 0 or len(asks) > 1):
                i, gains = self._best_offer(ask, k)
                if gains.tokens[k] > (1.0 if pick is None else self._promises(ask.slot, pick)):
                    pick = Pick(i, k)
            picks.append(pick)
        return picks

    def _promises(self, slot: int, pick: Pick) -> float:
        """Tokens of a draft by a model."""
        return float(self._estimates.tokens(slot, pick.member, pick.kind)[pick.k])

    def _best_offer(self, ask: Ask, k: int) -> tuple[int, _Gains]:
        """Who promises most of K tokens without a model, if anybody does, and its tokens by K."""
        found = [(i, self._of_offer(ask, i, counts)) for i, counts in ask.offers.items()]
        nobody = -1, _Gains(np.ones(k + 1), np.zeros(k + 1))
        return max(found, key=lambda offer: float(offer[1].tokens[k]), default=nobody)

    def _of_offer(self, ask: Ask, i: int, counts: Sequence[int]) -> _Gains:
        """Tokens by K of what a drafter without a model proposes."""
        deepest = len(counts) - 1
        depth = min(deepest, ask.budget)
        outlook = self._estimates.outlook(ask.slot, i, kind_of(deepest))
        at = np.minimum(self._ks, depth)
        tokens, varies = outlook.tokens[at], outlook.varies[at]
        if self._members[i].whole:
            short = self._ks < depth
            tokens, varies = np.where(short, 1.0, tokens), np.where(short, 0.0, varies)
        return _Gains(tokens, varies)


def over(saved: Floats, seconds: Floats) -> Floats:
    """Speeds."""
    found: Floats = saved / np.maximum(seconds, 1e-9)
    return found


def deepest(ask: Ask) -> int:
    """How deep the deepest proposal is of those without a model."""
    return max((len(counts) - 1 for counts in ask.offers.values()), default=0)


def kind_beside(ask: Ask) -> int:
    """Of a draft by a model: where others propose much, it is right more often, too."""
    return kind_of(deepest(ask))
