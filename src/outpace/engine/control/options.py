"""What could be done in a round: for every drafter and K, what that saves and what it takes.

A round of K saves Σ_b w_b E_b(K) seconds of plain decoding, w_b being what a token of sequence b is
worth and E_b(K) the tokens that it is expected to emit (`Estimates`), and takes
draft(K, B) + target(rows, B) seconds (`Prices`). Their ratio is its speed, times plain decoding's.
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
from .survival import Floats, Lengths, Outlook, variance

KEEP = 0.99
"""Of the best rate: the last choice is kept as long as it promises so much."""

_K_FIRST = 4
"""Tokens of the first draft. None is ever more than twice as long as the longest before it."""

_HORIZON = 64
"""Rounds, at most, over which the time to catch up is spread."""

_NEAR = 8, 0.1
"""Tokens by which two sequences may differ in what is left, and it is open who ends first; or so
much of it."""


class Option(NamedTuple):
    """A drafter with a model or none (-1), for every K behind a draft that failed, or none: K
    behind one that passed, and K in a long stretch, what a round saves, in seconds of plain
    decoding, the seconds that it takes, looks apart, what it saves if nobody else were looked
    at, and the seconds of a round of this very K."""

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


class Options:
    """What is promised, by what was measured so far.

    Args:
        most: the longest K.
        fixed: whether it is that of every round.
    """

    def __init__(
        self,
        members: Sequence[Profile],
        most: int,
        fixed: bool,
        estimates: Estimates,
        prices: Prices,
    ) -> None:
        self._members, self._most, self._fixed = members, most, fixed
        self._estimates, self._prices = estimates, prices
        self._ks = np.arange(most + 1)

    def worth(self, asks: Sequence[Ask], crowded: bool) -> Floats:
        """Of a token of each sequence: `[B]` seconds of plain decoding.

        Those that go on for longest keep the others company, who cost little more: the time to the
        end is theirs. So a token of theirs is worth a round of a sequence alone. How long a
        sequence goes on is not known, only how long it may, and if others wait for its place,
        all are worth the same.
        """
        n = len(asks)
        plain = self._prices.plain(n) or 1.0
        if n == 1 or crowded:
            return np.full(n, plain / n)
        left = np.array([float(a.left) for a in asks])
        last = np.exp((left - left.max()) / max(_NEAR[0], _NEAR[1] * float(left.max())))
        more = max(0.0, plain - self._prices.plain(1)) / (n - 1)
        found: Floats = more + (plain - n * more) * last / last.sum()
        return found

    def of_all(
        self, asks: Sequence[Ask], each: Floats, last: Choice, worths: Floats | None = None
    ) -> list[Option]:
        """That of those without a model, plain decoding being K = 0 of it, and of each with one
        beside them.

        Args:
            each: what tokens are worth.
            last: the last choice.
            worths: of tokens that a model drafts for a single sequence, by depth (`Gaps`).
        """
        tokens, rows = self._instants(asks)
        n, whole = len(asks), float(each.sum())
        unaided = np.zeros(self._most + 1)
        unaided[0] = whole
        if any(a.offers for a in asks):
            seconds = self._prices.rest(rows, n)
            saved = whole + each @ (tokens - 1)
            if not self._fixed:
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
                found.append(self._single(m, asks[0], outlook, float(each[0]), last, worths))
            else:
                found.append(self._batched(m, asks, each, tokens, rows))
        return found

    def _instants(self, asks: Sequence[Ask]) -> tuple[Floats, Floats]:
        """Of drafters without a model, for every sequence and K: tokens; and rows."""
        tokens, nodes = np.ones((len(asks), self._most + 1)), np.zeros(self._most + 1)
        for b, ask in enumerate(asks):
            for i, counts in ask.offers.items():
                depth = min(len(counts) - 1, ask.budget)
                if depth:
                    tokens[b] = np.maximum(tokens[b], self._of_offer(ask, i, counts))
                    nodes = np.maximum(nodes, np.asarray(counts)[np.minimum(self._ks, depth)])
        return tokens, nodes + 1

    def _batched(
        self, m: int, asks: Sequence[Ask], each: Floats, instants: Floats, rows: Floats
    ) -> Option:
        """A drafter with a model for several sequences, beside those without one."""
        n, prices = len(asks), self._prices
        tokens = np.ones_like(instants)
        late = 0
        for b, ask in enumerate(asks):
            lag = ask.lags.get(m, 0)
            if ask.budget and lag is not None:
                at = np.minimum(self._ks, min(ask.budget, self._members[m].most))
                tokens[b] = self._estimates.tokens(ask.slot, m, kind_beside(ask))[at]
                late += lag
        if not self._fixed:
            tokens[:, self._reach(m, n) + 1 :] = 1
        alone = each @ tokens
        tokens = np.maximum(tokens, instants)
        rows = np.maximum(rows, prices.rows(m))
        seconds = prices.draft(m, n, hoped=True) + prices.rest(rows, n, m)
        if late:
            rounds = np.clip(sum(a.left for a in asks) / tokens.sum(0), 1, _HORIZON)
            seconds = seconds + late * prices.reading[m].value / rounds
        return Option.alike(m, each @ tokens, seconds, alone)

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
            most = min(most, self._reach(m, 1))
        seconds = prices.draft(m, 1, hoped=True) + prices.rest(prices.rows(m), 1, m)
        if lag:
            rounds = np.clip(ask.left / outlook.tokens, 1, _HORIZON)
            seconds = seconds + lag * prices.reading[m].value / rounds
        if self._fixed:
            saved = plain * outlook.tokens[np.minimum(self._ks, most)]
            return Option.alike(m, saved, seconds, saved)
        kept = last.lengths if last.member == m else (0, 0, 0)
        rises = prices.rises(prices.rows(m), m)
        policy = outlook.policy(seconds, most, kept, KEEP, rises)
        unaided = over(plain * policy.tokens, policy.seconds)
        if worths is not None:
            policy = outlook.worth(worths).policy(seconds, most, kept, KEEP, rises)
        saved = plain * policy.tokens
        return Option(m, policy.passed, policy.long, saved, policy.seconds, unaided, seconds)

    def _reach(self, m: int, n: int) -> int:
        """How far a drafter may go: at most twice as far as before."""
        return max(2 * self._prices.longest(m, n), _K_FIRST // n, 1)

    def expected(
        self, asks: Sequence[Ask], each: Floats, best: Option, k: int
    ) -> tuple[float, float]:
        """The seconds of plain decoding that a round of this choice saves, and how much that
        varies: their standard deviation."""
        saves = float(best.saved[k])
        if not k:
            return saves, 0.0
        if best.member >= 0:
            outlooks = [self._estimates.outlook(a.slot, best.member, kind_beside(a)) for a in asks]
            means, varies = zip(*(o.moments(*best.lengths(k)) for o in outlooks), strict=True)
            if len(asks) == 1:  # what is worth less is emitted all the same
                saves = float(each[0]) * means[0]
        else:
            varies = tuple(variance(self._best_offer(a, k)[1], k) for a in asks)
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
                if gains[k] > (1.0 if pick is None else self._promises(ask.slot, pick)):
                    pick = Pick(i, k)
            picks.append(pick)
        return picks

    def _promises(self, slot: int, pick: Pick) -> float:
        """Tokens of a draft by a model."""
        return float(self._estimates.tokens(slot, pick.member, pick.kind)[pick.k])

    def _best_offer(self, ask: Ask, k: int) -> tuple[int, Floats]:
        """Who promises most of K tokens without a model, if anybody does, and its tokens by K."""
        found = [(i, self._of_offer(ask, i, counts)) for i, counts in ask.offers.items()]
        return max(found, key=lambda offer: float(offer[1][k]), default=(-1, np.ones(k + 1)))

    def _of_offer(self, ask: Ask, i: int, counts: Sequence[int]) -> Floats:
        """Tokens by K of what a drafter without a model proposes."""
        deepest = len(counts) - 1
        depth = min(deepest, ask.budget)
        gains = self._estimates.tokens(ask.slot, i, kind_of(deepest))
        gains = gains[np.minimum(self._ks, depth)]
        return np.where(self._ks < depth, 1.0, gains) if self._members[i].whole else gains


def over(saved: Floats, seconds: Floats) -> Floats:
    """Speeds."""
    found: Floats = saved / np.maximum(seconds, 1e-9)
    return found


def kind_beside(ask: Ask) -> int:
    """Of a draft by a model: where others propose much, it is right more often, too."""
    longest = max((len(counts) - 1 for counts in ask.offers.values()), default=0)
    return kind_of(longest)
