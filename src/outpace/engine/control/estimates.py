"""What rounds are expected to emit: estimates of α for every drafter, sequence and kind of round.

Kinds are told apart by how much was proposed: where a drafter finds a long match, it is right
more often, and so is a model. What is known of a drafter in all rounds stands in for a kind that
is new, and for a sequence that is, what is known of all sequences when they were as young. Rounds
of a model are told apart by how much has been accepted before them, see `Outlook`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .plan import Profile, Told
from .survival import FAILED, LASTING, PASSED, STATES, Floats, Likeness, Outlook, Survival

_OWN, _OTHERS = 96.0, 2048.0
"""Tokens after which evidence of a sequence itself, and of all, has faded to 1/e."""

_OF_KINDS = 4.0, 24.0
"""Rounds of a kind that outweigh what is known of all kinds: of a drafter without a model, for
which all depends on the match that it found, and of one with a model. Where others draft, that one
is seen in the few rounds in which it is probed, and what a few bad ones say would keep it out."""

_OF_SOME = 24.0
"""Rounds of an age, the same, and of these in a state (`Outlook`)."""

_ROUNDS = 128.0
"""Judged proposals after which what they show of how alike a sequence's rounds are has faded."""

_KNOWN = 16
"""Rounds of a kind after which a drafter is no longer new to it."""

_AGES = 32, 4
"""Tokens that are a sequence's beginning, and its very beginning. Later texts repeat themselves
more, and what answers a prompt is the hardest to draft."""

_CHANGED, _TIRED = math.log(1e-3), math.log(1e-4)
"""A streak of rounds that accept nothing, or all, that is less likely by what was believed shows
that the text is another one now: what it showed before is forgotten. The second is of a drafter
with a model that is refused: it is judged in nearly all rounds, and rounds of a hard stretch are
alike, so that chance has more to choose from."""

_AWARE = 2.0
"""Rounds that outweigh what others have shown from then on."""

_FRESH = 16
"""Judged proposals of a drafter before what all sequences show of it is looked up anew, at most: as
many as there were before."""

_SHOWN_IN = PASSED, FAILED, PASSED
"""By state the one whose evidence of a sequence it begins with."""

Key = float
"""What acceptance follows from beside the text: the temperature, see `key_of`."""

_LEAST = 0.01
"""Nothing is believed to be less likely, or more than the rest."""

_STEP, _HOTTEST = 0.05, 4.0
"""Temperatures that are told apart, and from where on they are not."""

_Like = tuple[int, int]
"""Rounds of a kind, of sequences of an age (`_age`)."""


def key_of(temperature: float) -> Key:
    """A temperature's: they are few, whatever requests ask for."""
    if not temperature:
        return 0.0
    return max(1, round(min(temperature, _HOTTEST) / _STEP)) * _STEP


def _age(tokens: int) -> int:
    """Of a sequence of so many tokens: 0, 1 at its beginning, 2 at its very beginning."""
    first, very_first = _AGES
    return 0 if tokens >= first else 1 if tokens >= very_first else 2


def _odds(alpha: Sequence[float]) -> Floats:
    """Their logarithms."""
    found = np.array(alpha)
    odds: Floats = np.log(found / (1 - found))
    return odds


def _anew(states: int, depths: int, memory: float) -> tuple[Survival, ...]:
    return tuple(Survival(depths, memory) for _ in range(states))


