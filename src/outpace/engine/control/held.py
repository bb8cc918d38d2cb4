"""Choices that are held for some rounds, so that choosing costs no more than it may.

Choosing takes a millisecond or two. Where a pass takes little more, as of a small model,
a choice serves the rounds that follow, if they ask the same: as long as it takes for all that
was thought since the first of them to be half a hundredth of the time (`_SHARE`), and longer where
thinking again and again has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .plan import Ask, kind_of

_SHARE = 0.005
"""Of the time that choosing may take."""

_PATIENT = 4
"""Times as long, at most: twice as long where the last thought changed nothing, and so on."""

_SOON = 0.25
"""Of the time since the first choice: as long as little is known, none is held for longer."""

Question = tuple[tuple[int, ...], int]
"""The sequences' slots, and the kind of all that they are offered together."""


class Choice(NamedTuple):
    """A drafter with a model or none (-1).

    Attributes:
        k, passed, long: how far, behind a draft that failed or none, behind one that was accepted
            as a whole, and in a long stretch without a refusal.
        gain: by how much looks at drafters without a model have raised its rate.
        saves, varies: seconds of plain decoding that a round is expected to save, and their
            standard deviation.
    """

    member: int
    k: int
    passed: int
    long: int
    gain: float = 0.0
    saves: float = 0.0
    varies: float = 0.0

    @property
    def lengths(self) -> tuple[int, int, int]:
        """By state of the text (`Outlook`)."""
        return self.k, self.passed, self.long

    def like(self, other: Choice) -> bool:
        """Whether the same is to be done."""
        return self[:4] == other[:4]


PLAIN = Choice(-1, 0, 0, 0)
"""Nobody drafts."""


class Held:
    """Choices by what was asked.

    Args:
        clock: tells the time in seconds, to know what thinking takes.

    Attributes:
        now: seconds that rounds took: what else runs between them makes nothing outdated.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices: dict[Question, Choice] = {}
        self.now = 0.0
        self._first: float | None = None
        self._began = self._thought = 0.0
        self._last, self._patience = PLAIN, 1  # the last choice, and times as long as usual

    def drop(self) -> None:
        """What is asked next is to be thought about: something has changed."""
        self._choices.clear()
        self._patience = 1

    def passed(self, seconds: float) -> None:
        """A round took so long."""
        self.now += seconds

    def begin(self) -> float:
        """Something begins to be thought about: when."""
        now = self.now
        if self._first is None:
            self._first = now
        if now >= self.until:
            self._choices.clear()
        if not self._choices:
            self._began, self._thought = now, 0.0
        return self._clock()

    @property
    def until(self) -> float:
        """When what was chosen last is to be thought about again."""
        since = 0.0 if self._first is None else self._began - self._first
        return self._began + min(self._patience * self._thought / _SHARE, since * _SOON)

    def keep(self, question: Question, choice: Choice, began: float) -> None:
        """A choice that was begun to be thought about then."""
        if not self._choices:
            same = choice.like(self._last)
            self._patience, self._last = min(2 * self._patience, _PATIENT) if same else 1, choice
        self._choices[question] = choice
        self._thought += self._clock() - began

    def adopt(self, slots: Sequence[int], choice: Choice) -> None:
        """A choice for them where nothing is offered, as if it had been thought about now."""
        self.drop()
        self._choices[self.question(slots)] = choice
        self._began = self.now

    def exchange(self, slots: Sequence[int], choice: Choice) -> None:
        """Another choice for them where nothing is offered, that need not be thought about."""
        if self._choices:
            self._choices = {self.question(slots): choice}

    def find(self, question: Question) -> Choice | None:
        """What was chosen then, if that is not too long ago."""
        choice = self._choices.get(question)
        return choice if choice is not None and self.now < self.until else None

    def question(self, slots: Sequence[int], asks: Sequence[Ask] = ()) -> Question:
        """What is asked; without asks nothing is offered."""
        offered = [max(map(len, a.offers.values()), default=1) - 1 for a in asks]
        return tuple(slots), kind_of(sum(offered))
