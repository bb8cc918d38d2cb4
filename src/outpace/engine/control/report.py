"""What a controller has chosen, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .survival import LONG


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a drafter promises now.

    Attributes:
        k: its best K.
        speedup: over plain decoding, at that K, of rounds in which it proposes something; None
            where it never has.
        alpha: α by depth, as far as that.
        instant: whether it runs no model.
        step_seconds: of a drafted token; where no model runs, of a look-up.
        rounds: that it has drafted in.
    """

    name: str
    instant: bool
    k: int
    speedup: float | None
    alpha: Sequence[float]
    step_seconds: float
    rounds: int

    def __str__(self) -> str:
        if self.speedup is None:
            return f"{self.name}: never tried"
        where = " where it finds something" if self.instant else ""
        said = f"{self.name}: {self.speedup:.2f}x with K = {self.k}{where}"
        alpha = " ".join(f"{a:.2f}" for a in self.alpha[: max(3, self.k)])
        step = "look-up" if self.instant else "token"
        return f"{said} (α {alpha}; {1e3 * self.step_seconds:.2f} ms per {step})"


@dataclass(frozen=True, slots=True)
class Report:
    """A controller's choice.

    Attributes:
        drafter: who drafts, None for plain decoding.
        reason: why, in a sentence.
        k, passed, long: tokens, behind a draft that failed or none, behind one that was accepted
            as a whole, and where nothing was refused for `survival.LONG` tokens.
        sequences: that the choice is for.
        plain_seconds: of a plain round.
        estimates: of each drafter, by all rounds at the temperature seen last. What is chosen goes
            by the text at hand, too.
        probes, probe_share: rounds that were tried, and the share of all time they have lost.
    """

    drafter: str | None
    reason: str
    k: int
    passed: int
    long: int
    sequences: int
    plain_seconds: float
    estimates: Sequence[Estimate]
    probes: int
    probe_share: float

    def __str__(self) -> str:
        who = "plain decoding" if self.drafter is None else f"{self.drafter}, K = {self.k}"
        if not self.k == self.passed == self.long:
            who += f" ({self.passed} behind a draft that was accepted as a whole, {self.long} where"
            who += f" nothing was refused for {LONG} tokens)"
        lines = [
            f"chosen for {self.sequences} sequence{'s' if self.sequences != 1 else ''}: {who}",
            self.reason,
            f"plain: {1e3 * self.plain_seconds:.2f} ms per round",
            "of all rounds so far:",
            *map(str, self.estimates),
            f"probes: {self.probes}, {self.probe_share:.1%} of the time",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)