@dataclass(slots=True)
class _Table:
    """Evidence, and the text there was when it was last added to.

    Attributes:
        states: of rounds in each state (`Outlook`), or of all where nobody is told of states; and
            the text that each of them knows of.
        believed: what was last expected.
        streak: rounds that accepted nothing, or all, of late, and in which state; `odds` the
            logarithm of their likelihood.
        changed: whether one was too unlikely.
    """

    states: tuple[Survival, ...]
    text: int
    known: list[int] = field(default_factory=lambda: [0] * STATES)
    believed: Outlook | None = None
    streak: list[tuple[Told, int]] = field(default_factory=list)
    odds: float = 0.0
    changed: bool = False

    @classmethod
    def new(cls, profile: Profile, memory: float, text: int) -> _Table:
        states = 1 if profile.instant else STATES
        return cls(_anew(states, profile.most, memory), text, [text] * states)

    def add(self, told: Told, text: int, state: int) -> None:
        self.text = text
        self.faded(state).add(told.reached, told.accepted)

    def faded(self, state: int) -> Survival:
        """Evidence of this state, as old as it is by now."""
        found = self.states[state]
        found.pass_by(self.text - self.known[state])
        self.known[state] = self.text
        return found

    @property
    def apart(self) -> list[Survival]:
        """Evidence of every state."""
        return [self.faded(state) for state in range(len(self.states))]

    def alphas(self, priors: Sequence[Sequence[float]], trust: float) -> list[list[float]]:
        """α of a sequence, apart. In which it does better than others in one state, it is expected
        to in the others (`_SHOWN_IN`)."""
        apart = self.apart
        if len(apart) == 1:
            return [apart[0].alpha(priors[0], trust)]
        judged = zip(apart[:LASTING], priors[:LASTING], strict=True)
        shown = [survival.alpha(prior, trust) for survival, prior in judged]
        found = []
        for survival, prior, other in zip(apart, priors, _SHOWN_IN, strict=True):
            if not apart[other].empty:
                odds = _odds(prior) + _odds(shown[other]) - _odds(priors[other])
                prior = (1 / (1 + np.exp(-odds))).tolist()
            found.append(survival.alpha(prior, trust))
        return found

    def watch(self, told: Told, state: int) -> None:
        """Begin anew with a streak of a sequence's own rounds that was not to be expected."""
        nothing, everything = not told.accepted, told.accepted == told.reached
        goes_on = (
            self.streak and nothing != everything and nothing != bool(self.streak[0][0].accepted)
        )
        if not goes_on:
            self.streak, self.odds = [], 0.0
        if self.believed is None or nothing == everything:
            return
        gains = self.believed.apart[state]
        deepest = min(max(told.accepted, 1), len(gains) - 1)
        reaches = float(gains[deepest] - gains[deepest - 1])
        self.odds += math.log(max(1 - reaches if nothing else reaches, _LEAST))
        self.streak.append((told, state))
        if self.odds < (_TIRED if nothing and len(self.states) > 1 else _CHANGED):
            self.changed = True
            self.states = _anew(len(self.states), self.states[0].depths, _OWN)
            for one, after in self.streak:
                self.faded(after).add(one.reached, one.accepted)
            self.streak, self.odds, self.believed = [], 0.0, None


@dataclass(slots=True)
class _Open:
    """A sequence: its tokens, whether it is taken for one like all others, what was accepted last
    and its evidence, by member and kind, and what follows from it."""

    key: Key
    tokens: int = 0
    alike: bool = True
    last: dict[tuple[int, int], int] = field(default_factory=dict)
    own: dict[tuple[int, int], _Table] = field(default_factory=dict)
    outlooks: dict[tuple[int, int], Outlook] = field(default_factory=dict)

    @property
    def age(self) -> int:
        return _age(self.tokens)


