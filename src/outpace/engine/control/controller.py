"""The controller: who drafts in the next round and how far, for most tokens per second.

For every choice it knows what it costs (`Prices`, measured while it runs) and what it emits
(`Estimates`, α by depth): Σ_b E_b(K) tokens in draft(K) + target(rows) seconds, for the B
sequences that share the pass, each token by what plain decoding takes for it. The best rate is
taken. K = 0 is a choice like any other, and then no drafter runs, is looked at or is told anything:
what it missed is read when it comes back, and that time is part of the price of coming back.
Whatever was chosen, what it loses beside plain decoding is paid from a `Purse`.

What is not tried is not known. Drafters without a model can be looked at without being taken,
and what they proposed is compared with the text that follows. One with a model must draft to
be judged: it is probed from time to time (`Probes`), if it could win were all its tokens accepted.

A choice is made before anything is drawn, from what was decided in earlier rounds: it never
looks at a token that is dropped again. It follows from measured times, though, so that a
text must not depend on it where a seed is to give the same text again: see `Engine`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .aftermath import Aftermath
from .along import Along, Went, other
from .estimates import Estimates, Key
from .gaps import Gaps
from .held import PLAIN, Choice, Held, Question
from .looks import REPEATS, Looks
from .options import KEEP, Option, Options, deepest, kind_beside, over
from .plan import Ask, Late, Pick, Profile, Spent, Told, kind_of, late
from .prices import LEAST_TIMED, Prices, settled
from .probes import Candidate, Probes
from .purse import ONCE, Purse
from .report import Estimate, Report
from .survival import FAILED, LASTING, LONG, PASSED, Floats
from .times import EARLY, MOVED, SETTLED, SETTLES
from .worth import Promises, Worth

_LEAVE_PLAIN = 1.02
"""By which drafting must beat plain decoding before it begins; going on it need not lose."""

_NEWS, _SOME = 256, 32
"""Of what was told, that waits for a choice, and where nothing is found that could be chosen."""

_SURPRISE = 4.0
"""Standard deviations that what was accepted since a choice may be from what was expected before
it is thought about anew."""

_LOST, _BEARS = 2, 8
"""Plain rounds that may be lost since a choice for a sequence alone, beside plain decoding, before
that, too. Where that changed nothing, twice as many may be lost before the next time, and at most.
(Of a text that is taken for one like all others that would say little: a bad stretch of an ordinary
one loses as much, and to choose shorter drafts for what follows it loses more.)"""

_VARY, _FOR, _NEIGHBOURS = (32, 128), 2, (1, -1, 2, -1)
"""Rounds of a model that was chosen, at first and later (an eighth of those so far), after which
some, one after the other, draft so many tokens more, in turn: two, too, as the next K may be dear
and the one behind it cheap."""

_EARNEST, _STINT, _RIVALS = 2, 16, 0.96
"""One in so many times that they do they are so many, where that many tokens more or less promise
so much of the best rate: some K are settled only then, and seem dearer in two rounds than they are
(see `times`). With K = 5 the shipped pair may be 4 to 10 % slower than with K = 6, and would not
know."""

_SLOW = 1.25
"""Times as long as was expected that a round counts as at most: what lasts for longer is the
machine's, which for some ten or hundred rounds may be half as fast, and plain decoding, which is
not timed then, would be no faster."""

_STRIDE = 8
"""Rounds of a course that are counted together."""

_ALONG, _LEAST_LOST = 16, 0.1
"""Rounds of a single sequence that are told of together, at most, and plain rounds that each of
them may lose, at least."""

_COMPARED = 8
"""Rounds in which nobody drafts, before the text is compared with what was proposed."""

_AFRESH = 32
"""Rounds of a new sequence, at most, in which nothing is tried because that did not pay before."""

_MORE_TIMED, _FREE = 3, 0.5
"""Plain rounds that are timed beyond the least number, as long as they lose no more than so much of
one: the first three behind a draft take 3 to 15 % longer than plain decoding does. Where drafts
hardly pay, that decides."""

_BEHIND = 3
"""Rounds behind a prompt that take longer than others, as what they need was driven out of the
processor's caches: by half, a third and a tenth, on the shipped pair."""

_SETTLE = 64
"""Rounds that are rested in, before they are counted."""


_Judged = tuple[Told, int, int]
"""What was told, how many tokens the sequence had emitted by then, and its state (`Outlook`)."""

_Round = tuple[Sequence[Pick | None], Spent, float, float, int, bool]
"""What a round took, in all, too, and how many seconds of plain decoding it saved; in which
phase, and whether it is cold, as in `Prices.add`."""


class _Course(NamedTuple):
    """A model drafts as was chosen, until it is time to think or something happens.

    Attributes:
        slots, late: of whom it was asked.
        until: when it is time, as `Held.now`.
        looks: the round in which somebody is to be looked at, if nobody is eager before.
    """

    slots: Sequence[int]
    late: Late
    until: float
    looks: float
    choice: Choice


@dataclass(slots=True)
class _Stride:
    """Rounds of a course, for so many sequences: seconds that they took, those of plain decoding
    that they saved, and those in which was thought what to do."""

    batch: int = 1
    rounds: int = 0
    seconds: float = 0.0
    saved: float = 0.0
    thought: float = 0.0


class _Looked(NamedTuple):
    """A single sequence was looked at.

    Attributes:
        length: tokens that it had emitted.
        inside: whether it is in a gap.
        gaps: at its temperature.
    """

    round: int
    slot: int
    length: int
    inside: bool
    gaps: Gaps


