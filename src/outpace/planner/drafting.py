"""What drafting adds to a round.

It is timed in rounds of the drafter's own, each over a plain round that it took turns with:
where a machine is slow for a while, it is so for both. Verdicts on its laws, which cost more than
those on certain tokens, are part of what it adds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine import Engine
from ..models.tokenizer import Tokenizer
from ..trees.times import along
from ..verifiers import Verifier
from .machine import Machine
from .rounds import REPEATS, TOKENS, faster_half, time_rounds

DRAFT_KS = (1, 2, 4, 8, 16)
"""K that are timed."""


@dataclass(frozen=True, slots=True)
class Added:
    """What drafting adds to a round.

    Called with K and a batch it goes along K, and then along the batches.

    Attributes:
        points: seconds by (K, batch), K = 0 included: where nothing is proposed a drafter has
            been asked all the same. Below 0 where the draft has done a part of the pass.
        steps: seconds of drafting alone, per drafted token, by batch: c is that over a pass.
    """

    points: Mapping[tuple[int, int], float]
    steps: Mapping[int, float] = field(default_factory=dict)

    def __call__(self, k: float, batch: float = 1) -> float:
        by_batch: dict[int, dict[int, float]] = {}
        for (length, size), seconds in self.points.items():
            by_batch.setdefault(size, {})[length] = seconds
        return along({size: along(line, k) for size, line in by_batch.items()}, batch)

    def step(self, batch: int = 1) -> float:
        """Seconds to draft a token."""
        return along(self.steps, batch)

    def to_dict(self) -> dict[str, Any]:
        return {
            "added_seconds": [
                {"k": k, "batch": batch, "seconds": seconds}
                for (k, batch), seconds in sorted(self.points.items())
            ],
            "step_seconds": {str(batch): seconds for batch, seconds in sorted(self.steps.items())},
        }


def measure_drafting(
    engine: Engine,
    machine: Machine,
    prompt: Sequence[int],
    ks: Sequence[int],
    *,
    batches: Sequence[int] = (1,),
    tokens: int = TOKENS,
    temperature: float = 0.0,
    rule: Verifier | None = None,
    tokenizer: Tokenizer | None = None,
    repeats: int = REPEATS,
    seconds: float = float("inf"),
) -> Added:
    """Time what an engine's drafter adds to rounds, with each K and batch.

    Args:
        ks: of those up to what it drafts at most; plain rounds take turns with them.
        tokens: that such prompts are continued by in use.

    Raises:
        OptionError: the engine is busy, or there is no room for the drafts.
    """
    assert engine.drafter is not None
    # Rounds of a cascade are of several kinds.
    typical = statistics.fmean if engine.drafter.members else statistics.median
    points: dict[tuple[int, int], float] = {}
    steps: dict[int, float] = {}
    for batch in batches:
        how: dict[str, Any] = {"batch": batch, "temperature": temperature, "rule": rule}
        how |= {"tokens": tokens, "tokenizer": tokenizer}
        laps = time_rounds(engine, prompt, (0, *ks), repeats=repeats, seconds=seconds, **how)
        if engine.drafter.instant:
            look = faster_half([lap.draft for k in ks for lap in laps[k]])
            points |= {(k, batch): look for k in (0, *ks)}
            steps[batch] = look / max(ks)
            continue
        rest = machine.rounds(temperature)
        plain = rest(1, batch)
        points[0, batch] = 0.0
        each: list[float] = []
        for k in ks:
            pairs = [(lap, by.whole) for lap, by in zip(laps[k], laps[0], strict=True) if lap.k]
            if not pairs:
                continue  # there was no room to draft
            added = [plain * lap.whole / by - rest(lap.rows, batch) for lap, by in pairs]
            points[k, batch] = typical(added)
            each += [plain * lap.draft / by / lap.k for lap, by in pairs]
        steps[batch] = statistics.median(each or [0.0])
    return Added(points, steps)
