"""Choices that are held for some rounds, so that choosing costs no more than it may.

Choosing takes some tenths of a millisecond. Where a pass takes little more, as of a small model,
a choice serves the rounds that follow, if they ask the same: as long as it takes for all that
was thought since the first of them to be a hundredth of the time (`SHARE`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .plan import Ask, Pick, kind_of
from .probes import SHARE

Question = tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
"""Of each sequence its slot, its budget, and the kind of what each drafter offers."""


class Held:
    """Choices by what was asked.

    Args:
        clock: tells the time in seconds.
        most: the longest K.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock, self._most = clock, most
        self._choices: dict[Question, Sequence[Pick | None]] = {}
        self._began = self._thought = 0.0

    def drop(self) -> None:
        """What is asked next is to be thought about."""
        self._choices.clear()

    def begin(self) -> float:
        """Now something is thought about."""
        now = self._clock()
        if now >= self._until:
            self.drop()
        if not self._choices:
            self._began, self._thought = now, 0.0
        return now

    @property
    def _until(self) -> float:
        return self._began + self._thought / SHARE

    def keep(self, question: Question, picks: Sequence[Pick | None], began: float) -> None:
        """A choice that was begun to be thought about then."""
        self._choices[question] = picks
        self._thought += self._clock() - began

    def find(self, question: Question) -> Sequence[Pick | None] | None:
        """What was chosen then, if that is not too long ago."""
        picks = self._choices.get(question)
        return picks if picks is not None and self._clock() < self._until else None

    def plainly(self, slots: Sequence[int], budgets: Sequence[int]) -> Question:
        """What is asked where nothing is offered and nobody is behind."""
        return tuple(
            (slot, min(budget, self._most), ()) for slot, budget in zip(slots, budgets, strict=True)
        )

    def question(self, asks: Sequence[Ask]) -> Question:
        """What is asked."""
        return tuple(
            (
                a.slot,
                min(a.budget, self._most),
                tuple((i, kind_of(len(counts) - 1)) for i, counts in a.offers.items()),
            )
            for a in asks
        )
