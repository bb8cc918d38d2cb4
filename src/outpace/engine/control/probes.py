"""Probes: rounds that find out about a drafter that is not in use, at a bounded price.

What a probe loses against the best choice is paid from a credit, which grows by a hundredth of
the time (`SHARE`); instead of plain decoding, or on a drafter that has hardly been tried, a tenth
of what drafting gained before may be spent, too. For a single sequence it drafts as far as promises
to lose least, of several one token for all, or for that which it has least to read for, where
credit is short; if most pass, more in the next round, unless one for a single sequence was slower
than what drafts there. While something drafts, plain decoding, which
all else is held against, is timed again from a credit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .plan import Told
from .purse import ONCE

SHARE = 0.01
"""Of the time that probes may take."""

_IN_VAIN = 2
"""Probes for several sequences, one behind the other, that changed nothing, for each of which that
is divided once more, at most: what their rows take is many times what one sequence's do, and one
that draws near to paying is seen by a third as well."""

_OF_GAINS = 0.1
"""Of what drafting gains: after it has paid and does not, it is soon found out whether it does
again, and whether another one is better still."""

_FOR_ALL = 1.5
"""Times what a probe for one sequence loses may be lost by one for all."""

_CREDIT = 4, 16
"""Plain rounds that probes may take at once, at the start and at most."""

_GAP = 6
"""Rounds between two probes of a drafter, if the first did not succeed."""

_REST = 256
"""Rounds, at most, before it is thought about again."""

_LATER = 1.1
"""Times as long as it should take until there is credit is waited for it: who comes too early has
thought in vain."""

_TIMING, _TIMINGS = 0.0025, (2, 4)
"""Of the time that timing plain decoding again may take, and plain rounds that it may lose at once,
at the start and at most."""

_SOONEST, _NO_LESS = 16, 0.5
"""Rounds after which it is timed again at the soonest, and plain rounds that it is taken to lose at
least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that could win.

    Attributes:
        k: tokens that a probe drafts.
        lags: tokens that it would have to read for each sequence; None where it cannot draft.
        one, every: seconds that it loses for a sequence, and for all.
        reading: what reading a token adds.
        new: whether it has hardly been tried.
    """

    member: int
    k: int
    lags: Sequence[int | None]
    one: float
    every: float
    reading: float
    new: bool = False


@dataclass(slots=True)
class Probe:
    """A probe in this round.

    Attributes:
        sequences: which of them it drafts for.
        speed: of the best choice, times plain decoding's.
        by_gains: whether gains pay for it, too.
        slower: whether it was slower than that for a single sequence, what it had to read apart,
            and that is no plain decoding.
    """

    member: int
    k: int
    sequences: Sequence[int]
    speed: float
    by_gains: bool
    reached: int = 0
    passed: int = 0
    slower: bool = False

    @property
    def failed(self) -> bool:
        return self.slower or 2 * self.passed <= self.reached


@dataclass(slots=True)
class Probes:
    """When to probe.

    Attributes:
        count, seconds: probes so far, and what they have lost.
        gains: more that may be lost, instead of plain decoding or on somebody new.
        now: the one in this round.
    """

    count: int = 0
    seconds: float = 0.0
    gains: float = 0.0
    now: Probe | None = None
    _credit: float | None = None
    _vain: int = 0  # for several sequences, one behind the other
    _probed: bool = False  # since it was last asked
    _timings: float = 0.0  # seconds that timing plain decoding may lose
    _needs: dict[int, float] = field(default_factory=dict)  # seconds that their probes would lose
    _last: dict[int, int] = field(default_factory=dict)  # round of each drafter's last probe
    _timed: dict[int, int] = field(default_factory=dict)  # of the last plain one of so many

    @property
    def share(self) -> float:
        """Of the time, that they may take now."""
        return SHARE / (1 + self._vain)

    def time_plain(self, round_: int, batch: int, lost: float, plain: float) -> bool:
        """Whether plain decoding should be timed again.

        Args:
            lost: seconds that this loses.
            plain: what a plain round takes.
        """
        last = self._timed.get(batch)
        if last is not None and round_ - last <= _SOONEST:
            return False
        counts = max(lost, _NO_LESS * plain)
        if self._credit is None or self._timings < counts:
            return False
        self._timed[batch] = round_
        self._timings -= counts
        self.seconds += max(0.0, lost)
        return True

    def timed(self, round_: int, batch: int) -> None:
        """A plain round was timed."""
        self._timed[batch] = round_

    def choose(
        self, round_: int, candidates: Sequence[Candidate], speed: float, idle: bool
    ) -> Probe | None:
        """The next probe, if there is credit for one: of who was probed longest ago.

        Args:
            speed: of the best choice, times plain decoding's.
            idle: whether that is plain decoding.
        """
        before, self.now = self.now, None
        if not idle:
            self._vain = 0
        elif self._probed and any(len(c.lags) > 1 for c in candidates):
            self._vain = min(self._vain + 1, _IN_VAIN)
        self._probed = False
        least = {
            c.member: min((lag, b) for b, lag in enumerate(c.lags) if lag is not None)
            for c in candidates
        }
        self._needs = {c.member: c.one + least[c.member][0] * c.reading for c in candidates}
        if before is not None and round_ - self._last[before.member] > 1:
            before = None
        if self._credit is None:  # of the first round nothing is known
            return None
        for c in candidates:
            if before is None or c.member != before.member or before.failed:
                continue
            able = {b for b, lag in enumerate(c.lags) if lag is not None}
            sequences = [b for b in before.sequences if b in able]
            by_gains, credit = self._paid(c, idle)
            if credit >= 0 and sequences:
                longer = max(2, c.k)
                sequences = _all(c, credit) or sequences
                return self._begin(round_, Probe(c.member, longer, sequences, speed, by_gains))
        for c in sorted(candidates, key=lambda c: self._last.get(c.member, -_GAP)):
            waited = round_ - self._last.get(c.member, -_GAP)
            by_gains, credit = self._paid(c, idle)
            if waited >= _GAP and self._needs[c.member] <= credit:
                sequences = _all(c, credit) or [least[c.member][1]]
                return self._begin(round_, Probe(c.member, c.k, sequences, speed, by_gains))
        return None

    def _paid(self, c: Candidate, idle: bool) -> tuple[bool, float]:
        """Whether gains pay for a probe, too, and what may be paid."""
        by_gains = c.new or idle
        return by_gains, (self._credit or 0.0) + (self.gains if by_gains else 0.0)

    def over(self) -> bool:
        """Whether there was a probe in the round before that has failed, or none."""
        if self.now is not None and not self.now.failed:
            return False
        self.now = None
        return True

    def look(self, seconds: float) -> None:
        """Look at a drafter without a model instead of plain decoding: gains pay for it, and if
        there are none it is as a probe."""
        by_gains = min(self.gains, seconds)
        self.gains -= by_gains
        if self._credit is not None:
            self._credit -= seconds - by_gains

    def rest(self, round_: int, plain: float) -> int:
        """Plain rounds, of so many seconds, before a probe is due for which there is credit."""
        if self._credit is None or self.now is not None:
            return 0
        waits, credit = [_REST], self._credit + self.gains
        for member, needed in self._needs.items():
            gap = self._last.get(member, -_GAP) + _GAP - round_ - 1
            waits.append(max(0, gap, int(_LATER * (needed - credit) / (self.share * plain))))
        return min(waits)

    def _begin(self, round_: int, probe: Probe) -> Probe:
        self.now, self._last[probe.member], self._probed = probe, round_, True
        return probe

    def told(self, told: Told) -> None:
        """What became of a proposal."""
        if self.now is not None and told.member == self.now.member:
            self.now.reached += told.reached
            self.now.passed += told.accepted

    def spent(self, seconds: float, saved: float, plain: float, reading: float = 0.0) -> None:
        """A round is over.

        Args:
            saved: seconds that plain decoding takes for as much.
            plain: what a plain one takes.
            reading: of the seconds those of reading, which are lost whatever they are.
        """
        if self._credit is None:
            self._credit, self._timings = _CREDIT[0] * plain, _TIMINGS[0] * plain
        most = _CREDIT[1] * plain
        self._credit = min(self._credit + self.share * seconds, most)
        self._timings = min(self._timings + _TIMING * seconds, _TIMINGS[1] * plain)
        self.gains = min(self.gains + _OF_GAINS * max(0.0, saved - seconds), most)
        if self.now is not None:
            more = seconds - reading - saved / self.now.speed
            self.now.slower = more > 0 and self.now.speed > 1 and len(self.now.sequences) == 1
            lost = min(more, ONCE * plain) + reading
            self.count += 1
            self.seconds += lost
            gains = min(self.gains, max(0.0, lost)) if self.now.by_gains else 0.0
            self.gains -= gains
            self._credit -= lost - gains

    def behind(self, lost: float) -> None:
        """The rounds behind a probe took so many seconds more for it."""
        self.seconds += lost
        self._credit = (self._credit or 0.0) - lost


def _all(c: Candidate, credit: float) -> list[int]:
    """All sequences that it can draft for, where that costs little more and there is credit to
    read them; else none."""
    lags = {b: lag for b, lag in enumerate(c.lags) if lag is not None}
    dear = c.every > _FOR_ALL * c.one or c.every + sum(lags.values()) * c.reading > credit
    return [] if dear else list(lags)
