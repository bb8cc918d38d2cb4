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

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .estimates import Estimates, Key
from .held import PLAIN, Choice, Held
from .plan import Ask, Pick, Profile, Spent, Told, kind_of
from .prices import LEAST_TIMED, Prices, settled
from .probes import Candidate, Probes
from .purse import Purse
from .report import Estimate, Report
from .survival import FAILED, LASTING, LONG, PASSED, Floats, Lengths, Outlook, variance

_KEEP = 0.99
"""Of the best rate: the last choice is kept as long as it promises so much."""

_LEAVE_PLAIN = 1.02
"""By which drafting must beat plain decoding before it begins; going on it need not lose."""

_K_FIRST = 4
"""Tokens of the first draft. None is ever more than twice as long as the longest before it."""

_HORIZON = 64
"""Rounds, at most, over which the time to catch up is spread."""

_NEWS = 256
"""Of what was told, that waits for a choice."""

_SURPRISE = 4.0
"""Standard deviations that what was accepted since a choice may be from what was expected before
it is thought about anew."""

_LOST = 2
"""Plain rounds that may be lost since a choice, beside plain decoding, before that, too."""

_VARY, _NEIGHBOURS = 32, (1, -1, 2, -1)
"""Of so many rounds of a choice, one drafts so many tokens more, in turn: two, too, as the next K
may be dear and the one behind it cheap."""

_NEAR = 8, 0.1
"""Tokens by which two sequences may differ in what is left, and it is open who ends first; or so
much of it."""

_COMPARED = 8
"""Of so many rounds in which nobody drafts, one compares the text with what was proposed."""

_PAUSE = 4
"""A drafter whose looks cost more than they bring is looked at once in so many rounds at most."""

_LOOKS = 0.005
"""Of the time that such looks may take."""

_AFRESH = 32
"""Rounds of a new sequence, at most, in which nothing is tried because that did not pay before."""

_SETTLED = 16
"""Looks before that is judged."""

_SETTLE = 64
"""Rounds that are rested in, before they are counted."""

_BEHIND, _BEHIND_LASTS = 6, 8
"""Of these behind a round that drafted, that may take longer for it, as what it computed with has
driven what they need out of the processor's caches; and times over which the mean of that is
taken."""

_FAINT = 0.5
"""Plain rounds of it that do not count: noise is never less than nothing."""


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
    alone: Floats  # [K + 1]
    one: Floats  # [K + 1]

    @property
    def speeds(self) -> Floats:
        return _over(self.saved, self.seconds)

    @classmethod
    def alike(cls, member: int, saved: Floats, seconds: Floats, alone: Floats) -> Option:
        """The same K in all states."""
        ks = np.arange(len(saved))
        return cls(member, ks, ks, saved, seconds, alone, seconds)

    def lengths(self, k: int) -> tuple[int, int, int]:
        """By state."""
        return k, int(self.passed[k]), int(self.long[k])


_Like = tuple[Key, int, int]


class _Judged(NamedTuple):
    """What was told, how many tokens the sequence had emitted by then, and its state
    (`Outlook`)."""

    told: Told
    length: int
    state: int


