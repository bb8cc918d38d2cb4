"""What an audit found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .statistics import POWER, Test


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples against the law.

    Attributes:
        samples, tokens: that were looked at, continuations and their tokens.
        planned: continuations that would have been looked at.
        false_alarm: probability with which a sound system is called unsound, at most.
        share: of each test at each look.
        tests: at the last look.
        defects: what is wrong beyond frequencies: impossible tokens, tokens behind the end.
        borderline: tokens just beyond a top-k, a nucleus or a min-p, where rounding may put
            another engine; they count in the tests, as the least likely.
        repeated: of some seeds run again one by one, how many gave the same text, of how many.
    """

    samples: int
    tokens: int
    planned: int
    false_alarm: float
    share: float
    tests: tuple[Test, ...]
    defects: tuple[str, ...] = ()
    borderline: int = 0
    repeated: tuple[int, int] | None = None

    @property
    def found(self) -> tuple[Test, ...]:
        """Tests that decide against the system."""
        return tuple(t for t in self.tests if t.p_value < self.share)

    @property
    def sound(self) -> bool:
        return not self.found and not self.defects

    @property
    def detectable(self) -> dict[int, float]:
        """By tested position the smallest total variation, as counted, that is mostly found."""
        best: dict[int, float] = {}
        for t in self.tests:
            best[t.position] = min(best.get(t.position, 1.0), t.detectable)
        return best

    def summary(self) -> str:
        """The decision in a sentence."""
        if self.defects:
            return f"not the target's: {self.defects[0]}"
        if self.found:
            worst = min(self.found, key=lambda t: t.p_value)
            return (
                f"not the target's law: at position {worst.position}, by {worst.kind}, "
                f"p = {worst.p_value:.1e} with {worst.samples} samples; off by a total variation "
                f"of about {max(t.distance for t in self.found):.3f}"
            )
        found = self.detectable
        where = f"{min(found)} to {max(found)}" if len(found) > 1 else f"{min(found)}"
        return (
            f"no difference in {self.samples} samples ({self.tokens} tokens); at positions {where} "
            f"a total variation of {max(found.values()):.3f}, as counted, would be found "
            f"{POWER:.0%} of the time"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a greedy text leaves plain decoding's.

    Attributes:
        prompt: its number, from 1.
        position: of the token, from 1.
        expected, got: tokens; None is the end of the text.
        margin: how far the expected token's logit is above the other's; None where one ended,
            or where the other is forbidden.
        gap: how far it is above the next likeliest token's; None where that is forbidden.
        near: whether the margin is one that rounding may turn over.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    margin: float | None
    gap: float | None
    near: bool


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy texts against plain decoding's, token by token."""

    prompts: int
    tokens: int
    differences: tuple[Difference, ...] = ()

    @property
    def sound(self) -> bool:
        return all(d.near for d in self.differences)

    def summary(self) -> str:
        if not self.differences:
            return f"the same {self.tokens} tokens on {self.prompts} prompts"
        worst = max(self.differences, key=lambda d: (not d.near, d.margin or 0.0))
        margin = f", a margin of {worst.margin:.2g} in logits" if worst.margin is not None else ""
        if worst.expected is None or worst.got is None:
            margin = ", the end of a text"
        where = f"token {worst.position} of prompt {worst.prompt}{margin}"
        count = f"another text on {len(self.differences)} of {self.prompts} prompts"
        if self.sound:
            return (
                f"{count}, each from a near tie on, which rounding turns over; the widest: {where}"
            )
        gap = "" if worst.gap is None else f" (gap to the next likeliest: {worst.gap:.2g})"
        return f"{count}, such as from {where}{gap}"


@dataclass(frozen=True, slots=True)
class Exact:
    """The law of rounds, enumerated.

    Attributes:
        rounds: that were enumerated, each from a state of its own.
        drafts: different drafts, over all rounds.
        error: largest deviation of a text's probability from the target's; None
            where noise is entangled.
        tolerance: what the precision of the laws allows.
        impossible: texts of probability 0 that noise of exactly 0 emits.
        entangled: how noise of one purpose was seen to serve another.
        absent: what no round lay behind ("rejection", "full acceptance"), though it was tried.
        narrowed: the top_k that was put in place of the one asked for.
        lengths: K of the rounds.
    """

    rounds: int
    drafts: int
    error: float | None
    tolerance: float
    impossible: int = 0
    entangled: str = ""
    absent: tuple[str, ...] = ()
    narrowed: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def sound(self) -> bool:
        return self.error is not None and self.error <= self.tolerance and not self.impossible

    def summary(self) -> str:
        if self.error is None:
            return f"not the target's law: noise is shared, {self.entangled}"
        if self.impossible:
            return f"not the target's: {self.impossible} texts of probability 0 at noise 0"
        under = "" if self.narrowed is None else f" under top_k = {self.narrowed}"
        of = f" of K = {self.lengths[0]} to {self.lengths[-1]}" if len(self.lengths) > 1 else ""
        counted = f"{self.rounds} rounds{of} ({self.drafts} drafts){under}"
        said = f"{counted} deviate by {self.error:.1e} at most"
        if not self.sound:
            return f"not the target's law: {said}, beyond the precision of {self.tolerance:.0e}"
        lacking = "".join(f"; none was behind a {state}" for state in self.absent)
        return f"{said}, within the precision of {self.tolerance:.0e}{lacking}"


Part = Sampled | Greedy | Exact


@dataclass(frozen=True, slots=True)
class Report:
    """An audit: what was audited, by which means, and what was found.

    Attributes:
        parts: by mode ("greedy", "sampled", "exact"), in the order they were run.
        left_out: modes that could not be run, and why.
    """

    system: str
    setting: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return all(part.sound for part in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        parts = {
            mode: asdict(part) | {"sound": part.sound, "summary": part.summary()}
            for mode, part in self.parts.items()
        }
        return {
            "system": self.system,
            "sound": self.sound,
            "setting": self.setting,
            "parts": parts,
            "left_out": self.left_out,
        }


def worst_by_position(tests: Sequence[Test]) -> list[Test]:
    """The test with the smallest p-value of each position."""
    ordered = sorted(tests, key=lambda t: (t.position, -t.p_value))
    return list({t.position: t for t in ordered}.values())  # the last one of each