class Estimates:
    """Estimates for all open sequences.

    Args:
        most: the longest K that is asked about.
    """

    def __init__(self, members: Sequence[Profile], most: int) -> None:
        self._members, self._most = members, most
        self._open: dict[int, _Open] = {}
        self._shared: dict[tuple[Key, int], dict[_Like, _Table]] = {}  # by member
        self._priors: dict[tuple[Key, int, int, int], tuple[int, list[list[float]]]] = {}
        self._alike: dict[tuple[Key, int, int], Likeness] = {}  # by member and kind
        self._judged: dict[tuple[int, int], int] = {}  # rounds, the same
        self._text = 0  # tokens emitted
        self._told: dict[tuple[Key, int], int] = {}  # proposals judged, by member

    def open(self, slot: int, key: Key) -> None:
        self._open[slot] = _Open(key)

    def close(self, slot: int) -> None:
        self._open.pop(slot, None)

    def emitted(self, slot: int, tokens: int) -> bool:
        """So many tokens of a sequence; whether its age is another one now."""
        if (open_ := self._open.get(slot)) is None:
            return False
        before, open_.tokens = open_.tokens, open_.tokens + tokens
        self._text += tokens
        aged = before < _AGES[0] and _age(before) != open_.age
        if aged:
            open_.outlooks.clear()
        return aged

    def age(self, slot: int) -> int:
        """Of a sequence: 0, or more the nearer it is to its beginning."""
        return self._open[slot].age

    def young(self, slot: int) -> float:
        """Tokens before a sequence is older than it is; infinite where it never will be."""
        tokens = self._open[slot].tokens
        return min((age - tokens for age in _AGES if age > tokens), default=math.inf)

    def alike(self, slot: int) -> bool:
        """Whether a sequence is taken for one like all others, whatever it has shown."""
        return self._open[slot].alike

    def part(self, slot: int) -> None:
        """What a sequence has shown itself counts from now on."""
        open_ = self._open[slot]
        if open_.alike:
            open_.alike = False
            open_.outlooks.clear()

    def misses(self, slot: int, member: int, kind: int) -> float:
        """After how many rounds in a row that accept nothing a text is another one now."""
        passes = float(self.outlook(slot, member, kind).apart[FAILED][1]) - 1
        return _TIRED / math.log(min(max(1 - passes, _LEAST), 1 - _LEAST))

    def length(self, slot: int) -> int:
        """Tokens that a sequence has emitted."""
        open_ = self._open.get(slot)
        return 0 if open_ is None else open_.tokens

    def add(
        self, told: Told, length: int | None = None, state: int = FAILED, over: bool = False
    ) -> None:
        """A proposal was judged.

        Args:
            length: tokens that its sequence had emitted by then; by default it is told at once.
            state: of the text, see `Outlook`.
            over: whether the sequence has ended, so that nothing follows for itself.
        """
        open_ = self._open.get(told.slot)
        if open_ is None:
            return
        length = open_.tokens if length is None else length
        which, key = (told.member, told.kind), (open_.key, told.member)
        before = open_.last.get(which)
        if before is not None:
            self._likeness(open_.key, *which).add(before, told.accepted)
        open_.last[which] = told.accepted
        if not over:
            self._show(open_, told, length, state)
        self._judged[which] = self._judged.get(which, 0) + 1
        tables = self._shared.setdefault(key, {})
        table = tables.get(like := (told.kind, _age(length - told.accepted - 1)))
        if table is None:
            profile = self._members[told.member]
            table = tables[like] = _Table.new(profile, _OTHERS, self._text)
        table.add(told, self._text, state)
        self._told[key] = self._told.get(key, 0) + 1

    def _likeness(self, key: Key, member: int, kind: int) -> Likeness:
        """Of a sequence's rounds, at one temperature."""
        found = self._alike.get(which := (key, member, kind))
        if found is None:
            found = self._alike[which] = Likeness(_ROUNDS)
        return found

    def _show(self, open_: _Open, told: Told, length: int, state: int) -> None:
        """What a sequence shows itself."""
        which = told.member, told.kind
        own = open_.own.get(which)
        if own is None:
            own = open_.own[which] = _Table.new(self._members[told.member], _OWN, length)
        own.add(told, length, state)
        if own.believed is None and open_.alike and not told.accepted:
            # it was drafted for by what others have shown
            alphas = self._prior(open_.key, *which, open_.age)
            alphas = own.alphas(alphas, _AWARE) if own.changed else alphas
            own.believed = Outlook.of(alphas, self._most)
        own.watch(told, state)
        open_.outlooks.pop(which, None)

    def new(self, member: int, kind: int) -> bool:
        """Whether a drafter has hardly been tried in such rounds."""
        return self._judged.get((member, kind), 0) < _KNOWN

    def tokens(self, slot: int, member: int, kind: int) -> Floats:
        """That rounds are expected to emit for a sequence, by K: `[K + 1]`."""
        return self.outlook(slot, member, kind).tokens

    def outlook(self, slot: int, member: int, kind: int) -> Outlook:
        """What rounds are expected to emit for a sequence."""
        open_, which = self._open[slot], (member, kind)
        found = open_.outlooks.get(which)
        if found is None:
            alphas = self._prior(open_.key, member, kind, open_.age)
            own = open_.own.get(which)
            if own is not None and not open_.alike:
                alike = self._likeness(open_.key, member, kind)
                trust = _AWARE if own.changed else alike.trust(open_.tokens, _OWN)
                alphas = own.alphas(alphas, trust)
            found = open_.outlooks[which] = Outlook.of(alphas, self._most)
            if own is not None:
                own.believed = found
        return found

    def _prior(self, key: Key, member: int, kind: int, age: int) -> list[list[float]]:
        """α of all sequences in each state that is told apart; looked up anew from time to time."""
        place = key, member, kind, age
        held, told = self._priors.get(place), self._told.get((key, member), 0)
        if held is None or told > held[0] + min(held[0], _FRESH - 1):
            every = self._all(key, member)
            kinds = {like for like, _ in self._shared.get((key, member), {})}
            of_kind = every if kinds == {kind} else self._all(key, member, kind)
            trust = _OF_KINDS[not self._members[member].instant]
            alpha = of_kind.alpha(every.alpha(), trust)
            alpha = self._all(key, member, kind, age).alpha(alpha, _OF_SOME)
            alphas = [alpha]
            if not self._members[member].instant:
                apart = [self._all(key, member, kind, age, state) for state in range(STATES)]
                alphas = [survival.alpha(alpha, _OF_SOME) for survival in apart[:LASTING]]
                alphas.append(apart[LASTING].alpha(alphas[PASSED], _OF_SOME))
            held = self._priors[place] = told, alphas
        return held[1]

    def _all(
        self,
        key: Key,
        member: int,
        kind: int | None = None,
        age: int | None = None,
        state: int | None = None,
    ) -> Survival:
        """What all sequences have shown, in rounds of a kind or of any, at an age or at any, and in
        one state or any."""
        found = Survival(self._members[member].most, _OTHERS)
        for (k, a), table in self._shared.get((key, member), {}).items():
            if kind in (None, k) and age in (None, a):
                for survival in table.apart if state is None else (table.faded(state),):
                    found.gain(survival, self._text - table.text)
        return found

    def overall(self, member: int) -> tuple[list[float], Floats]:
        """α by depth in all rounds at the temperature seen last, and tokens by K."""
        last = [
            (max(table.text for table in tables.values()), key)
            for (key, m), tables in self._shared.items()
            if m == member
        ]
        if not last:
            return [], np.ones(self._most + 1)
        alpha = self._all(max(last)[1], member).alpha()
        return alpha, Outlook.of([alpha], self._most).tokens
