"""The comparison: target only, speculative, and a draft model alone, interleaved."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine.stats import Stats
from ..errors import OptionError
from ..generator import Generator, encode
from ..models.loading import Progress
from ..planner import constant_price, speedup, tokens_counted
from ..types import SamplingParams

DRAFT, PLAIN, FAST = "draft only", "target only", "speculative"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times are medians over prompts and repeats."""

    mode: str
    seconds: float
    tokens: int
    tokens_per_second: float
    speedup: float
    stats: Stats


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured, and what theory says of it.

    Attributes:
        realised: median over prompts of speculative over plain tokens/s.
        decoding: the same without prefill, which the formula leaves out: time of
            the rounds per token, plain over speculative.
        cost: c, draft step ÷ target pass of plain decoding, median over prompts.
        predicted: the formula's speedup from the measured α_i and `cost`.
        identical: prompts whose speculative tokens equal the plain ones
            (meaningful at temperature 0).
    """

    rows: tuple[Row, ...]
    realised: float
    decoding: float
    cost: float
    predicted: float
    identical: int
    prompts: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [
                {
                    "mode": r.mode,
                    "seconds": r.seconds,
                    "tokens": r.tokens,
                    "tokens_per_second": r.tokens_per_second,
                    "speedup": r.speedup,
                    "stats": r.stats.to_dict(),
                }
                for r in self.rows
            ],
            "realised_speedup": self.realised,
            "decoding_speedup": self.decoding,
            "c": self.cost,
            "predicted_speedup": self.predicted,
            "identical": self.identical,
            "prompts": self.prompts,
        }


def expected_speedup(stats: Stats, c: float, begun: float = 0.0) -> float:
    """Speedup over plain decoding that follows from α_i and c alone.

    Tokens per round over K c + 1, with K the mean number of draft steps per round. They are
    1 + α_1 + α_1 α_2 + ... where all drafts have one length. Else a depth counts by the share of
    rounds that got there: see `planner.tokens_counted`, `planner.constant_price`.

    Args:
        begun: how much of the target's pass the draft has done; see `Drafter`.
    """
    if not stats.drafted_rounds:
        return 1.0
    price = constant_price(c, begun * stats.drafted_rounds / stats.rounds)
    return speedup(tokens_counted([stats]), price(stats.draft_steps / stats.rounds))


def _cost(plain: Stats, fast: Stats) -> float:
    step = fast.draft_seconds / fast.draft_steps if fast.draft_steps else 0.0
    return step / (plain.target_seconds / plain.rounds)


def _pace(stats: Stats) -> float:
    """Seconds per token, without prefill."""
    return stats.round_seconds / stats.emitted


def _check_room(
    generator: Generator, context: int, prompts: Sequence[str], params: SamplingParams
) -> None:
    """Every prompt and what follows must fit the draft, too, which is measured alone."""
    for number, prompt in enumerate(prompts, 1):
        length = len(encode(generator.tokenizer, prompt, None)[0][0])
        if length + params.max_new_tokens > context:
            raise OptionError(
                f"prompt {number} and its {params.max_new_tokens} new tokens need "
                f"{length + params.max_new_tokens} positions, the draft model has {context}: "
                "use shorter prompts or fewer new tokens"
            )


def compare(
    generator: Generator,
    prompts: Sequence[str],
    params: SamplingParams,
    repeats: int = 3,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Run every mode on every prompt, one after the other, `repeats` times.

    A drafter that remembers begins each time with nothing, and has then seen the prompts before.

    EOS is switched off, so that every run emits `max_new_tokens` tokens. One
    untimed prompt warms every mode up.

    Raises:
        OptionError: the generator has no drafter, or nothing to measure.
    """
    drafter = generator.engine.drafter
    if drafter is None:
        raise OptionError("bench measures a drafter: give --drafter")
    if not prompts or repeats < 1:
        raise OptionError("bench needs at least one prompt and one repeat")
    target = generator.engine.target
    tokenizer = generator.tokenizer
    params = replace(params, eos_token_ids=())
    runs: dict[str, Generator] = {}
    if drafter.alone is not None:
        _check_room(generator, drafter.alone.context_length, prompts, params)
        runs[DRAFT] = Generator(drafter.alone, tokenizer=tokenizer, max_batch=1)
    runs[PLAIN] = Generator(target, tokenizer=tokenizer, max_batch=1)
    runs[FAST] = generator
    seconds: dict[str, list[list[float]]] = {m: [[] for _ in prompts] for m in runs}
    tokens: dict[str, list[tuple[int, ...]]] = {m: [()] * len(prompts) for m in runs}
    stats = {m: [Stats() for _ in prompts] for m in runs}
    done = 0
    for repeat in range(-1, repeats):
        drafter.forget()  # texts that it has seen before would be drafted by heart
        for i, prompt in enumerate(prompts if repeat >= 0 else prompts[:1]):
            for mode in runs:
                began = time.perf_counter()
                result = runs[mode].generate(prompt, params=params)
                spent = time.perf_counter() - began
                if repeat >= 0:
                    seconds[mode][i].append(spent)
                    tokens[mode][i] = result.token_ids
                    stats[mode][i] = stats[mode][i].merge(result.stats)
                    done += 1
                    progress("measuring", done, len(prompts) * repeats * len(runs))
    speed = {
        m: [len(tokens[m][i]) / statistics.median(seconds[m][i]) for i in range(len(prompts))]
        for m in runs
    }
    rows = []
    for mode in runs:
        ratio = [s / t for s, t in zip(speed[mode], speed[PLAIN], strict=True)]
        rows.append(
            Row(
                mode,
                statistics.median(s for per in seconds[mode] for s in per),
                sum(map(len, tokens[mode])),
                statistics.median(speed[mode]),
                statistics.median(ratio),
                functools.reduce(Stats.merge, stats[mode]),
            )
        )
    pairs = list(zip(stats[PLAIN], stats[FAST], strict=True))
    cost = statistics.median(_cost(plain, fast) for plain, fast in pairs)
    return Comparison(
        rows=tuple(rows),
        realised=rows[-1].speedup,
        decoding=statistics.median(_pace(plain) / _pace(fast) for plain, fast in pairs),
        cost=cost,
        predicted=expected_speedup(rows[-1].stats, cost, drafter.begun),
        identical=sum(a == b for a, b in zip(tokens[PLAIN], tokens[FAST], strict=True)),
        prompts=len(prompts),
    )
