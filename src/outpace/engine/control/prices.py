"""What a round is expected to cost: the parts of its time, for every drafter and K."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from .plan import Pick, Profile, Spent
from .survival import Floats
from .times import HOPE, SETTLED, Mean, Pace, RowTimes, StepTimes

LEAST_TIMED, _MOST_TIMED = 3, 12
"""Rounds of plain decoding that are timed together: at least, and at most as long as they become
faster. Of the last two thirds, but no fewer than the first number, the median is taken, not the
mean."""

_TOGETHER = 0.05
"""How much that varies, until it is known: a standard deviation of the logarithm."""

_FASTER = 0.9
"""Times as long as the rounds before. Behind a prompt the first rounds take up to twice as long."""

_LATELY = 64
"""Rounds without one that is not cold, after which cold ones count: where texts are that short,
they are what there is."""

_PRESENT = 0.25
"""Weight of a round in the running mean of how many nodes a draft has."""


class Prices:
    """Measured seconds of drafts, look-ups, reading, and of all else in a round.

    Attributes:
        reading: of each drafter, per token it has to read.
        rounds: of each drafter.
        seconds: of all rounds.
    """

    def __init__(self, members: Sequence[Profile], most: int) -> None:
        self._members = members
        self._ks = np.arange(most + 1, dtype=np.float64)
        self._age = 0  # rounds
        self._warm = 0  # those by the last one that was not cold
        self._warm_plain = 0  # and by the last plain one that was not
        self._pace = Pace(self._clock)
        self._rest = RowTimes(self._pace)
        self._plain = RowTimes(self._pace, self._rest, _TOGETHER)  # of single rows, by sequences
        self._begun = {i: RowTimes(self._pace) for i, m in enumerate(members) if m.begun}
        self._draft = [StepTimes(self._pace) for _ in members]
        self._nodes: list[dict[int, float]] = [{} for _ in members]  # by K, of those drafted
        self._rows = [self._ks + 1 for _ in members]
        # of a single sequence each
        self._look, self._late = [Mean() for _ in members], [Mean() for _ in members]
        self.reading = [Mean() for _ in members]
        self._compared: dict[int, float] = {}
        self._plains: dict[int, float] = {}  # by sequences, as long as nothing new is known
        self.rounds = [0] * len(members)
        self.seconds = 0.0

    def _clock(self) -> int:
        return self._age

    # --- what is asked -------------------------------------------------------------

    def plain(self, batch: int) -> float:
        """Of a round of plain decoding: nothing that was drafted has a part in it, as long as any
        was timed."""
        seconds = self._plains.get(batch)
        if seconds is None:
            timed = self._plain.measured
            seconds = self._plain.one(batch, 1) if timed else self._rest.one(1, batch)
            self._plains[batch] = seconds
        return seconds

    def plain_rounds(self) -> int:
        """How often one was timed."""
        return self._plain.measured

    def compared(self, batch: int) -> float:
        """More of a round in which nobody drafts, if what was proposed is judged by the text."""
        return max(0.0, self._compared.get(batch, 0.0))

    def look(self, member: int, batch: int, late: bool = False) -> float:
        """Of a look-up for so many sequences, one after the other.

        Args:
            late: behind a pause, with much to read before. Were looks that became rare taken to
                cost that always, they would remain so.
        """
        seldom, often = self._late[member], self._look[member]
        return batch * (seldom if seldom.count and (late or not often.count) else often).value

    def longest(self, member: int, batch: int) -> int:
        """The largest K that it has drafted for so many sequences."""
        return self._draft[member].longest(batch)

    def draft(self, member: int, batch: int, hope: float = 0.0) -> Floats:
        """Of a draft by K, `[K + 1]`; before one was timed, what it may cost.

        Args:
            hope: as of `Times.at`.
        """
        times, cost = self._draft[member], self._members[member].cost
        if not times.measured:
            times.expect(1.5 * cost * self.plain(batch))
        return times.at(self._ks, batch, hope)

    def rest(self, rows: Floats, batch: int, member: int = -1, hope: float = HOPE) -> Floats:
        """Of the target's pass over so many rows and all else, less where it is uncertain, but no
        less than plain decoding takes, unless the draft has begun the pass.

        Args:
            hope: as of `Times.at`.
        """
        begun, plain = self._begun.get(member), self.plain(batch)
        if begun is not None and begun.measured:
            found = begun.at(rows, batch, hope)
        else:
            found = np.maximum(self._rest.at(rows, batch, hope), plain)
        found[rows <= 1] = plain  # nobody drafts
        return found

    def rises(self, rows: Floats, member: int) -> Floats:
        """What a pass over so many rows of a single sequence takes longer behind one over other
        rows."""
        times = self._begun.get(member, self._rest)
        found: Floats = math.expm1(times.rise) * times.at(rows, 1)
        return found

    def early(self, member: int) -> Floats:
        """What rounds of a single sequence take longer before they are settled, by K: `[K + 1]`."""
        passes, rows = self._begun.get(member, self._rest), self.rows(member)
        return self._draft[member].early(self._ks) + passes.early(rows)

    def rows(self, member: int) -> Floats:
        """Of the pass, by K: of trees it is learned."""
        return self._rows[member]

    # --- what is told --------------------------------------------------------------

    def read(self, member: int, tokens: int, seconds: float) -> None:
        """A drafter has read what it lacked of a text."""
        self.reading[member].add(seconds / max(1, tokens))

    def rested(
        self,
        batch: int,
        seconds: Sequence[float],
        timing: bool = False,
        behind: int = 0,
        cold: int = 0,
    ) -> None:
        """What rounds of plain decoding took, one after the other.

        Args:
            timing: whether the last two thirds, which have `settled`, are to count.
            behind: how many of them are so soon behind a draft that they take longer: unless this
                is timing, they do not count, nor do too few that follow on them.
            cold: the same of those right behind a prompt, as of `add`; of several sequences, as
                single ones show plain decoding but shortly in short texts.
        """
        self._age += len(seconds)
        self.seconds += sum(seconds)
        if timing:
            self._warm_plain = self._age
            usual = statistics.median_low(seconds[-max(LEAST_TIMED, 2 * len(seconds) // 3) :])
        else:
            first = max(behind, cold if batch > 1 else 0)
            last = seconds[first:]
            if first and len(last) < LEAST_TIMED:
                if behind or self._age - self._warm_plain <= _LATELY:
                    return
                last = seconds
            else:
                self._warm_plain = self._age
            usual = statistics.median_low(last) if len(last) <= LEAST_TIMED else _usual(last)
        self._plain.add(batch, 1, usual)
        self._rest.add(1, batch, usual)
        self._plains.clear()

    def add(
        self,
        picks: Sequence[Pick | None],
        spents: Sequence[Spent],
        phase: int = SETTLED,
        cold: bool = False,
    ) -> None:
        """What rounds took, soon one after the other, in which the same was picked and as many rows
        were scored. They count as one measurement: what is noise is nearly the same in all of
        them.

        Args:
            phase: whether before each of them as many were, as of `Times.add`.
            cold: whether much was read right before, which has driven what a round needs out of
                the processor's caches: it takes up to twice as long as others, and is counted
                only where no other is known.
        """
        batch, rest = len(picks), self._rest
        self._age += len(spents)
        if not cold:
            self._warm = self._age
        elif self._age - self._warm > _LATELY:
            cold = False
        rows, seconds = spents[0].rows, _usual([spent.rest for spent in spents])
        for spent in spents:
            for i, look in spent.looks.items():
                (self._late if i in spent.late else self._look)[i].add(look / batch)
        longest: dict[int, int] = {}
        for pick in picks:
            if pick is not None:
                longest[pick.member] = max(pick.k, longest.get(pick.member, 0))
        for m, k in longest.items():
            self.rounds[m] += len(spents)
            if not self._members[m].instant:
                if not (cold and self._draft[m].measured):
                    drafting = _usual([spent.draft for spent in spents])
                    self._draft[m].add(k, batch, drafting, phase, len(spents))
                if len(longest) == 1:  # else the rows may be those of others, and nobody begins
                    rest = self._begun.get(m, rest)
                    self._sized(m, k, rows - 1)
        if rows == 1 and self._plain.measured:
            if spents[0].looks and phase == SETTLED and not cold:
                plain, before = self.plain(batch), self._compared.get(batch, 0.0)
                more = min(seconds - plain, plain)
                self._compared[batch] = before + _PRESENT / 4 * (more - before)
        elif not (cold and rest.measured):
            rest.add(rows, batch, seconds, phase, len(spents))
        self._plains.clear()
        self.seconds += sum(spent.seconds for spent in spents)

    def _sized(self, member: int, k: int, nodes: int) -> None:
        """A draft of this K has so many nodes. One that is deeper than all before has more, by as
        many for each level as those have on average."""
        known = self._nodes[member]
        weight = _PRESENT if k in known else 1.0
        known[k] = known.get(k, 0.0) + weight * (nodes - known.get(k, 0.0))
        if any(count != depth for depth, count in known.items()):
            depths = [0, *sorted(known)]
            counts = [0.0, *(known[depth] for depth in depths[1:])]
            deeper = (self._ks - depths[-1]).clip(0) * max(1.0, counts[-1] / depths[-1])
            self._rows[member] = np.interp(self._ks, depths, counts) + deeper + 1


def _usual(seconds: Sequence[float]) -> float:
    """What rounds take that are alike: the mean, to which no one adds much."""
    usual = statistics.median_low(seconds)
    return statistics.fmean([min(s, 1.5 * usual) for s in seconds])


def settled(seconds: Sequence[float]) -> bool:
    """Whether rounds of plain decoding, one after the other, have been timed often enough: the last
    two are not faster than those before."""
    if len(seconds) < LEAST_TIMED or len(seconds) >= _MOST_TIMED:
        return len(seconds) >= LEAST_TIMED
    return min(seconds[-2:]) >= _FASTER * min(seconds[:-2])
