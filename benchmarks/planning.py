"""Predicted against realised speedup of the shipped pair, by temperature and K.

Every second held-out prompt is planned with, as `outpace plan` does it: what rounds emit is known
from runs with that K, and replayed from a run with the longest. The others are then run, plain and
speculative taking turns. Realised is the time of all plain rounds over the time of all
speculative ones, and once more with the reading of prompts.

What rounds cost moves on a shared machine, and not alike for all: passes of one row wait for
memory, of nine rows for arithmetic. So it is measured, as the plan does it, before each piece of
the prompts that are run; what the first of these measurements alone predicts is in the record, too.
Both speedups are tokens per round over price, so the record says which of the two is off.

    python benchmarks/planning.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import outpace
from environment import record
from outpace import Generator
from outpace.bench.prompts import held_out_prompts
from outpace.engine import Engine, Stats
from outpace.models.tokenizer import Tokenizer
from outpace.planner import (
    Added,
    Machine,
    Survey,
    Surveying,
    Wanted,
    interval,
    measure_drafting,
    measure_machine,
)
from outpace.planner.drafting import DRAFT_KS
from outpace.planner.machine import ROWS
from outpace.planner.promises import speedup_of, tokens_of
from outpace.planner.survey import Text
from outpace.types import SamplingParams
from outpace.verifiers import make_verifier
from pairs import sampling

LONGEST = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo-draft")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--rules", nargs="+", default=["token", "block"])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--pieces", type=int, default=6, help="of the prompts that are run")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="planning")
    options = parser.parse_args()
    texts = held_out_prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        for rule in options.rules if temperature else options.rules[:1]:
            found = held_against(texts[::2], texts[1::2], temperature, rule, options)
            rows += found
            print(*found, sep="\n", flush=True)
    errors = [abs(row["predicted_over_realised"] - 1) for row in rows]
    within = sum(error <= 0.1 for error in errors)
    print(f"within 10 %: {within} of {len(rows)}, at most {max(errors):.1%} off", flush=True)
    record(options.name, rows)


def held_against(
    seen: Sequence[str], later: Sequence[str], temperature: float, rule: str, options: Any
) -> list[dict[str, Any]]:
    """What is predicted from some prompts against what others show, for every K."""
    generator = outpace.load(
        options.model,
        options.drafter,
        LONGEST,
        verifier=rule,
        dtype=options.dtype,
        device=options.device,
        max_batch=8,
    )
    engine, tokenizer = generator.engine, generator.tokenizer
    assert tokenizer is not None
    plain = Generator(engine.target, tokenizer=tokenizer, max_batch=1)
    prompts = [tokenizer.encode(prompt) for prompt in seen]
    wanted = Wanted(prompts=prompts, temperatures=(temperature,), tokens=options.tokens)
    pieces = [later[i :: options.pieces] for i in range(options.pieces)]
    runs = {
        k: Realised(plain, generator, k, sampling(temperature, options.tokens)) for k in options.k
    }
    timed: list[tuple[Machine, Added]] = []
    for piece in pieces:
        timed.append(times(engine, tokenizer, wanted, rule, options))
        for run in runs.values():
            run.add(piece)
    surveying = Surveying(options.drafter, engine, timed[0][0], wanted, tokenizer)
    counted = {k: surveying.texts(k, temperature, rule) for k in {*options.k, LONGEST}}
    surveys = [
        (machine, Survey(options.drafter, temperature, rule, counted, added))
        for machine, added in timed
    ]
    found = []
    for k, run in runs.items():
        row = {"temperature": temperature, "rule": rule, "k": k}
        row |= predicted(surveys, k, len(later)) | run.figures()
        for figure in ("predicted", "predicted_at_first", "replayed"):
            row[f"{figure}_over_realised"] = round(row[figure] / row["realised"], 3)
        found.append(row)
    return found


def times(
    engine: Engine, tokenizer: Tokenizer, wanted: Wanted, rule: str, options: Any
) -> tuple[Machine, Added]:
    """What rounds cost now."""
    given: dict[str, Any] = {"tokens": wanted.tokens, "tokenizer": tokenizer}
    machine = measure_machine(
        engine.target,
        wanted.typical,
        temperatures=wanted.temperatures,
        batches=(),
        rows=[count for count in ROWS if count <= LONGEST + 1],
        max_len=wanted.max_len(engine.target),
        **given,
    )
    ks = sorted({*DRAFT_KS, *options.k, LONGEST})
    how = {"temperature": wanted.temperatures[0], "rule": make_verifier(rule)}
    return machine, measure_drafting(engine, machine, wanted.typical, ks, **given, **how)


def predicted(surveys: Sequence[tuple[Machine, Survey]], k: int, coming: int) -> dict[str, Any]:
    """The speedup by runs with this K, with what so many other prompts will show; and replayed."""
    each = [speedup_of(machine, survey, k, 1) for machine, survey in surveys]

    def figure(texts: Sequence[Text]) -> float:
        return statistics.harmonic_mean([one(texts) for one in each])  # by the mean price

    machine, survey = surveys[0]
    value, low, high = interval(survey.texts(k), figure, coming=coming)
    longest = {survey.longest: survey.counted[survey.longest]}
    replays = replace(survey, counted=longest, _replayed={})
    prices = [tokens_of(survey.texts(k)) / one(survey.texts(k)) for one in each]
    return {
        "predicted": round(value, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "predicted_at_first": round(each[0](survey.texts(k)), 3),
        "replayed": round(figure(replays.texts(k)), 3),
        "predicted_tokens": round(tokens_of(survey.texts(k)), 3),
        "predicted_price": round(statistics.fmean(prices), 3),
        "prices": [round(price, 3) for price in prices],
        "c": round(survey.added.step(1) / machine.passes(1, 1), 4),
        "times_vary_by": round(machine.spread, 3),
    }


class Realised:
    """Plain and speculative decoding of prompts, in turn."""

    def __init__(
        self, plain: Generator, speculative: Generator, k: int, params: SamplingParams
    ) -> None:
        self._runners, self._k, self._params = (plain, speculative), k, params
        self._spent: list[tuple[Stats, Stats]] = []

    def add(self, prompts: Sequence[str]) -> None:
        """Run these, too; one of them is run once before."""
        with self._runners[1].engine.fixed(self._k):
            for runner in self._runners:
                runner.generate(prompts[0], params=self._params)
            for prompt in prompts:
                plain, fast = (run.generate(prompt, params=self._params) for run in self._runners)
                self._spent.append((plain.stats, fast.stats))

    def figures(self) -> dict[str, Any]:
        plain, fast = zip(*self._spent, strict=True)
        rounds = sum(s.round_seconds for s in plain) / sum(s.round_seconds for s in fast)
        tokens = sum(s.emitted for s in fast) / sum(s.rounds for s in fast)
        return {
            "realised": round(rounds, 3),
            "realised_with_prefill": round(
                sum(s.seconds for s in plain) / sum(s.seconds for s in fast), 3
            ),
            "realised_tokens": round(tokens, 3),
            "realised_price": round(tokens / rounds, 3),
        }


if __name__ == "__main__":
    main()
