"""Gaps: stretches of text for which nobody without a model proposes anything.

Where look-ups are right for many rounds, a gap is soon over, and what a model drafts beyond it they
would have proposed for less. So a token of its draft is worth what one of the gap is as long as
that goes on, and behind it only as much as at the speed there. If each token ends a gap with
probability h, the token at depth d is worth

    u_d = (1 - h)^d + (1 - (1 - h)^d) v / r,

with v the speed in gaps and r elsewhere: K = argmax Σ_d u_d Π α / seconds is the one that takes
least time to the end of a gap, tokens beyond it being credited with 1 / r each (Dinkelbach 1967: v
is that of the last such choice).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .survival import Floats

_PRIOR = 2.0, 4.0
"""Gaps that have ended, and tokens that they had, before anything was seen."""

_MEMORY = 1 - 1 / 128
"""By which evidence fades with each round."""

_KNOWN = 16
"""Rounds outside of gaps before their speed is known."""


@dataclass(slots=True)
class Gaps:
    """What is known of them, at one temperature.

    Attributes:
        speed: in a gap, times plain decoding's, by the last choice; 0 before.
    """

    speed: float = 0.0
    _ends: float = _PRIOR[0]
    _tokens: float = _PRIOR[1]
    _saved: float = 0.0
    _seconds: float = 0.0
    _rounds: int = 0

    @property
    def hazard(self) -> float:
        """The probability that a token ends one."""
        return self._ends / self._tokens

    def went_on(self, tokens: int, over: bool) -> None:
        """Of a sequence in a gap: whether that is over after so many tokens. After how many of them
        it was is not known, but to be expected."""
        h = self.hazard
        if over:
            stays = (1 - h) ** tokens
            seen = 1 / h - tokens * stays / (1 - stays) if stays < 1 else 1.0
        else:
            seen = float(tokens)
        self._ends = _MEMORY * self._ends + over
        self._tokens = _MEMORY * self._tokens + max(seen, 1.0)

    def outside(self, saved: float, seconds: float) -> None:
        """A round in which something was proposed saved so many seconds of plain decoding."""
        self._saved = _MEMORY * self._saved + saved
        self._seconds = _MEMORY * self._seconds + seconds
        self._rounds += 1

    def worths(self, most: int) -> Floats | None:
        """Of tokens in a gap, by how many were drafted before them: `[most + 1]`; None where all
        are worth the same."""
        if self._rounds < _KNOWN or not 0 < self.speed * self._seconds < self._saved:
            return None
        behind = self.speed * self._seconds / self._saved
        stays: Floats = (1 - self.hazard) ** np.arange(most + 1.0)
        return behind + (1 - behind) * stays
