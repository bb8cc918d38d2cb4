"""Choices that are held for some rounds, so that choosing costs no more than it may.

Choosing takes a millisecond or two. Where a pass takes little more, as of a small model,
a choice serves the rounds that follow, if they ask the same: as long as it takes for all that
was thought since the first of them to be a quarter of a hundredth of the time (`_SHARE`), and
longer where thinking again and again has changed nothing. A short text of such a model takes less
time than that: what was chosen for one serves the texts that follow and go like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

_SHARE = 0.0025
"""Of the time that choosing may take."""

_PATIENT = 4
"""Times as long, at most: twice as long where the last thought changed nothing, and so on."""

_SOON, _ALONE = 0.5, 0.25
"""Of the time of all rounds that went by such choices, and of that since the first choice at that
temperature: as long as little is known, none is held for longer. The second is of the latter,
before which no sequence is thought about alone."""

_SHARE_SOON = 0.02
"""Of the time that choosing may take then."""

_ELSEWHERE = 1 / 64
"""Of the time of rounds that go by other choices, that makes one older."""

_BOOKS = 256
"""Questions asked of all that are alike, at most, of which the first are forgotten."""


class Question(NamedTuple):
    """What a choice answers.

    Attributes:
        who: the sequences' slots, or what sequences are like that one is like.
        kind: of all that they are offered together; -1 where nobody looked.
        alike: whether it is asked of any sequence that is like it.
        key: what texts share that know of each other, their temperature.
    """

    who: Hashable
    kind: int
    alike: bool = False
    key: Hashable = None


class Choice(NamedTuple):
    """A drafter with a model or none (-1).

    Attributes:
        k, passed, long: how far, behind a draft that failed or none, behind one that was accepted
            as a whole, and in a long stretch without a refusal.
        gain: by how much looks at drafters without a model have raised its rate.
        saves, varies: seconds of plain decoding that a round is expected to save, and their
            standard deviation.
        gap: whether it is plain decoding up to the next look only.
        promised: of several sequences, what it was promised to gain beside plain decoding, in
            plain rounds, before it was known what becomes of promises.
        takes: seconds that a round is expected to take, looks apart.
        misses: drafts by a model for a single sequence, one behind the other, of which nothing is
            accepted, that show that it does not go as expected.
        rivals: by how many tokens longer or shorter drafts promise nearly as much.
    """

    member: int
    k: int
    passed: int
    long: int
    gain: float = 0.0
    saves: float = 0.0
    varies: float = 0.0
    gap: bool = False
    promised: float = 0.0
    takes: float = math.inf
    misses: float = math.inf
    rivals: Sequence[int] = ()

    @property
    def plain(self) -> bool:
        """Whether nobody is to draft."""
        return not (self.k or self.gap)

    @property
    def drafts(self) -> bool:
        """Whether a drafter with a model is to draft."""
        return self.member >= 0 and self.k > 0

    @property
    def lengths(self) -> tuple[int, int, int]:
        """By state of the text (`Outlook`)."""
        return self.k, self.passed, self.long

    def like(self, other: Choice) -> bool:
        """Whether the same is to be done."""
        return self[:4] == other[:4]


PLAIN = Choice(-1, 0, 0, 0)
"""Nobody drafts."""


class _Book:
    """Choices that are thought about anew at the same time.

    Attributes:
        used, all: seconds of rounds that went by them, since the first of them was begun, and by
            those before, too.
    """

    def __init__(self) -> None:
        self._choices: dict[Question, Choice] = {}
        self._before: dict[Question, Choice] = {}  # the last ones
        self._began = self._thought = self._lasts = self.used = self.all = 0.0
        self._patience = 1  # times as long as usual

    def drop(self) -> None:
        self._retire()
        self._patience = 1

    def forget(self, question: Question) -> None:
        self._choices.pop(question, None)

    def _retire(self) -> None:
        if self._choices:
            self._before, self._choices = self._choices, {}

    def left(self, now: float) -> float:
        """Seconds of such rounds until they are to be thought about again. The time of other
        rounds counts for less: what is asked but now and then is thought about as rarely."""
        return self._lasts - self.used - _ELSEWHERE * (now - self._began - self.used)

    def find(self, question: Question, now: float) -> Choice | None:
        choice = self._choices.get(question)
        return choice if choice is not None and self.left(now) > 0 else None

    def before(self, question: Question) -> Choice | None:
        return self._before.get(question) or self._choices.get(question)

    def begin(self, now: float) -> None:
        if self.left(now) <= 0:
            self._retire()
        if not self._choices:
            self._began, self._thought, self.used = now, 0.0, 0.0

    def keep(self, question: Question, choice: Choice, seconds: float, first: float) -> None:
        """
        Args:
            seconds: that it took to think of it.
            first: when the first of all choices at that temperature was begun.
        """
        before = self._before.pop(question, None)
        if not self._choices:
            same = before is not None and before.like(choice)
            self._patience = min(2 * self._patience, _PATIENT) if same else 1
        self._choices[question] = choice
        self._thought += seconds
        longest = self._patience * self._thought / _SHARE
        known = min(self.all, self._began - first)
        self._lasts = min(longest, max(known * _SOON, self._thought / _SHARE_SOON))


class Held:
    """Choices by what was asked: of some sequences, which end with them, and of all that are like
    one.

    Args:
        clock: tells the time in seconds, to know what thinking takes.

    Attributes:
        now: seconds that rounds took: what else runs between them makes nothing outdated.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._own = self._current = _Book()
        self._alike: dict[Hashable, _Book] = {}
        self._first: dict[Hashable, float] = {}
        self._until: dict[Hashable, float] = {}
        self._anew = False
        self.now = 0.0

    def until(self, key: Hashable) -> float:
        """When there is time to think of a sequence alone, so long after the last thoughts."""
        return self._until.get(key, 0.0)

    def drop(self) -> None:
        """What is asked next is to be thought about: something has changed."""
        self._own.drop()
        self._anew = True

    def part(self) -> None:
        """What was chosen for some sequences, or has changed about them, is not about those that
        are asked about next."""
        self._own.drop()
        self._anew = False

    def forget(self, question: Question) -> None:
        """That choice was wrong."""
        self._book(question).forget(question)

    def passed(self, seconds: float) -> None:
        """A round took so long, by what was found or kept last."""
        self.now += seconds
        self._current.used += seconds
        self._current.all += seconds

    def begin(self, question: Question) -> float:
        """Something begins to be thought about: when."""
        self._first.setdefault(question.key, self.now)
        self._book(question).begin(self.now)
        return self._clock()

    def before(self, question: Question) -> Choice | None:
        """What was chosen then the last time."""
        return self._book(question).before(question)

    def keep(self, question: Question, choice: Choice, began: float) -> None:
        """A choice that was begun to be thought about then."""
        seconds = self._clock() - began
        self._current = self._book(question)
        key, first = question.key, self._first.get(question.key, 0.0)
        self._current.keep(question, choice, seconds, first)
        later = max(self.until(key), self.now) + seconds / _SHARE
        longest = self.now + _PATIENT * seconds / _SHARE
        soon = self.now + _ALONE * (self.now - first)
        self._anew, self._until[key] = False, min(later, longest, soon)

    def find(self, question: Question) -> Choice | None:
        """What was chosen then, if that is not too long ago."""
        if self._anew:
            return None
        book = self._book(question)
        choice = book.find(question, self.now)
        if choice is not None:
            self._current = book
        return choice

    def due(self, question: Question) -> float:
        """When what was chosen then is to be thought about again, if all rounds go by it."""
        return self.now + self._book(question).left(self.now)

    def _book(self, question: Question) -> _Book:
        if not question.alike:
            return self._own
        book = self._alike.get(question.who)
        if book is None:
            if len(self._alike) >= _BOOKS:
                del self._alike[next(iter(self._alike))]
            book = self._alike[question.who] = _Book()
        return book