class Controller:
    """Chooses for an engine.

    Args:
        fixed: the K of every round, where only the drafter is to be chosen.
        clock: tells the time in seconds, to know what choosing costs.

    Attributes:
        most: the longest K.
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
        self._fixed = fixed is not None
        self._ks = np.arange(self.most + 1)
        self._instant = [i for i, m in enumerate(self.members) if m.instant]
        self._estimates = Estimates(self.members, self.most)
        self._prices = Prices(self.members, self.most)
        self._probes, self._purse = Probes(), Purse()
        self._held = Held(clock)
        self._news: list[_Judged | tuple[Sequence[Pick | None], Spent, float]] = []
        self._worths: dict[int, float] = {}  # of a token of each sequence, in seconds
        self._lost = 0.0  # since the last choice, beside plain decoding
        self._more, self._since = 0.0, 0  # beside what was expected, and rounds since then
        # by slot: whose whole draft was accepted in this round, and tokens since one was refused
        self._passed: dict[int, tuple[int, int]] = {}
        self._behind: dict[int, tuple[int, int]] = {}  # and in the one before
        self._now = PLAIN  # what this round goes by
        self._earned = 0.0  # by tokens of this round
        self._round = self._resting = 0  # rounds so far, and until when nothing is worth trying
        self._rested: list[float] = []  # seconds of the rounds since then
        self._resters: dict[int, Key] = {}  # who runs in them
        self._drafted = 0  # rounds of a model that was chosen
        self._opened = self._vain = False  # a sequence, since the last choice; it was not worth it
        self._timing = False  # whether that is to time plain decoding
        self._probed: bool | None = None  # whether the last draft was a probe; None once counted
        self._tail: list[float] = []  # seconds of plain rounds between it and those
        self._aftermath = 0.0  # plain rounds that those behind it take longer, together
        self._keys: dict[int, Key] = {}
        self._prompts: dict[int, int] = {}  # tokens
        self._batch = 1
        self._asked = self.most  # the longest budget of those
        self._chosen = PLAIN
        self._plan: Sequence[Choice] = ()  # of a single sequence, by age
        self._plans: dict[_Like, tuple[float, Sequence[Choice]]] = {}  # until then, for new ones
        self._worth = [0.0] * len(self.members)  # of a look: by how much it raised the rate
        self._looked = [0] * len(self.members)
        self._last = [0] * len(self.members)  # rounds of the last looks
        self._early: set[int] = set()  # those that are looked at in this round as they are eager
        self._unaided = 1.0  # times plain decoding's pace, without looks
        self._passes = [0.0] * (self.most + 1)  # what look-ups that are taken cost, by K
        self._let_down: dict[int, tuple[int, int]] = {}  # until when nobody is eager, for how long
        self._right = [0.0] * len(self.members)  # running means of tokens that were right
        self._eager: set[int] = set()  # those without a model that were right when last judged

    # --- sequences ---------------------------------------------------------------

    def open(self, slot: int, key: Key, prompt: int = 0) -> None:
        """A sequence begins, whose prompt has so many tokens."""
        self._settle()  # rounds that it had no part in
        if self._resters.get(slot) != key:
            self._resting = 0
        elif not (self._purse.empty or self._vain):  # much of what was known then still is
            self._resting = min(self._resting, self._round + _AFRESH)
        self._keys[slot], self._prompts[slot], self._opened = key, prompt, True
        self._worths[slot] = self._prices.plain(1)
        self._passed.pop(slot, None)
        self._estimates.open(slot, key)
        self._let_down.clear()
        self._held.drop()

    def close(self, slot: int) -> None:
        self._learn()
        self._keys.pop(slot, None)
        self._prompts.pop(slot, None)
        self._worths.pop(slot, None)
        self._estimates.close(slot)

    # --- a round ------------------------------------------------------------------

    def rests(self, batch: int, waiting: bool) -> bool:
        """Begin a round, if nothing is to be tried in it: nobody is asked or told anything, but
        `rested` what it took.

        Args:
            waiting: whether proposals wait for the text to judge them.
        """
        if self._round + 1 < self._resting and batch == len(self._resters):
            news = self._eager or (waiting and (self._round + 1) % _COMPARED == 0)
            if news and not self._timing and not self._purse.empty:
                return False
        elif self._fixed or self._prices.plain_rounds() or settled(self._rested):
            return False
        else:
            self._resters = self._keys.copy()
        self._begin()
        return True

    def rested(self, seconds: float) -> None:
        """What a round took in which each sequence emitted a token."""
        self._rested.append(seconds)
        self._held.passed(seconds)
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
            self._estimates.emitted(slot, rounds)
        timing = self._timing or not self._prices.plain_rounds()
        self._prices.rested(n, self._rested, timing)
        self._probes.timed(self._round, n)
        plain, lost = self._prices.plain(n), 0.0
        if self._probed is not None:
            more = sum(min(s / plain, 2.0) - 1 for s in (self._tail + self._rested)[:_BEHIND])
            self._aftermath += (more - self._aftermath) / _BEHIND_LASTS
            lost = max(0.0, self._aftermath - _FAINT) * plain
        self._purse.spent(seconds, seconds - lost, plain)
        self._probes.spent(seconds, seconds, plain)
        if self._probed:
            self._probes.behind(lost)
        self._rested, self._timing, self._probed = [], False, None

    def again(
        self, slots: Sequence[int], budgets: Sequence[int], left: int = 0
    ) -> Sequence[Pick | None] | None:
        """Begin a round; the last choice, where it need not be thought about.

        Args:
            left: tokens that one of them may still emit.
        """
        self._begin()
        self._asked = max(budgets)
        self._settle()
        probed = self._probes.now is not None
        if probed:
            self._learn()
            if not self._probes.over():
                self._held.drop()  # it goes on
        if self._purse.empty:
            self._probes.now = None
            self._rest(slots)
            return [None] * len(slots)
        if any(i in self._eager or self._until_look(i) <= 0 for i in self._instant):
            return None
        alone = len(self._instant) == len(self.members)  # what they propose is all there is
        choice = PLAIN if alone else self._held.find(self._held.question(slots))
        if choice is None and self._opened and len(slots) == 1 and not alone:
            choice = self._planned(slots[0], left)
        if choice is None:
            return None
        drafts = choice.member >= 0 and choice.k
        if not (drafts or probed or alone) and self._round >= self._resting:
            self._held.drop()  # what was waited for may be tried
            return None
        if not drafts:
            self._now = choice
            self._rest(slots)
            return [None] * len(slots)
        m, k = choice.member, self._varied(slots, choice)
        return [Pick(m, min(k, budget)) if budget else None for budget in budgets]

    def _begin(self) -> None:
        """A round begins."""
        self._round += 1
        self._behind, self._passed = self._passed, {}

    def _varied(self, slots: Sequence[int], choice: Choice) -> int:
        """The K of a choice of a model, or its neighbour, so that it becomes known what that costs:
        from one row to the next that may go up or down by more than drafting further brings."""
        self._drafted += 1
        turn, rest = divmod(self._drafted, _VARY)
        self._now = choice
        k = choice.lengths[min(self._state(slot, choice.member) for slot in slots)]
        most = min(self.most, self.members[choice.member].most)
        if not rest and not self._fixed:
            more = min(_NEIGHBOURS[turn % len(_NEIGHBOURS)], k)  # not more than twice as many
            k, self._now = max(1, k + more), PLAIN
        return min(k, most)

    def _state(self, slot: int, member: int) -> int:
        """FAILED, PASSED or LASTING, by what became of a drafter's last drafts (`Outlook`)."""
        before, tokens = self._behind.get(slot, (-1, 0))
        if before != member:
            return FAILED
        return LASTING if tokens >= LONG else PASSED

    def sits_out(self) -> None:
        """Begin a round in which nobody may draft."""
        self._now, self._behind, self._passed = PLAIN, {}, {}
        if self._probes.now is not None:
            self._learn()
            self._probes.now = None

    def refused(self) -> None:
        """Who was chosen for this round has nothing to propose."""
        self._now = PLAIN
        self._held.drop()

    def looks(self) -> list[int]:
        """Drafters without a model that are worth looking at in this round."""
        eager, self._eager = self._eager, set()
        due = {i for i in self._instant if self._until_look(i) <= 0}
        self._early = eager - due
        for i in eager | due:
            self._last[i] = self._round
            if not self._chosen.k:
                self._probes.look(self._prices.look(i))
        return sorted(eager | due)

    def _until_look(self, i: int) -> int:
        """Rounds until it is looked at, even if nobody is eager to."""
        return self._last[i] + self._pause(i) - self._round

    def _pause(self, i: int) -> int:
        """In how many rounds it is looked at once."""
        if self._fixed or self._looked[i] < _SETTLED:
            return 1
        plain = self._prices.plain(self._batch)
        look = self._prices.look(i) + self._prices.compared(self._batch)
        if self._worth[i] * plain > look:
            return 1
        rare = max(_PAUSE, int(self._prices.look(i, late=True) / (_LOOKS * plain)))
        # instead of plain decoding it is worth more, and gains pay for it
        return rare if self._chosen.k or not self._probes.gains else min(rare, 2 * _PAUSE)

    def choose(self, asks: Sequence[Ask], crowded: bool = False) -> Sequence[Pick | None]:
        """Who drafts for each sequence; None is plain decoding.

        Args:
            crowded: whether others wait until one of them ends.
        """
        question = self._held.question([a.slot for a in asks], asks)
        choice = self._held.find(question)
        if choice is None:
            began, opened = self._held.begin(), self._opened
            self._learn()
            choice, tried = self._choose(asks, crowded)
            self._held.keep(question, choice, began)
            if self._plan and opened:
                self._plans[self._like(asks[0].slot, asks[0].left)] = self._held.until, self._plan
        else:
            tried = False
        self._now = choice
        if tried:
            self._now, picks = PLAIN, self._trial(asks)
        else:
            model = choice.member >= 0 and choice.k
            k = self._varied([a.slot for a in asks], choice) if model else choice.k
            picks = self._assign(asks, choice.member, k)
            self._count_looks({i for a in asks for i in a.offers}, choice.gain)
            if not any(picks):
                self._rest([a.slot for a in asks])
        return [self._cut(pick, ask) for pick, ask in zip(picks, asks, strict=True)]

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

    def _choose(self, asks: Sequence[Ask], crowded: bool) -> tuple[Choice, bool]:
        """The choice, and whether something else is to be tried in this round."""
        self._batch = n = len(asks)
        self._resting, self._timing = 0, False
        if not self._asked:
            return PLAIN, False
        each = self._value(asks, crowded)
        if self._instant:
            self._passes = self._prices.rest(np.arange(1.0, self.most + 2), n).tolist()
        tokens, rows = self._instants(asks)
        looked = any(a.offers for a in asks)
        if looked:
            seconds = self._prices.rest(rows, n)
        else:
            seconds = np.full(self.most + 1, self._prices.plain(n))
        whole = each.sum()
        unaided = np.where(self._ks == 0, whole, 0.0)
        options = [Option.alike(-1, whole + each @ (tokens - 1), seconds, unaided)]
        for m, profile in enumerate(self.members):
            if not profile.instant:
                options.append(self._option(m, asks, each, tokens, rows))
        self._unaided = max(float(_over(o.alone, o.seconds).max()) for o in options)
        plain = float(seconds[0])
        if looked:
            seconds[0] += self._prices.compared(n)  # what is not taken is compared with the text
        best, k = self._best(options, bool((tokens > 1).any()))
        member, speed = best.member, float(best.speeds[k])
        gain = 0.0
        if looked and k:
            slower = self._unaided * max(plain, 1e-9)
            gain = max(0.0, float(best.saved[k] - self._unaided * best.seconds[k]) / slower)
        tried = self._try(asks, options, member, k, speed)
        choice = Choice(member, *best.lengths(k), gain, *self._expected(asks, each, best, k))
        self._take(choice)
        if n > 1 or not self._opened:
            self._plan = ()
        elif k and member >= 0:
            self._plan = self._look_ahead(asks[0], choice, plain)
        if self._opened:
            self._vain = not k
        self._opened = False
        return choice, tried

    def _look_ahead(self, ask: Ask, choice: Choice, plain: float) -> Sequence[Choice]:
        """How far the drafter of a sequence that begins is expected to go when it is older."""
        m, plan = choice.member, list[Choice]()
        for age in range(self._estimates.age(ask.slot)):
            outlook = self._estimates.ahead(ask.slot, m, _kind(ask), age)
            option = self._single(m, ask, outlook, plain)
            k = int(option.speeds.argmax())
            lengths, saves = option.lengths(k), float(option.saved[k])
            varies = plain * math.sqrt(outlook.variance(*lengths))
            plan.append(Choice(m, *lengths, 0.0, saves, varies))
        return [*plan, choice]

    def _like(self, slot: int, left: int) -> _Like:
        """What sequences are like one that begins."""
        return self._keys[slot], self._prompts[slot].bit_length(), left.bit_length()

    def _planned(self, slot: int, left: int) -> Choice | None:
        """What was chosen for a sequence that began a short time ago."""
        until, plan = self._plans.get(self._like(slot, left), (0.0, ()))
        if self._held.now >= until:
            return None
        self._opened, self._vain, self._plan = False, False, plan
        self._held.adopt([slot], plan[-1])
        self._take(plan[-1])
        return plan[-1]

    def _single(self, m: int, ask: Ask, outlook: Outlook, plain: float) -> Option:
        """A drafter with a model for a single sequence. What its draft costs is found out step by
        step."""
        prices = self._prices
        lag = ask.lags.get(m, 0)
        most = min(ask.budget, self.members[m].most) if lag is not None else 0
        if not self._fixed:
            most = min(most, self._reach(m, 1))
        seconds = prices.draft(m, 1, hoped=True) + prices.rest(prices.rows(m), 1, m)
        if lag:
            rounds = np.clip(ask.left / outlook.tokens, 1, _HORIZON)
            seconds = seconds + lag * prices.reading[m].value / rounds
        if self._fixed:
            saved = plain * outlook.tokens[np.minimum(self._ks, most)]
            return Option.alike(m, saved, seconds, saved)
        kept = self._chosen.lengths if self._chosen.member == m else (0, 0, 0)
        policy = outlook.policy(seconds, most, kept, _KEEP)
        saved = plain * policy.tokens
        return Option(m, policy.passed, policy.long, saved, policy.seconds, saved, seconds)

    def _reach(self, m: int, n: int) -> int:
        """How far a drafter may go: at most twice as far as before."""
        return max(2 * self._prices.longest(m, n), _K_FIRST // n, 1)

    def _take(self, choice: Choice) -> None:
        """This is the last choice from now on."""
        self._chosen, self._lost, self._more, self._since = choice, 0.0, 0.0, 0

    def _trial(self, asks: Sequence[Ask]) -> list[Pick | None]:
        """The picks of a probe, or of plain decoding that is to be timed."""
        picks: list[Pick | None] = [None] * len(asks)
        probe = self._probes.now
        if probe is not None:
            for b in probe.sequences:
                wanted = self.most if self._fixed else probe.k
                length = min(wanted, asks[b].budget, self.members[probe.member].most)
                picks[b] = Pick(probe.member, length, _kind(asks[b]))
        return picks

    def _expected(
        self, asks: Sequence[Ask], each: Floats, best: Option, k: int
    ) -> tuple[float, float]:
        """The seconds of plain decoding that a round of this choice saves, and how much that
        varies: their standard deviation."""
        saves = float(best.saved[k])
        if not k:
            return saves, 0.0
        if best.member >= 0:
            outlooks = [self._estimates.outlook(a.slot, best.member, _kind(a)) for a in asks]
            varies = [outlook.variance(*best.lengths(k)) for outlook in outlooks]
        else:
            varies = [variance(self._best_offer(a, k)[1], k) for a in asks]
        each = each * np.sqrt(varies)
        return saves, math.sqrt(each @ each)

    def _assign(self, asks: Sequence[Ask], member: int, k: int) -> list[Pick | None]:
        """Who drafts for each sequence: the model that was chosen, or who promises more without
        one. Of a single sequence's both have been compared."""
        if not k:
            return [None] * len(asks)
        picks: list[Pick | None] = []
        for ask in asks:
            pick, best = None, 1.0
            if member >= 0 and ask.lags.get(member, 0) is not None:
                pick = Pick(member, min(k, self.members[member].most), _kind(ask))
                best = float(self._estimates.tokens(ask.slot, member, pick.kind)[pick.k])
            offers = [i for i, counts in ask.offers.items() if len(counts) > 1]
            if member < 0 and len(offers) == 1 and not self.members[offers[0]].whole:
                pick = Pick(offers[0], k)
            elif offers and (member < 0 or len(asks) > 1):
                i, gains = self._best_offer(ask, k)
                if gains[k] > best:
                    pick = Pick(i, k)
            picks.append(pick)
        return picks

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
        return np.where(self._ks < depth, 1.0, gains) if self.members[i].whole else gains

    def _rest(self, slots: Sequence[int]) -> None:
        """Until there is credit for a probe, or it is time for a look. If choosing takes long
        beside a round, some rounds more."""
        if self._fixed:
            return
        plain = self._prices.plain(len(slots))
        if self._purse.empty:
            self._pause_for(slots, self._purse.rounds(plain))
            return
        rounds = self._probes.rest(self._round, plain)
        due = [max(0, self._until_look(i) - 1) for i in self._instant]
        if self._asked < self.most:  # other sequences follow of whom more can be asked
            rounds = min(rounds, self._asked)
        self._pause_for(slots, min([rounds, *due]))

    def _pause_for(self, slots: Sequence[int], rounds: int) -> None:
        """Rest in so many rounds."""
        self._resting = self._round + rounds + 1
        self._resters = {slot: self._keys[slot] for slot in slots}

    def _value(self, asks: Sequence[Ask], crowded: bool) -> Floats:
        """What a token of each sequence is worth: `[B]` seconds of plain decoding.

        Those that go on for longest keep the others company, who cost little more: the time to the
        end is theirs. So a token of theirs is worth a round of a sequence alone. How long a
        sequence goes on is not known, only how long it may, and if others wait for its place,
        all are worth the same.
        """
        n = len(asks)
        plain = self._prices.plain(n) or 1.0
        if n == 1:
            self._worths[asks[0].slot] = plain
            return np.array([plain])
        each = np.full(n, plain / n)
        if not crowded:
            left = np.array([float(a.left) for a in asks])
            last = np.exp((left - left.max()) / max(_NEAR[0], _NEAR[1] * float(left.max())))
            more = max(0.0, plain - self._prices.plain(1)) / (n - 1)
            each = more + (plain - n * more) * last / last.sum()
        self._worths.update((a.slot, float(w)) for a, w in zip(asks, each, strict=True))
        return each

    def _instants(self, asks: Sequence[Ask]) -> tuple[Floats, Floats]:
        """Of drafters without a model, for every sequence and K: tokens; and rows."""
        tokens, nodes = np.ones((len(asks), self.most + 1)), np.zeros(self.most + 1)
        for b, ask in enumerate(asks):
            for i, counts in ask.offers.items():
                depth = min(len(counts) - 1, ask.budget)
                if depth:
                    tokens[b] = np.maximum(tokens[b], self._of_offer(ask, i, counts))
                    nodes = np.maximum(nodes, np.asarray(counts)[np.minimum(self._ks, depth)])
        return tokens, nodes + 1

    def _option(
        self, m: int, asks: Sequence[Ask], each: Floats, instants: Floats, rows: Floats
    ) -> Option:
        """A drafter with a model, beside those without one."""
        n, prices = len(asks), self._prices
        if n == 1:
            (ask,) = asks
            outlook = self._estimates.outlook(ask.slot, m, _kind(ask))
            return self._single(m, ask, outlook, float(each[0]))
        tokens = np.ones_like(instants)
        late = 0
        for b, ask in enumerate(asks):
            lag = ask.lags.get(m, 0)
            if ask.budget and lag is not None:
                at = np.minimum(self._ks, min(ask.budget, self.members[m].most))
                tokens[b] = self._estimates.tokens(ask.slot, m, _kind(ask))[at]
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

    def _best(self, options: Sequence[Option], offered: bool) -> tuple[Option, int]:
        """The fastest, and its K; the last choice, if it is nearly as fast."""
        if self._fixed:
            k = self.most
            usable = [o for o in options if o.member >= 0 or offered] or list(options)
            return max(usable, key=lambda o: float(o.speeds[k])), k
        speeds = [o.speeds for o in options]
        at = max(range(len(options)), key=lambda i: float(speeds[i].max()))
        k = int(speeds[at].argmax())
        kept, length = self._chosen[:2]
        i = next(i for i, o in enumerate(options) if o.member == kept)
        if speeds[i][length] >= _KEEP * speeds[at][k]:
            at, k = i, length
        needed = speeds[0][0] * (1.0 if length else _LEAVE_PLAIN)
        return (options[at], k) if k and speeds[at][k] >= needed else (options[0], 0)

    def _try(
        self, asks: Sequence[Ask], options: Sequence[Option], member: int, k: int, speed: float
    ) -> bool:
        """Whether to try something instead of the best choice, as there is time for it."""
        n = len(asks)
        plain = float(options[0].alone[0])
        lost = (1 + LEAST_TIMED) * (float(options[0].seconds[0]) - plain / speed)
        if k and not self._fixed and self._probes.time_plain(self._round, n, lost, plain):
            self._pause_for([a.slot for a in asks], LEAST_TIMED)
            self._timing, self._probes.now = True, None
            return True
        found = []
        for option in options[1:]:
            m = option.member
            if m == member:
                continue
            all_pass = _over((1 + np.minimum(self._ks, self._asked)) * plain, option.one)
            if all_pass.max() <= _LEAVE_PLAIN * speed:
                continue  # not even if all were accepted
            lags = [a.lags.get(m, 0) if a.budget else None for a in asks]
            if all(lag is None for lag in lags):
                continue  # there is no sequence that it could draft for
            reading, far = self._prices.reading[m].value, 1
            if n == 1:  # as far as it would draft were it chosen, if that promises to lose less
                losses = option.seconds[1:] - option.saved[1:] / speed
                far = int(losses.argmin()) + 1
                one = every = float(losses[far - 1])
            else:
                every = float(option.seconds[1]) - plain / speed
                one = every - float(self._prices.draft(m, n)[1] - self._prices.draft(m, 1)[1])
            new = not self._fixed and any(self._estimates.new(m, _kind(a)) for a in asks)
            found.append(Candidate(m, far, lags, one, every, reading, new))
        return self._probes.choose(self._round, found, speed) is not None

    def _count_looks(self, looked: set[int], gain: float) -> None:
        """By how much looks at these have raised the best rate."""
        for i in looked:
            self._looked[i] += 1
            if gain and gain * self._prices.plain(self._batch) >= self._prices.look(i):
                self._let_down.pop(i, None)
            elif i in self._early:
                rounds = 2 * self._let_down.get(i, (0, 1))[1]
                self._let_down[i] = self._round + rounds, rounds
            slow = 4 if gain > self._worth[i] else _SETTLED  # what pays again is soon noticed
            self._worth[i] += (gain - self._worth[i]) * max(1 / slow, 1 / self._looked[i])

    # --- what came of it ----------------------------------------------------------

    def emitted(self, slot: int, tokens: int) -> None:
        """So many tokens of a sequence."""
        if self._estimates.emitted(slot, tokens) and self._batch == 1:
            age = self._estimates.age(slot)
            self._turn_to(slot, self._plan[age] if self._plan else None)
        self._earned += tokens * self._worths.get(slot, 0.0)

    def _turn_to(self, slot: int, choice: Choice | None) -> None:
        """What was to be expected of a sequence so old, as long as it has gone as expected."""
        if choice is None:
            self._held.drop()
        elif not choice.like(self._chosen):
            self._held.exchange([slot], choice)
            self._take(choice)

    def told(self, told: Told) -> None:
        """A proposal was judged, or the text has shown what would have become of it."""
        i = told.member
        state = self._state(told.slot, i)
        self._news.append(_Judged(told, self._estimates.length(told.slot), state))
        if told.accepted:
            self._vain = False
        if not self.members[i].instant:
            if told.accepted == told.reached:
                before = self._behind[told.slot][1] if state != FAILED else 0
                self._passed[told.slot] = i, before + told.accepted + 1
            if told.accepted == told.reached >= _PAUSE:  # a text that repeats itself, perhaps
                self._eager.update(j for j in self._instant if self._hopeful(j))
        elif self._hopeful(i) and self._pays(i, told.accepted):
            self._eager.add(i)

    def _hopeful(self, i: int) -> bool:
        """Whether somebody may be eager to look: who looked in vain waits for two rounds, and then
        for twice as many as before."""
        return self._round >= self._let_down.get(i, (0, 0))[0]

    def _pays(self, i: int, accepted: int) -> bool:
        """Whether it seems to pay to look at a drafter again and to take what it proposes, rather
        than to do without."""
        n, right = self._batch, self._right
        right[i] += (accepted - right[i]) / (2 * n)
        if accepted < _PAUSE:
            return False
        seconds = self._prices.look(i) + self._passes[min(round(right[i]), self.most)]
        return (right[i] + 1) * self._prices.plain(n) > self._unaided * seconds

    def spent(self, picks: Sequence[Pick | None], spent: Spent) -> None:
        """What a round took; told after everything else about it."""
        plain = self._prices.plain(len(picks))
        saved, self._earned = self._earned if any(picks) else plain, 0.0
        self._news.append((picks, spent, saved))
        self._held.passed(spent.seconds)
        if len(self._news) > _NEWS:
            self._learn()
        if any(picks):
            self._probed, self._tail = self._probes.now is not None, []
        elif len(self._tail) < _BEHIND:
            self._tail.append(spent.rest)
        if plain and not self._fixed:
            seconds = spent.seconds - spent.reading
            self._purse.read(spent.reading, plain)
            self._purse.spent(seconds, saved, plain)
            self._lost += seconds - saved
            if self._purse.empty or self._lost > _LOST * plain or self._surprised(saved):
                self._held.drop()

    def _surprised(self, saved: float) -> bool:
        """Whether drafts are accepted as nobody expected, after one more round."""
        if not self._now.k:
            return False
        self._more, self._since = self._more + saved - self._now.saves, self._since + 1
        return abs(self._more) > _SURPRISE * self._now.varies * math.sqrt(self._since)

    def read(self, member: int, tokens: int, seconds: float) -> None:
        """A drafter has read what it lacked of a text."""
        self._prices.read(member, tokens, seconds)

    def _learn(self) -> None:
        """What was told since the last choice: rounds for which it was held did not wait."""
        self._settle()
        news, self._news = self._news, []
        rounds = []
        for item in news:
            if isinstance(item, _Judged):
                self._estimates.add(*item)
                self._probes.told(item.told)
                continue
            picks, spent, saved = item
            rounds.append((picks, spent))
            self._probes.spent(spent.seconds, saved, self._prices.plain(len(picks)))
        for _, some in itertools.groupby(rounds, lambda r: (*r[0], r[1].rows, *r[1].looks)):
            alike = list(some)
            self._prices.add(alike[0][0], [spent for _, spent in alike])

    # --- why ----------------------------------------------------------------------

    def report(self) -> Report:
        """What is chosen now, and what each drafter promises; of the rounds so far."""
        self._learn()
        n, prices = self._batch, self._prices
        plain = prices.plain(n)
        found = []
        for m, member in enumerate(self.members):
            alpha, tokens = self._estimates.overall(m)
            seconds = prices.draft(m, n) + prices.look(m) + prices.rest(prices.rows(m), n, m)
            speedups = tokens * plain / np.maximum(seconds, 1e-9)
            k = int(speedups[1:].argmax()) + 1
            step = prices.look(m) if member.instant else float(prices.draft(m, n)[k]) / k
            speedup = float(speedups[k]) if alpha and plain else None
            rounds, fast = prices.rounds[m], member.instant
            found.append(Estimate(member.name, fast, k, speedup, tuple(alpha), step, rounds))
        m, k, passed, long = self._chosen[:4]
        names = [self.members[i].name for i in ([m] if m >= 0 else self._instant)]
        share = self._probes.seconds / prices.seconds if prices.seconds else 0.0
        who = "+".join(names) if k and names else None
        return Report(who, k, passed, long, n, plain, tuple(found), self._probes.count, share)


def _over(saved: Floats, seconds: Floats) -> Floats:
    found: Floats = saved / np.maximum(seconds, 1e-9)
    return found


def _shorter(pick: Pick, k: int) -> Pick | None:
    return pick if k == pick.k else Pick(pick.member, k, pick.kind) if k else None


def _kind(ask: Ask) -> int:
    """Of a draft by a model: where others propose much, it is right more often, too."""
    longest = max((len(counts) - 1 for counts in ask.offers.values()), default=0)
    return kind_of(longest)
