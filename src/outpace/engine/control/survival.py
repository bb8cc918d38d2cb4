"""How far drafts are accepted: running estimates of α by depth.

α_d is the share of rounds that reached depth d and accepted a token there. Evidence fades
as text is emitted, so that an estimate is about the last few hundred tokens. A sequence
begins with what other sequences have shown; what it shows itself soon outweighs that. A
depth that nobody has reached is taken to be as its shallower neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FIRST = 0.7
"""What α_1 is taken for where nothing is known."""

_TRUST = 2.0
"""Rounds that outweigh what is known of the next shallower depth."""

_PRIOR = 8.0, 2.0
"""Rounds that outweigh what other sequences have shown, at first and at last."""

_LEAST = 0.002
"""No α is thought to be nearer to 0 or 1."""

_LARGE = 1e9


class Survival:
    """Counts by depth, in which later rounds weigh more.

    Args:
        most: depths.
        memory: tokens after which a round counts 1/e of a new one.
    """

    def __init__(self, most: int, memory: float) -> None:
        self.reached = [0.0] * most
        self.accepted = [0.0] * most
        self._memory = memory
        self._tokens = 0.0
        self.weight = 1.0
        """Of a round now."""

    def pass_by(self, tokens: float) -> None:
        """Text was emitted."""
        self._tokens += tokens
        self.weight = math.exp(self._tokens / self._memory)
        if self.weight > _LARGE:
            self.reached = [x / self.weight for x in self.reached]
            self.accepted = [x / self.weight for x in self.accepted]
            self._tokens, self.weight = 0.0, 1.0

    def add(self, reached: int, accepted: int) -> None:
        """Count a round: depths that it reached, and of these the first that it accepted."""
        for depth in range(min(reached, len(self.reached))):
            self.reached[depth] += self.weight
        for depth in range(min(accepted, len(self.accepted))):
            self.accepted[depth] += self.weight

    @property
    def rounds(self) -> float:
        """What evidence there is of the first depth, in rounds as new ones count."""
        return self.reached[0] / self.weight

    def alpha(self, prior: Sequence[float] | None = None, trust: float = _TRUST) -> list[float]:
        """α by depth.

        Args:
            prior: what others show, by depth. Who was accepted more often at one depth is
                expected to be so at the next: by the same factor of the odds. By default
                each depth is expected to be as the one before.
            trust: rounds that outweigh it.
        """
        found: list[float] = []
        before, held, factor = FIRST, trust * self.weight, 1.0
        for depth, (n, a) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if prior is not None:
                expected = factor * prior[depth] / (1 - prior[depth])
                before = expected / (1 + expected)
            before = min(max((a + held * before) / (n + held), _LEAST), 1 - _LEAST)
            if prior is not None:
                factor = before / (1 - before) / prior[depth] * (1 - prior[depth])
            found.append(before)
        return found


def trust_in_others(tokens: int, memory: float) -> float:
    """Rounds of its own that outweigh what others have shown, of a sequence so long."""
    first, last = _PRIOR
    return max(last, first * math.exp(-tokens / memory))


def expected(alpha: Sequence[float]) -> Floats:
    """Tokens that a round emits, for every K from 0: 1 + Σ Π α. `[K + 1]`"""
    found, reach, total = [1.0], 1.0, 1.0
    for a in alpha:
        reach *= a
        total += reach
        found.append(total)
    return np.array(found)
