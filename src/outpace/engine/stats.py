"""What happened, in the terms of the glossary."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts and times of one sequence, of several merged, or of an engine.

    Times are seconds of the rounds a sequence took part in; neighbours in the
    batch share them. What a stop cut off is not counted.

    Attributes:
        rounds: rounds, each one target pass.
        drafted_rounds: rounds in which something was proposed.
        full_accepts: drafted rounds whose whole path was accepted.
        proposed, accepted, emitted: tokens.
        draft_steps: tokens drafted along the longest path, summed over rounds.
        lengths: rounds by K, from 0: how long a path was proposed.
        drafters: rounds by who proposed something.
        reached, accepted_at: per depth (from 1): rounds that reached it, and
            rounds that accepted a token there.
        prefill_seconds: of reading prompts; of these `reading_seconds` by the drafter.
    """

    rounds: int = 0
    drafted_rounds: int = 0
    full_accepts: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_steps: int = 0
    lengths: list[int] = field(default_factory=list)
    drafters: dict[str, int] = field(default_factory=dict)
    reached: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    reading_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    round_seconds: float = 0.0

    def count(
        self,
        proposed: int,
        accepted: int,
        emitted: int,
        steps: int,
        drafter: str = "",
        *,
        ended: bool = False,
    ) -> None:
        """Count one round of one request.

        Args:
            proposed: nodes of the draft, without what lies behind a stop.
            steps: tokens drafted along the longest path, K.
            drafter: who proposed them.
            ended: whether nothing was proposed behind the accepted path.
        """
        self.rounds += 1
        self.emitted += emitted
        self.draft_steps += steps
        self.lengths += [0] * (steps + 1 - len(self.lengths))
        self.lengths[steps] += 1
        if not proposed:
            return
        self.drafted_rounds += 1
        self.drafters[drafter] = self.drafters.get(drafter, 0) + 1
        self.proposed += proposed
        self.accepted += accepted
        self.full_accepts += ended
        reached = accepted + (not ended)
        missing = [0] * (reached - len(self.reached))
        self.reached += missing
        self.accepted_at += missing
        for depth in range(reached):
            self.reached[depth] += 1
            self.accepted_at[depth] += depth < accepted

    def read(self, drafter: float, whole: float) -> None:
        """Count seconds of reading: by the drafter, and in all."""
        self.reading_seconds += drafter
        self.prefill_seconds += whole

    def spend(self, draft: float, target: float, whole: float) -> None:
        self.draft_seconds += draft
        self.target_seconds += target
        self.round_seconds += whole

    def merge(self, other: Stats) -> Stats:
        """The sum of both."""
        total = Stats()
        for f in fields(Stats):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if isinstance(a, list):
                width = max(len(a), len(b))
                a, b = (x + [0] * (width - len(x)) for x in (a, b))
                setattr(total, f.name, [x + y for x, y in zip(a, b, strict=True)])
            elif isinstance(a, dict):
                setattr(total, f.name, {n: a.get(n, 0) + b.get(n, 0) for n in {**a, **b}})
            else:
                setattr(total, f.name, a + b)
        return total

    @property
    def seconds(self) -> float:
        """Prefill and rounds."""
        return self.prefill_seconds + self.round_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ proposed tokens; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def alpha(self) -> tuple[float, ...]:
        """α_i: accepted at depth i ÷ rounds that reached depth i."""
        return tuple(a / r for a, r in zip(self.accepted_at, self.reached, strict=True) if r)

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def full_accept_fraction(self) -> float | None:
        return self.full_accepts / self.drafted_rounds if self.drafted_rounds else None

    @property
    def draft_cost(self) -> float | None:
        """c: draft step time ÷ target pass time."""
        if not self.draft_steps or not self.target_seconds:
            return None
        return (self.draft_seconds / self.draft_steps) / (self.target_seconds / self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Counts, times and derived figures, ready for JSON."""
        raw = {f.name: getattr(self, f.name) for f in fields(Stats)}
        return raw | {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_rate": self.acceptance_rate,
            "alpha": list(self.alpha),
            "tokens_per_pass": self.tokens_per_pass,
            "full_accept_fraction": self.full_accept_fraction,
            "draft_cost": self.draft_cost,
        }
