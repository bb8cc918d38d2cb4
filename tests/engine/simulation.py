"""A controller at work on a made-up machine and text: no model runs, and no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.engine.control import (
    LATE,
    Along,
    Ask,
    Controller,
    Pick,
    Profile,
    Spent,
    Told,
    kind_of,
    late,
)
from outpace.engine.control.held import Choice

Alpha = Callable[[int, int], float]
"""α of a drafter at a token of the text and a depth."""

Waiting = list[list[tuple[int, int, int, int]]]
"""Of each sequence what was looked at: by whom, where, how much is right, how much there is."""


@dataclass
class Machine:
    """What things take, in milliseconds.

    Attributes:
        target: by rows of the pass, of all sequences.
        draft: of each drafter, a step for one sequence; `per` more for each further one.
        begin: of each drafter, what a draft takes beside its steps.
        look: of each drafter without a model.
        reading: of each drafter, per token it has to read.
        noise: relative standard deviation of what is measured; one measurement in 50 is three
            times as long.
        drift: relative standard deviation of the machine's pace, which wanders in some hundred
            rounds; true times are those of its mean pace.
        cold: the first time that something runs it takes so many times as long.
        slow: all takes so many times as long, by round.
        behind: the first rounds behind a prompt take so many times as long, whoever drafts.
        after: plain rounds that follow on one that drafted take so many times as long.
        begun: the share of the target's pass that has run when a model has drafted.
        nodes: of a draft, by how deep it is; a chain's are as many.
        settles: rounds of this K take so many times as long before there were four in a row.
    """

    target: Callable[[int], float]
    draft: Sequence[float]
    look: Sequence[float] = ()
    reading: Sequence[float] = ()
    begin: Sequence[float] = (0.0, 0.0)
    per: float = 0.05
    noise: float = 0.05
    drift: float = 0.0
    cold: float = 1.0
    slow: Callable[[int], float] = lambda round_: 1.0
    behind: Sequence[float] = ()
    after: Sequence[float] = ()
    begun: float = 0.0
    nodes: Callable[[int], int] = lambda depth: depth
    settles: Callable[[int], float] = lambda k: 1.0


@dataclass
class Run:
    """What became of a text, round by round: true milliseconds, tokens, and how many were to be
    expected of what was chosen, which luck has no part in."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    picks: list[list[Pick | None]] = field(default_factory=list)

    def add(
        self, seconds: float, tokens: int, expected: float, picks: Sequence[Pick | None]
    ) -> None:
        """A round."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.expected.append(expected)
        self.picks.append(list(picks))

    def pace(self, first: int = 0, last: int | None = None) -> float:
        """Milliseconds per token from one token of the text on to another."""
        at = np.cumsum([0, *self.tokens])
        inside = (at[:-1] >= first) & (at[:-1] < (at[-1] if last is None else last))
        return float(np.array(self.seconds)[inside].sum() / np.array(self.expected)[inside].sum())


class World:
    """Sequences that are generated together.

    Args:
        alphas: of each drafter, or of each sequence those of each drafter.
        offered: by token of the text how many a drafter without a model proposes, at most.

    Attributes:
        temperature: of the texts that follow.
    """

    def __init__(
        self,
        machine: Machine,
        members: Sequence[Profile],
        alphas: Sequence[Alpha] | Sequence[Sequence[Alpha]],
        *,
        batch: int = 1,
        prompt: int = 50,
        seed: int = 0,
        offered: Callable[[int], int] = lambda at: 1000,
    ) -> None:
        self.machine, self.members = machine, members
        each = [a for a in alphas if not callable(a)]
        self.alphas: Sequence[Sequence[Alpha]] = each or [alphas] * batch  # type: ignore[list-item]
        self.batch, self.prompt, self.offered = batch, prompt, offered
        self.temperature = 0.0
        self.rng = np.random.default_rng(seed)
        self._pace, self._rounds, self._quiet = 0.0, 0, len(machine.after)
        self._all = 0  # rounds, of all texts
        self._same = 0, 0  # the K of the last round, and how many those were
        self._ran = set[tuple[str, int]]()

    def measured(self, true: float, what: tuple[str, int] = ("", 0)) -> float:
        """What a clock says of it.

        Args:
            what: of which the first takes long.
        """
        slow = 3.0 if self.rng.random() < 0.02 else 1.0
        if what not in self._ran:
            slow = max(slow, self.machine.cold)
            self._ran.add(what)
        slow *= self.behind * self.machine.slow(self._all)
        noise = self.machine.noise * float(self.rng.standard_normal())
        return true * slow * math.exp(noise + self._pace)

    @property
    def after(self) -> float:
        """By which a plain round takes longer as one before it drafted."""
        return self.machine.after[self._quiet] if self._quiet < len(self.machine.after) else 1.0

    @property
    def behind(self) -> float:
        """By which this round takes longer as the prompt was read just before."""
        return self.machine.behind[self._rounds] if self._rounds < len(self.machine.behind) else 1.0

    def _early(self, k: int) -> float:
        """By which a round of this K takes longer as those before were of others."""
        before, rounds = self._same
        self._same = k, rounds + 1 if k == before else 1
        return self.machine.settles(k) if self._same[1] <= 4 else 1.0

    def drift(self) -> None:
        """A round later."""
        self._rounds, self._all = self._rounds + 1, self._all + 1
        away = self.machine.drift * float(self.rng.standard_normal())
        self._pace = 0.99 * self._pace + math.sqrt(1 - 0.99**2) * away

    def expected(self, b: int, member: int, at: int, k: int) -> float:
        """Tokens that a round of K is to emit."""
        alphas = [self.alphas[b][member](at, depth) for depth in range(k)]
        return 1 + float(np.cumprod(alphas).sum())

    def passed(self, b: int, member: int, at: int, k: int) -> int:
        """Tokens of a proposal of k for a sequence that are right."""
        for depth in range(k):
            if self.rng.random() >= self.alphas[b][member](at, depth):
                return depth
        return k

    def _lags(self, read: Mapping[int, int], at: int) -> dict[int, int]:
        """What those with a model have not read, if it is much, who have read so far."""
        models = [i for i, p in enumerate(self.members) if not p.instant]
        behind = {i: self.prompt + at - read.get(i, 0) for i in models}
        return {i: lag if lag > LATE else 0 for i, lag in behind.items()}

    def generate(self, controller: Controller, tokens: int, run: Run) -> None:
        """Sequences of so many tokens each."""
        m = self.machine
        text, self._rounds = [0] * self.batch, 0
        read = [dict[int, int]() for _ in text]
        waiting: Waiting = [[] for _ in text]
        along = None
        for slot in range(self.batch):
            controller.open(slot, self.temperature)
        while min(text) < tokens:
            self._compare(controller, waiting, text)
            if along is None and controller.rests(self.batch):
                took = []
                for _ in range(1 + controller.rests_on(any(waiting))):
                    if min(text) < tokens:
                        seconds = m.target(self.batch) * self.after
                        took.append(self.measured(seconds, ("rest", 1)))
                        text = [at + 1 for at in text]
                        run.add(seconds * self.behind, self.batch, self.batch, [None] * self.batch)
                        self._quiet += 1
                        self.drift()
                controller.rested(*took)
                continue
            budgets = [max(0, min(controller.most, tokens - at - 1)) for at in text]
            lags = [self._lags(read[b], at) for b, at in enumerate(text)]
            slots = list(range(self.batch))
            held: Sequence[Pick | None] | None
            if along is not None and not budgets[0]:
                controller.went(along)
                along = None
            if along is not None:
                held = [Pick(along.choice.member, min(along.k, budgets[0]))]
            elif not any(budgets):
                held = [None] * self.batch
                controller.sits_out()
            else:
                held = controller.again(slots, budgets, late(lags[0], tokens - text[0]))
            looks = {i: m.look[i] for i in controller.looks()} if held is None else {}
            asks = []
            found: list[dict[int, int]] = []
            for b, at in enumerate(text):
                depths = {i: min(self.members[i].most, self.offered(at)) for i in looks}
                found.append({i: self.passed(b, i, at, depth) for i, depth in depths.items()})
                offers = {i: range(depth + 1) for i, depth in depths.items()}
                waiting[b] += [(i, at, found[b][i], depth) for i, depth in depths.items() if depth]
                asks.append(Ask(b, budgets[b], max(0, tokens - at), offers, lags[b]))
            picks = controller.choose(asks) if held is None else held
            draft = reading = 0.0
            rows, emitted, expected = 1, 0, 0.0
            drafting = {p.member for p in picks if p and not self.members[p.member].instant}
            for i in drafting:
                lag = sum(lags[b][i] for b, p in enumerate(picks) if p and p.member == i)
                if lag:
                    reading += lag * m.reading[i]
                    controller.read(i, lag, self.measured(lag * m.reading[i]))
                k = max(p.k for p in picks if p and p.member == i)
                step = m.draft[i] * (1 + m.per * (self.batch - 1))
                draft += m.begin[i] + k * step
            for b, pick in enumerate(picks):
                accepted = 0
                expected += self.expected(b, pick.member, text[b], pick.k) if pick else 1
                if pick is not None:
                    rows = max(rows, m.nodes(pick.k) + 1)
                    instant = self.members[pick.member].instant
                    right = found[b].get(pick.member) if instant else None
                    if right is None:
                        right = self.passed(b, pick.member, text[b], pick.k)
                        read[b][pick.member] = self.prompt + text[b]
                    accepted = min(right, pick.k)
                text[b] += accepted + 1
                emitted += accepted + 1
                reached = accepted + (pick is not None and accepted < pick.k)
                if along is None:
                    controller.emitted(b, accepted + 1)
                if along is None and pick is not None and not self.members[pick.member].instant:
                    controller.told(Told(b, pick.member, pick.kind, reached, accepted))
            self._compare(controller, waiting, text)
            rest = m.target(rows * self.batch) * (1.0 if any(picks) else self.after)
            rest *= 1 - m.begun if drafting else 1
            early = self._early(max((p.k for p in picks if p), default=0))
            draft, rest = draft * early, rest * early
            self._quiet = 0 if any(picks) else self._quiet + 1
            spent = Spent(
                {i: self.measured(x) for i, x in looks.items()},
                self.measured(draft, ("draft", max((p.k for p in picks if p), default=0))),
                reading,
                self.measured(rest, ("rest", rows)),
                rows,
            )
            if along is None:
                controller.spent(picks, spent)
                along = self._goes_along(controller, any(waiting))
            elif not along.add(k, reached, accepted, emitted, spent.draft, spent.rest, rows):
                controller.went(along)
                along = self._goes_along(controller, any(waiting))
            seconds = sum(looks.values()) + draft + reading + rest
            run.add(seconds * self.behind, emitted, expected, picks)
            self.drift()
        if along is not None:
            controller.went(along)
        for slot in range(self.batch):
            controller.close(slot)

    @staticmethod
    def _compare(controller: Controller, waiting: Waiting, text: Sequence[int]) -> None:
        """What was looked at with the text that has followed."""
        for b, proposals in enumerate(waiting):
            for item in list(proposals):
                i, at, right, most = item
                if at + right < text[b]:
                    controller.told(Told(b, i, kind_of(most), right + (right < most), right))
                    proposals.remove(item)

    def _goes_along(self, controller: Controller, waiting: bool) -> Along | None:
        """Rounds that the controller is not asked about."""
        models = [m for m in self.members if not m.instant]
        return None if waiting or len(models) > 1 else controller.along()


def pace_of(world: World, member: int, k: int, first: int, last: int) -> float:
    """Milliseconds per token of a fixed K on a part of the text, once it is under way, where all
    sequences are as the first."""
    m, profile = world.machine, world.members[member]
    if k == 0:
        return m.target(world.batch) / world.batch
    emitted = np.mean([world.expected(0, member, at, k) for at in range(first, last, 8)])
    step = 1 + m.per * (world.batch - 1)
    seconds = m.look[member] if profile.instant else m.begin[member] + k * m.draft[member] * step
    seconds += m.target((m.nodes(k) + 1) * world.batch) * (1 if profile.instant else 1 - m.begun)
    return seconds / (world.batch * float(emitted))


def best_pace(world: World, first: int, last: int) -> tuple[float, int, int]:
    """The lowest of all drafters and K on a part of the text."""
    found = [
        (pace_of(world, i, k, first, last), i, k)
        for i, p in enumerate(world.members)
        for k in range(p.most + 1)
    ]
    return min(found)


MODEL, LOOK = Profile("model", False, 16, 0.1), Profile("n-gram", True, 16)


def target(rows: int) -> float:
    return 10 + 0.3 * rows


CHEAP = Machine(target, [1.0], reading=[0.02])


def steady(*alpha: float) -> Alpha:
    """α by depth, whatever the text; the last is that of all deeper ones."""
    return lambda at, depth: alpha[min(depth, len(alpha) - 1)]


def still(
    kind: type[Controller] = Controller,
    members: Sequence[Profile] = (MODEL,),
    fixed: int | None = None,
) -> Controller:
    """A controller for which choosing takes no time."""
    return kind(members, fixed, clock=lambda: 0.0)


def alike(member: int, k: int, *rivals: int) -> Choice:
    """The same K behind every draft."""
    return Choice(member, k, k, k, rivals=rivals)