class Controller:
    """Chooses for an engine.

    Args:
        fixed: the K of every round, where only the drafter is to be chosen.
        clock: tells the time in seconds, to know what choosing costs.

    Attributes:
        most: the longest K.
        thought: whether the last choice was thought about.
    """

    def __init__(
        self,
        members: Sequence[Profile],
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.members = tuple(members)
        longest = max(m.most for m in members)
        self.most = longest if fixed is None else min(longest, fixed)
        self.thought = False
        self._fixed = fixed is not None
        self._instant = [i for i, m in enumerate(self.members) if m.instant]
        # whether what they propose is all there is
        self._alone = len(self._instant) == len(self.members)
        self._estimates = Estimates(self.members, self.most)
        self._prices = Prices(self.members, self.most)
        self._promises = Promises(lambda: self._round)
        self._options = Options(
            self.members, self.most, self._fixed, self._estimates, self._prices, self._promises
        )
        self._looks = Looks(self.members, self._prices, self._fixed)
        self._probes, self._purse, self._aftermath = Probes(), Purse(), Aftermath()
        self._held = Held(clock)
        self._gaps: dict[Key, Gaps] = {}
        self._looked: _Looked | None = None  # when it was last
        self._course: _Course | None = None  # while one lasts
        self._along, self._stride = False, _Stride()  # whether this round only goes on with it
        self._judged: list[_Judged] = []  # since something was learned
        self._rounds: list[_Round] = []
        self._worth: Worth | None = None  # of tokens of those that were last chosen for
        self._lost = 0.0  # since the last choice, beside plain decoding
        self._bears = _LOST  # plain rounds that may be lost
        self._more, self._since = 0.0, 0  # beside what was expected, and rounds since then
        self._missed = 0  # drafts as chosen of which nothing was accepted, since one was
        # by slot: whose whole draft was accepted in this round, and tokens since one was refused
        self._passed: dict[int, tuple[int, int]] = {}
        self._behind: dict[int, tuple[int, int]] = {}  # and in the one before
        self._now = PLAIN  # what this round goes by
        self._emitted: dict[int, int] = {}  # tokens of this round
        self._round = self._resting = 0  # rounds so far, and until when nothing is worth trying
        self._rested: list[float] = []  # seconds of the rounds since then
        self._rested_cold = 0  # the first of them, right behind a prompt
        self._resters: dict[int, Key] = {}  # who runs in them
        self._drafted = 0  # rounds of a model that was chosen
        self._varies, self._turns = _VARY[0], 0  # the next that varies, and how often they did
        self._variation = 0, 0  # by how much, and for how long, if it is known
        self._around = -1, 0, 0  # the drafter and K that were chosen, of how many sequences
        self._rows = self._alike = 1  # of the target's pass in the last rounds, and how many those
        self._opened = self._vain = False  # a sequence, since the last choice; it was not worth it
        self._cold = 0  # rounds that are right behind a prompt, from this one on
        self._timing = False  # whether that is to time plain decoding
        self._keys: dict[int, Key] = {}
        self._known: set[Key] = set()  # those there have been
        self._batch = 1
        self._asked = self.most  # the longest budget of those
        self._chosen = PLAIN
        # when there is time to choose for one by what it has shown itself, or there must be
        self._parts = 0.0
        self._answered: Question | None = None  # by what this round goes by
        self._aged = False  # since the last choice

    # --- sequences ---------------------------------------------------------------

    def open(self, slot: int, key: Key) -> None:
        """A sequence begins."""
        self._settle()  # rounds that it had no part in
        if self._resters.get(slot) != key:
            self._resting = 0
        elif not (self._purse.empty or self._vain):  # much of what was known then still is
            self._resting = min(self._resting, self._round + _AFRESH)
        if key not in self._known:
            self._purse.begin(self._prices.plain(1))
            self._known.add(key)
        self._keys[slot] = key
        self._opened, self._cold, self._missed = True, _BEHIND, 0
        self._looked = None
        self._passed.pop(slot, None)
        self._estimates.open(slot, key)
        self._looks.new_text(alone=len(self._keys) == 1)
        self._held.part()
        self._parts, self._course = self._held.until(key), None

    def close(self, slot: int) -> None:
        self._count_up()
        self._learn(over=slot)
        self._keys.pop(slot, None)
        self._estimates.close(slot)

    # --- a round ------------------------------------------------------------------

    def rests(self, batch: int) -> bool:
        """Begin a round, if nothing is to be tried in it: nobody is asked or told anything, but
        `rested` what it took."""
        if self._round + 1 < self._resting and batch == len(self._resters):
            if self._looks.eager and not self._timing and not self._purse.empty:
                return False
        elif self._fixed or self._prices.plain_rounds() or settled(self._rested):
            if not self._rests_on(batch):
                return False
        else:
            self._resters = self._keys.copy()
        self._begin()
        return True

    def _rests_on(self, batch: int) -> bool:
        """Whether to rest further as the purse does not hold enough yet: to ask that in a round
        like others takes up to half a plain one, which is what fifty of them bring in."""
        if not self._purse.empty or batch != len(self._resters) or self._resters != self._keys:
            return False
        self._settle()
        if self._purse.empty:
            self._probed()
            self._pause_for([*self._keys], self._purse.rounds(self._prices.plain(batch), batch))
        return self._purse.empty

    def _probed(self) -> None:
        """A probe, if there was one, does not go on."""
        if self._probes.now is not None:
            self._learn()
            self._probes.now = None

    def rests_on(self, waiting: bool) -> int:
        """How many rounds behind this one, in which is rested, begin alike if no sequence begins or
        ends: they need not be asked about, and may be told of together with it.

        Args:
            waiting: whether proposals wait for the text to judge them.
        """
        if self._timing or self._looks.eager or not self._prices.plain_rounds():
            return 0
        rounds = min(self._resting - self._round, _SETTLE - len(self._rested))
        if waiting:
            rounds = min(rounds, _COMPARED - self._round % _COMPARED)
        return max(0, rounds - 1)

    def rested(self, *seconds: float, once: bool = False) -> None:
        """What rounds took in which each sequence emitted a token.

        Args:
            once: as of `Spent`, of the last one.
        """
        if once:
            *others, last = seconds
            seconds = *others, self._prices.plain(len(self._resters)) or last
        rounds = len(seconds)
        self._round += rounds - 1
        self._rested_cold += min(self._cold, rounds)
        self._rows, self._alike, self._cold = 1, SETTLES, max(0, self._cold - rounds)
        self._rested.extend(seconds)
        self._held.passed(sum(seconds))
        if self._timing and self._round + 1 >= self._resting and not settled(self._rested):
            self._resting += 1
        if len(self._rested) >= _SETTLE:
            self._settle()

    def _settle(self) -> None:
        """Count the rounds that were rested in."""
        if not self._rested:
            return
        rounds, n, seconds = len(self._rested), len(self._resters), sum(self._rested)
        for slot in self._resters:
            if self._estimates.emitted(slot, rounds):
                self._ages()
        if not (self._prices.plain_rounds() or settled(self._rested)):
            self._rested, self._rested_cold = [], 0  # too few behind a prompt to tell
            return
        timing = (self._timing and settled(self._rested)) or not self._prices.plain_rounds()
        behind, cold = self._aftermath.rounds, self._rested_cold
        self._prices.rested(n, self._rested, timing, behind, cold)
        self._probes.timed(self._round, n)
        plain = self._prices.plain(n)
        lost, probed = self._aftermath.counted(self._rested, plain)
        self._purse.spent(seconds, seconds - lost, plain, sequences=n)
        self._probes.spent(seconds, seconds, plain)
        if probed:
            self._probes.behind(lost)
        self._rested, self._rested_cold, self._timing = [], 0, False

    def again(
        self, slots: Sequence[int], budgets: Sequence[int], late: Late = ()
    ) -> Sequence[Pick | None] | None:
        """Begin a round; the last choice, where it need not be thought about.

        Args:
            late: drafters that have much to read of the first one's text, see `late`.
        """
        self._begin()
        self._asked = max(budgets)
        if len(slots) != self._batch:
            self._batch = len(slots)
            self._looks.of(self._batch)
        course = self._course
        if (
            course is None
            or self._held.now >= course.until
            or course.slots != slots
            or course.late != late
            or self._round >= course.looks
            or self._looks.eager
        ):  # something is to be thought about or looked at
            self._count_up()
            self._course = None
            choice = self._resumed(slots, late)
            if choice is None or not choice.drafts:
                return None if choice is None else [None] * len(slots)
        else:
            choice, self._along = course.choice, True
        m, k = choice.member, self._varied(slots, choice)
        return [Pick(m, min(k, budget)) if budget else None for budget in budgets]

    def _resumed(self, slots: Sequence[int], late: Late) -> Choice | None:
        """What was chosen of these, if it need not be thought about; where a model drafts, its
        course begins."""
        self._settle()
        self._looks.age = self._estimates.age(slots[0])
        probed = self._probes.now is not None
        if probed:
            self._learn()
            if not self._probes.over():
                self._goes_apart()  # it goes on
        empty = self._purse.empty
        if not empty and self._instant and self._looks.due(self._round, self._paid):
            return None
        if empty or self._alone:
            self._probes.now, self._now = None, PLAIN
            self._rest(slots)
            return PLAIN
        question = self._question(slots, late)
        choice = self._held.find(question)
        if choice is None:
            return None
        if not (choice.drafts or probed) and self._round >= self._resting:
            self._held.drop()  # what was waited for may be tried
            return None
        self._adopt(choice)
        if not choice.drafts:
            self._now = choice
            self._rest(slots)
        elif self._probes.now is None:
            until = self._held.due(question)
            if question.alike:
                until = min(until, self._parts)
            rounds = self._looks.rest(self._round, self._paid)
            looks = math.inf if rounds is None else self._round + rounds + 1
            self._course = _Course(list(slots), late, until, looks, choice)
        return choice

    def _begin(self) -> None:
        """A round begins."""
        self._round += 1
        self._emitted, self._along = {}, False
        self._behind, self._passed = self._passed, {}

    def _varied(self, slots: Sequence[int], choice: Choice) -> int:
        """The K of a choice of a model, or its neighbour, so that it becomes known what that costs:
        from one row to the next that may go up or down by more than drafting further brings."""
        self._drafted += 1
        self._now = choice
        state = self._state(slots[0], choice.member)
        for slot in slots[1:]:
            state = min(state, self._state(slot, choice.member))
        k = choice.lengths[state]
        self._vary(choice)
        if self._drafted >= self._varies and not self._fixed:
            self._count_up()
            more, lasts = self._variation = self._next_variation(choice)
            k, self._along = other(k, more), False
            if lasts == _FOR:  # else they are to go about as expected
                self._now = PLAIN
            if self._drafted >= self._varies + lasts - 1:
                self._varied_enough()
        return min(k, self._farthest(choice.member))

    def _farthest(self, member: int) -> int:
        """How many tokens a round of it may draft."""
        most = min(self.most, self.members[member].most)
        return most if self._fixed else min(most, self._options.reach(member, self._batch))

    def _vary(self, choice: Choice) -> None:
        """Rounds vary around this choice: none go on that began to around one that is far from
        it."""
        member, k, batch = self._around
        alike = (member, batch) == (choice.member, self._batch)
        if self._variation[1] and not (alike and abs(k - choice.k) <= max(_NEIGHBOURS)):
            self._varied_enough()
        if not self._variation[1]:
            self._around = choice.member, choice.k, self._batch

    def _varied_enough(self) -> None:
        """No more rounds vary for some time."""
        first, later = _VARY
        self._turns, self._variation = self._turns + 1, (0, 0)
        self._varies = self._drafted + min(max(first, self._drafted // 8), later)

    def _next_variation(self, choice: Choice) -> tuple[int, int]:
        """How many tokens more rounds draft that vary, and how many such rounds there are."""
        if self._variation[1]:
            return self._variation  # it has begun
        times, last = divmod(self._turns + 1, _EARNEST)
        if choice.rivals and not last:
            return choice.rivals[times % len(choice.rivals)], _STINT
        return _NEIGHBOURS[self._turns % len(_NEIGHBOURS)], _FOR

    def along(self) -> Along | None:
        """The rounds behind this one, if a model drafts for a single sequence: they need not be
        asked about, and are told of together (`went`)."""
        course, purse = self._course, self._purse.seconds
        if course is None or len(course.slots) > 1 or course.late or self._fixed or purse is None:
            return None
        choice, (slot,), plain = course.choice, course.slots, self._prices.plain(1)
        # how many there are before it is time to think, if they go as expected, and, if they do
        # not, before they have lost what they may
        own = self._answered is not None and not self._answered.alike
        may_lose = min(purse, self._bears * plain - self._lost) if own else purse
        until = (
            (course.until - self._held.now) / choice.takes,
            may_lose / max(choice.takes - plain, _LEAST_LOST * plain),
            course.looks - self._round - 2,
            _ALONG - 1,
        )
        rounds = 1 + math.floor(min(until))
        if rounds <= 0 or self._looks.eager:
            return None
        self._vary(choice)
        passed, (more, lasts) = self._passed.get(slot), self._next_variation(choice)
        return Along(
            slot,
            choice,
            most=self._farthest(choice.member),
            state=_state(passed, choice.member),
            passed=passed[1] if passed else 0,
            varies=self._varies - self._drafted - 1,
            more=more,
            lasts=lasts,
            counts=lasts != _FOR,
            rounds=rounds,
            tokens=self._estimates.young(slot),
            expected=choice.saves / plain,
            beside=self._more / plain,
            since=self._since,
            odd=_SURPRISE * choice.varies / plain,
            missed=self._missed,
            misses=choice.misses if self._held.now < self._parts else math.inf,
            tells=bool(self._instant),
        )

    def went(self, along: Along) -> None:
        """What came of rounds that went along."""
        left = along.went
        while left:
            alike = max(0, min(len(left), self._varies - self._drafted) - 1)
            self._went_on(along, left[:alike])
            self._went(along, left[alike])
            left = left[alike + 1 :]

    def _went(self, along: Along, went: Went) -> None:
        """One of them."""
        k, reached, accepted, emitted, draft, rest, rows, once = went
        slot, member = along.slot, along.choice.member
        self._begin()
        self._along = True
        self._varied([slot], along.choice)
        self.emitted(slot, emitted)
        if reached:
            self.told(Told(slot, member, 0, reached, accepted))
        elif not k:
            self.refused()
        spent = Spent({}, draft, 0.0, rest, rows, once=once)
        self.spent([Pick(member, k) if k else None], spent)

    def _went_on(self, along: Along, rounds: Sequence[Went]) -> None:
        """Some in which nothing happened: the same at once, in half of the time."""
        if not rounds:
            return
        slot, choice, plain = along.slot, along.choice, self._prices.plain(1)
        member, most, length = choice.member, _SLOW * choice.takes, self._estimates.length(slot)
        passed, began = self._passed.get(slot), length
        whole = counted = 0.0
        for k, reached, accepted, emitted, draft, rest, rows, _ in rounds:
            state, seconds, saved = _state(passed, member), draft + rest, plain * emitted
            before = passed[1] if passed and state != FAILED else 0
            passed = (member, before + accepted + 1) if accepted == reached else None
            length += emitted
            self._judged.append((Told(slot, member, 0, reached, accepted), length, state))
            spent = Spent({}, draft, 0.0, rest, rows)
            phase, cold = self._phase(rows), self._cold > 0
            self._rounds.append(([Pick(member, k)], spent, seconds, saved, phase, cold))
            self._cold -= cold
            self._missed = 0 if accepted else self._missed + 1
            self._vain = self._vain and not accepted
            whole += seconds
            counted += min(seconds, most, saved + ONCE * plain)
        n, saved = len(rounds), plain * (length - began)
        self._now, self._passed = choice, {slot: passed} if passed else {}
        self._round, self._drafted = self._round + n, self._drafted + n
        self._estimates.emitted(slot, length - began)
        self._held.passed(whole)
        self._lost += counted - saved
        self._more, self._since = self._more + saved - n * choice.saves, self._since + n
        stride = self._stride
        stride.batch, stride.rounds = 1, stride.rounds + n
        stride.seconds, stride.saved = stride.seconds + counted, stride.saved + saved

    def _state(self, slot: int, member: int) -> int:
        """FAILED, PASSED or LASTING, by what became of a drafter's last drafts (`Outlook`)."""
        return _state(self._behind.get(slot), member)

    def sits_out(self) -> None:
        """Begin a round in which nobody may draft."""
        self._count_up()
        self._begin()
        self._now, self._behind = PLAIN, {}
        self._probed()

    def refused(self) -> None:
        """Who was chosen for this round has nothing to propose."""
        self._now = PLAIN
        self._goes_apart()

    def looks(self) -> list[int]:
        """Drafters without a model that are worth looking at in this round."""
        paid = self._paid
        looked = self._looks.take(self._round, paid)
        for i in looked:
            if self._chosen.plain or (self._alone and self._looks.seldom(i, paid)):
                self._probes.look(self._prices.look(i, self._batch))
        return looked

    @property
    def _paid(self) -> bool:
        """Whether nobody drafts but who is looked at, and what drafting gained before pays for
        looks."""
        return (self._alone or self._chosen.plain) and self._probes.gains > 0

    def choose(self, asks: Sequence[Ask], crowded: bool = False) -> Sequence[Pick | None]:
        """Who drafts for each sequence; None is plain decoding.

        Args:
            crowded: whether others wait until one of them ends.
        """
        self._comes_upon(asks)
        lacking = late(asks[0].lags, asks[0].left)
        question = self._question([a.slot for a in asks], lacking, asks)
        nothing = self._alone and not (question.kind or self._fixed)  # is there to choose
        held = PLAIN if nothing else self._held.find(question)
        self.thought = held is None
        choice, tried = held or PLAIN, False
        if nothing:
            if len(self._judged) + len(self._rounds) >= _SOME:
                self._learn()  # what looks take, at least
        elif held is None:
            began = self._held.begin(question)
            self._learn()
            before = self._held.before(question) if question.alike else None
            # what is chosen at the end of a text is for the beginnings of others, too
            full = [a._replace(budget=self.most) for a in asks] if question.alike else asks
            choice, tried = self._choose(full, crowded, before or self._chosen)
            self._held.keep(question, choice, began)
        else:
            self._adopt(held)
        if tried:
            self._now, picks = PLAIN, self._trial(asks)
        else:
            self._now = choice
            k = self._varied([a.slot for a in asks], choice) if choice.drafts else choice.k
            picks = self._options.assign(asks, choice.member, k)
            looked = {i for a in asks for i in a.offers}
            self._looks.count(looked, choice.gain, self._round)
            if not (any(picks) or choice.gap):
                self._rest([a.slot for a in asks])
        return [self._cut(pick, ask) for pick, ask in zip(picks, asks, strict=True)]

    def _comes_upon(self, asks: Sequence[Ask]) -> None:
        """A single sequence may be in a gap, or not any more."""
        before, self._looked = self._looked, None
        if len(asks) > 1 or self._alone or not asks[0].offers:
            return
        slot, inside = asks[0].slot, not kind_beside(asks[0])
        gaps = self._gaps.setdefault(self._keys[slot], Gaps())
        now = _Looked(self._round, slot, self._estimates.length(slot), inside, gaps)
        if before and before.inside and before[:2] == (now.round - 1, slot):
            gaps.went_on(now.length - before.length, over=not inside)
        self._looked = now

    def _cut(self, pick: Pick | None, ask: Ask) -> Pick | None:
        """The pick as far as there is something to take."""
        if pick is None:
            return None
        k, most = pick.k, ask.budget
        if pick.member in ask.offers:
            depth = len(ask.offers[pick.member]) - 1
            if self.members[pick.member].whole:
                k = depth if depth <= most else 0
            most = min(most, depth)
        return _shorter(pick, min(k, most))

    def _choose(self, asks: Sequence[Ask], crowded: bool, last: Choice) -> tuple[Choice, bool]:
        """The choice, and whether something else is to be tried in this round.

        Args:
            last: what was chosen before, which is kept if it is nearly as fast.
        """
        n = self._batch
        self._resting, self._timing = 0, False
        worth = self._worth = self._options.worth(asks, crowded)
        gaps = self._looked.gaps if self._looked and self._looked.inside else None
        worths = None if gaps is None else gaps.worths(self.most)
        options = self._options.of_all(asks, worth, last, worths)
        first = options[0]
        unaided = max(float(o.unaided.max()) for o in options)
        self._looks.priced(unaided)
        plain, looked = float(first.seconds[0]), any(a.offers for a in asks)
        if looked:
            first.seconds[0] += self._prices.compared(n)  # with the text, what is not taken
        best, k = self._best(options, bool((first.saved > first.saved[0]).any()), last)
        member, speed = best.member, float(best.speeds[k])
        gain = 0.0
        if looked and k:
            slower = unaided * max(plain, 1e-9)
            gain = max(0.0, float(best.saved[k] - unaided * best.seconds[k]) / slower)
        if gaps:
            gaps.speed = speed
        expected = self._options.expected(asks, worth, best, k)
        until_look = worths is not None and not k
        whole, promised = float(worth.each.sum()), 0.0
        if n > 1 and k:
            promised = (expected[0] / whole - 1) / self._promises.kept(member, n)
        takes = float(best.seconds[k]) if k else math.inf
        misses, rivals = math.inf, tuple[int, ...]()
        if n == 1 and k and member >= 0:
            misses = self._estimates.misses(asks[0].slot, member, kind_beside(asks[0]))
            rivals = self._rivals(best, k)
        choice = Choice(
            member, *best.lengths(k), gain, *expected, until_look, promised, takes, misses, rivals
        )
        tried = self._try(asks, options, choice, whole, speed, worths)
        self._take(choice)
        if self._opened:
            self._vain = choice.plain
        self._opened = self._aged = False
        return choice, tried

    def _rivals(self, best: Option, k: int) -> tuple[int, ...]:
        """By how many tokens longer or shorter drafts promise nearly as much."""
        speeds = best.speeds
        near = [more for more in sorted({*_NEIGHBOURS}) if 0 < k + more < len(speeds)]
        return tuple(more for more in near if speeds[k + more] >= _RIVALS * speeds[k])

    def _question(self, slots: Sequence[int], late: Late, asks: Sequence[Ask] = ()) -> Question:
        """What is to be chosen; without asks nobody looked."""
        kind = -1
        if any(a.offers for a in asks):
            kind = kind_of(sum(map(deepest, asks)))
        self._answered = self._new_question(slots, late, kind)
        return self._answered

    def _new_question(self, slots: Sequence[int], late: Late, kind: int) -> Question:
        """As long as there is no time to choose for a sequence by what it has shown itself, and it
        goes as expected, what is chosen is for all that are like it."""
        key = self._keys[slots[0]]
        if len(slots) > 1 or self._fixed or self._held.now >= self._parts:
            if len(slots) == 1 and self._estimates.alike(slots[0]):
                self._learn()  # what it showed while it was taken for one like all others
            for slot in slots:
                self._estimates.part(slot)
        elif self._estimates.alike(slots[0]):
            who = key, self._estimates.age(slots[0]), tuple(late)
            return Question(who, kind, True, key)
        return Question(tuple(slots), kind, key=key)

    def _adopt(self, choice: Choice) -> None:
        """A sequence that has just begun, or has another age now, goes by what was chosen for
        others like it."""
        if self._opened:
            self._vain = choice.plain
        if self._opened or self._aged:
            self._opened = self._aged = False
            self._take(choice)

    def _ages(self) -> None:
        """A sequence has another age now."""
        if self._batch == 1:
            self._held.part()
            self._course, self._aged = None, True

    def _goes_apart(self) -> None:
        """A sequence does not go as expected: it is to be thought about by what it has shown."""
        self._parts, self._course = 0.0, None
        self._held.drop()

    def _take(self, choice: Choice) -> None:
        """This is the last choice from now on."""
        lost = self._lost > 0 and choice.like(self._chosen)
        self._bears = min(2 * self._bears, _BEARS) if lost else _LOST
        self._chosen, self._lost, self._more, self._since = choice, 0.0, 0.0, 0

    def _trial(self, asks: Sequence[Ask]) -> list[Pick | None]:
        """The picks of a probe, or of plain decoding that is to be timed."""
        picks: list[Pick | None] = [None] * len(asks)
        probe = self._probes.now
        if probe is not None:
            for b in probe.sequences:
                wanted = self.most if self._fixed else probe.k
                length = min(wanted, asks[b].budget, self.members[probe.member].most)
                picks[b] = Pick(probe.member, length, kind_beside(asks[b]))
        return picks

    def _rest(self, slots: Sequence[int]) -> None:
        """Until there is credit for a probe, or it is time for a look."""
        if self._fixed:
            return
        self._timing = False
        plain = self._prices.plain(len(slots))
        if self._purse.empty:
            self._pause_for(slots, self._purse.rounds(plain, len(slots)))
            return
        rounds = self._probes.rest(self._round, plain)
        due = self._looks.rest(self._round, self._paid)
        if self._asked < self.most:  # other sequences follow of whom more can be asked
            rounds = min(rounds, self._asked)
        self._pause_for(slots, rounds if due is None else min(rounds, due))

    def _pause_for(self, slots: Sequence[int], rounds: int) -> None:
        """Rest in so many rounds."""
        self._resting = self._round + rounds + 1
        self._resters = {slot: self._keys[slot] for slot in slots}

    def _best(self, options: Sequence[Option], offered: bool, last: Choice) -> tuple[Option, int]:
        """The fastest, and its K; the last choice, if it is nearly as fast."""
        if self._fixed:
            k = self.most
            usable = [o for o in options if o.member >= 0 or offered] or list(options)
            return max(usable, key=lambda o: float(o.speeds[k])), k
        speeds = [o.speeds for o in options]
        at = max(range(len(options)), key=lambda i: float(speeds[i].max()))
        k = int(speeds[at].argmax())
        kept, length = last[:2]
        i = next(i for i, o in enumerate(options) if o.member == kept)
        if speeds[i][length] >= KEEP * speeds[at][k]:
            at, k = i, length
        needed = speeds[0][0] * (1.0 if length else _LEAVE_PLAIN)
        return (options[at], k) if k and speeds[at][k] >= needed else (options[0], 0)

    def _try(
        self,
        asks: Sequence[Ask],
        options: Sequence[Option],
        choice: Choice,
        plain: float,
        speed: float,
        worths: Floats | None,
    ) -> bool:
        """Whether to try something instead of the best choice, as there is time for it."""
        n = len(asks)
        each = max(float(options[0].seconds[0]) - plain / speed, 1e-9)  # that a plain round loses
        rounds = LEAST_TIMED + min(int(_FREE * plain / each), _MORE_TIMED)
        lost = (1 + rounds) * each
        if choice.k and not self._fixed and self._probes.time_plain(self._round, n, lost, plain):
            self._pause_for([a.slot for a in asks], rounds)
            self._timing, self._probes.now = True, None
            return True
        weights = np.ones(self.most + 1) if worths is None else worths
        most = plain * weights.cumsum()[np.minimum(np.arange(self.most + 1), self._asked)]
        found = self._candidates(asks, options, choice.member, speed, plain, most)
        return self._probes.choose(self._round, found, speed, choice.plain) is not None

    def _candidates(
        self,
        asks: Sequence[Ask],
        options: Sequence[Option],
        member: int,
        speed: float,
        plain: float,
        most: Floats,
    ) -> list[Candidate]:
        """Those with a model, beside the chosen one, that could win were all tokens accepted.

        Args:
            most: seconds of plain decoding that a round would save then, by K.
        """
        n, found = len(asks), []
        for option in options[1:]:
            m = option.member
            if m == member or over(most, option.one).max() <= _LEAVE_PLAIN * speed:
                continue
            lags = [a.lags.get(m, 0) if a.budget else None for a in asks]
            if all(lag is None for lag in lags):
                continue  # there is no sequence that it could draft for
            reading, far = self._prices.reading[m].value, 1
            if n == 1:  # as far as it would draft were it chosen, if that promises to lose less
                losses = option.seconds[1:] - option.saved[1:] / speed
                far = int(losses.argmin()) + 1
                one = every = float(losses[far - 1])
            else:
                one = every = float(option.seconds[1]) - plain / speed
                if not self.members[m].begun:  # else it runs for all, whoever it drafts for
                    one -= float(self._prices.draft(m, n)[1] - self._prices.draft(m, 1)[1])
            new = not self._fixed and any(self._estimates.new(m, kind_beside(a)) for a in asks)
            found.append(Candidate(m, far, lags, one, every, reading, new))
        return found

    # --- what came of it ----------------------------------------------------------

    def emitted(self, slot: int, tokens: int) -> None:
        """So many tokens of a sequence."""
        if self._estimates.emitted(slot, tokens):
            self._ages()
        self._emitted[slot] = tokens

    def told(self, told: Told) -> None:
        """A proposal was judged, or the text has shown what would have become of it."""
        i = told.member
        state = self._state(told.slot, i)
        emitted = self._estimates.length(told.slot) + len(self._rested)
        self._judged.append((told, emitted, state))
        if told.accepted:
            self._vain = False
        if not self.members[i].instant:
            if i == self._now.member:
                self._missed = 0 if told.accepted else self._missed + 1
                if self._missed >= self._now.misses and self._held.now < self._parts:
                    self._goes_apart()
            if told.accepted == told.reached:
                before = self._behind[told.slot][1] if state != FAILED else 0
                self._passed[told.slot] = i, before + told.accepted + 1
                self._looks.drafted(told.accepted, self._round)
        else:
            self._looks.judged(i, told.accepted, self._round)
            repeats = told.accepted == told.reached >= REPEATS
            if repeats and not self._now.k and self._held.now < self._parts:
                self._goes_apart()

    def spent(self, picks: Sequence[Pick | None], spent: Spent) -> None:
        """What a round took; told after everything else about it."""
        plain = self._prices.plain(len(picks))
        saved = self._saved(plain) if any(picks) else plain
        phase, cold = self._phase(spent.rows), self._cold > 0 or spent.reading > spent.draft
        self._cold = max(0, self._cold - 1)
        if spent.once:
            self._follows(picks, spent, plain)
            return
        whole, thought = spent.seconds, spent.choosing
        self._rounds.append((picks, spent, whole, saved, phase, cold))
        self._held.passed(whole)
        if len(self._judged) + len(self._rounds) > _NEWS:
            self._learn()
        slow = spent.draft + spent.rest - _SLOW * self._now.takes
        seconds = whole - spent.reading - (slow if slow > 0 else 0.0)
        seconds = min(seconds, saved + ONCE * plain + thought)
        stride = self._stride
        stride.batch, stride.rounds = len(picks), stride.rounds + 1
        stride.seconds, stride.saved = stride.seconds + seconds, stride.saved + saved
        stride.thought += thought
        self._lost += seconds - thought - saved  # no thought makes up for thoughts
        surprised = self._now.k > 0 and self._surprised(saved)
        lost = self._has_lost(plain)
        if self._along and stride.rounds < _STRIDE and not (surprised or lost):
            return
        self._follows(picks, spent, plain)
        if plain and not self._fixed:
            looked = self._looked if self._probes.now is None else None
            if looked and looked.round == self._round and not looked.inside:
                looked.gaps.outside(saved, whole - spent.reading)
            self._count_up(any(picks) and self._probes.now is None)
            if (lost or self._purse.empty) and self._answered is not None:
                self._held.forget(self._answered)
            if surprised or lost or self._purse.empty:
                self._goes_apart()

    def _phase(self, rows: int) -> int:
        """A round was of so many rows; in which phase, as of `Times.add`."""
        if rows != self._rows:
            self._rows, self._alike = rows, 1
            return MOVED
        self._alike += 1
        return EARLY if self._alike <= SETTLES else SETTLED

    def _count_up(self, chose: bool = True) -> None:
        """Of the rounds since it was last done what they have lost and gained.

        Args:
            chose: whether drafts were thought to pay in them.
        """
        stride = self._stride
        if not stride.rounds:
            return
        self._stride = _Stride()
        rounds, saved, plain = stride.rounds, stride.saved, self._prices.plain(stride.batch)
        if not plain or self._fixed:
            return
        self._purse.spent(stride.seconds, saved, plain, chose, stride.thought, rounds, stride.batch)
        self._looks.thought = self._purse.thought
        if self._now.promised:
            promised, gained = rounds * self._now.promised, saved / plain - rounds
            self._promises.add(self._now.member, stride.batch, promised, gained)

    def _has_lost(self, plain: float) -> bool:
        """Whether what was chosen for a sequence alone has lost more than it may."""
        own = self._answered is not None and not self._answered.alike
        return own and self._lost > self._bears * plain

    def _follows(self, picks: Sequence[Pick | None], spent: Spent, plain: float) -> None:
        """What is still to be paid for this round, and how it bears on those behind it."""
        if any(picks):
            self._aftermath.drafted(self._probes.now is not None)
        else:
            self._aftermath.followed(spent.rest)
        if spent.reading and plain and not self._fixed:
            self._purse.read(spent.reading, plain)

    def _saved(self, plain: float) -> float:
        """Seconds of plain decoding that this round has saved. A sequence alone may go by what was
        chosen for another."""
        if len(self._emitted) == 1:
            return plain * sum(self._emitted.values())
        return self._worth.emitted(self._emitted) if self._worth else 0.0

    def _surprised(self, saved: float) -> bool:
        """Whether drafts are accepted as nobody expected, after one more round."""
        self._more, self._since = self._more + saved - self._now.saves, self._since + 1
        return abs(self._more) > _SURPRISE * self._now.varies * math.sqrt(self._since)

    def read(self, member: int, tokens: int, seconds: float) -> None:
        """A drafter has read what it lacked of a text."""
        self._prices.read(member, tokens, seconds)

    def _learn(self, over: int | None = None) -> None:
        """What was told since the last choice: rounds for which it was held did not wait.

        Args:
            over: a slot whose sequence has ended.
        """
        self._settle()
        judged, self._judged, rounds, self._rounds = self._judged, [], self._rounds, []
        for told, length, state in judged:
            self._estimates.add(told, length, state, over=told.slot == over)
            self._probes.told(told)
        alike: dict[tuple[Any, ...], list[Spent]] = {}
        for picks, spent, whole, saved, phase, cold in rounds:
            what = tuple(picks), phase, cold, spent.rows, *spent.looks
            alike.setdefault(what, []).append(spent)
            self._probes.spent(whole, saved, self._prices.plain(len(picks)), spent.reading)
        for (picks, phase, cold, *_), spents in alike.items():
            self._prices.add(picks, spents, phase, cold)

    # --- why ----------------------------------------------------------------------

    def report(self) -> Report:
        """What is chosen now, and what each drafter promises; of the rounds so far."""
        self._count_up()
        self._learn()
        n, prices = self._batch, self._prices
        plain = prices.plain(n)
        found = []
        for m, member in enumerate(self.members):
            alpha, tokens = self._estimates.overall(m)
            look = prices.look(m, n)
            seconds = prices.draft(m, n) + look + prices.rest(prices.rows(m), n, m)
            speedups = tokens * plain / np.maximum(seconds, 1e-9)
            k = int(speedups[1:].argmax()) + 1
            step = look if member.instant else float(prices.draft(m, n)[k]) / k
            speedup = float(speedups[k]) if alpha and plain else None
            rounds, fast = prices.rounds[m], member.instant
            found.append(Estimate(member.name, fast, k, speedup, tuple(alpha), step, rounds))
        choice = PLAIN if self._purse.empty else self._chosen
        m, k, passed, long = choice[:4]
        names = [self.members[i].name for i in ([m] if m >= 0 else self._instant)]
        share = self._probes.seconds / prices.seconds if prices.seconds else 0.0
        who = "+".join(names) if k and names else None
        why, count = self._reason(choice), self._probes.count
        return Report(who, why, k, passed, long, n, plain, tuple(found), count, share)

    def _reason(self, choice: Choice) -> str:
        """Why this is chosen, in a sentence."""
        if self._purse.empty:
            return "what drafts may lose is lost: nothing is tried until plain rounds paid for it"
        if choice.k:
            takes, saves = 1e3 * choice.takes, 1e3 * choice.saves
            return f"a round takes {takes:.2f} ms, plain decoding of as many tokens {saves:.2f} ms"
        if not any(self._prices.rounds):
            return "nothing was drafted yet"
        if choice.gap:
            return "look-ups find nothing at this point of the text, and are asked again soon"
        return "no draft promised to be faster as the text goes now"


def _state(passed: tuple[int, int] | None, member: int) -> int:
    """Of a text (`Outlook`), by whose draft was accepted as a whole in the round before, and how
    many tokens since one was refused."""
    if passed is None or passed[0] != member:
        return FAILED
    return LASTING if passed[1] >= LONG else PASSED


def _shorter(pick: Pick, k: int) -> Pick | None:
    return pick if k == pick.k else Pick(pick.member, k, pick.kind) if k else None
