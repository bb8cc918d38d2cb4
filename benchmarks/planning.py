"""Predicted against realised speedup of the shipped pair, by temperature and K.

Every second held-out prompt is planned with, as `outpace plan` does it: what rounds cost, and what
they emit, run with that K and replayed from a run with the longest. The others are then run,
plain and speculative taking turns. Realised is the time of all plain rounds over the time of all
speculative ones, medians over repeats for each prompt; the reading of prompts is not in it, and
once more with it. Both are tokens per round over price, so the record says which of the two is off.

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
from outpace.planner import Machine, Survey, Surveying, Wanted, interval, measure_machine
from outpace.planner.drafting import DRAFT_KS
from outpace.planner.promises import speedup_of, tokens_of
from pairs import sampling

LONGEST = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo-draft")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--rules", nargs="+", default=["token", "block"])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="planning")
    options = parser.parse_args()
    texts = held_out_prompts(options.prompts)
    seen, later = texts[::2], texts[1::2]
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        for rule in options.rules if temperature else options.rules[:1]:
            generator = outpace.load(
                options.model,
                options.drafter,
                LONGEST,
                verifier=rule,
                dtype=options.dtype,
                device=options.device,
                max_batch=8,
            )
            machine, survey = planned(generator, seen, temperature, rule, options)
            for k in options.k:
                row = {"temperature": temperature, "rule": rule, "k": k}
                row |= predicted(machine, survey, k, len(later))
                row |= realised(generator, later, temperature, k, options)
                row["predicted_over_realised"] = round(row["predicted"] / row["realised"], 3)
                row["replayed_over_realised"] = round(row["replayed"] / row["realised"], 3)
                rows.append(row)
                print(row, flush=True)
    errors = [abs(row["predicted_over_realised"] - 1) for row in rows]
    within = sum(error <= 0.1 for error in errors)
    print(f"within 10 %: {within} of {len(rows)}, at most {max(errors):.1%} off", flush=True)
    record(options.name, rows)


def planned(
    generator: Generator, prompts: Sequence[str], temperature: float, rule: str, options: Any
) -> tuple[Machine, Survey]:
    """What the plan's measurements are, with every K run as well."""
    engine, tokenizer = generator.engine, generator.tokenizer
    assert tokenizer is not None
    wanted = Wanted(
        prompts=[tokenizer.encode(prompt) for prompt in prompts],
        temperatures=(temperature,),
        tokens=options.tokens,
    )
    machine = measure_machine(
        engine.target,
        wanted.typical,
        temperatures=(temperature,),
        batches=(),
        max_len=wanted.max_len(engine.target),
        tokens=wanted.tokens,
        tokenizer=tokenizer,
    )
    surveying = Surveying(options.drafter, engine, machine, wanted, tokenizer)
    survey = surveying.survey(temperature, rule, sorted({*DRAFT_KS, *options.k, LONGEST}))
    runs = {k: surveying.texts(k, temperature, rule) for k in options.k if k != LONGEST}
    return machine, replace(survey, counted={**survey.counted, **runs}, _replayed={})


def predicted(machine: Machine, survey: Survey, k: int, coming: int) -> dict[str, Any]:
    """The speedup by runs with this K, with what so many other prompts will show; and replayed."""
    figure = speedup_of(machine, survey, k, 1)
    value, low, high = interval(survey.texts(k), figure, coming=coming)
    longest = {survey.longest: survey.counted[survey.longest]}
    replays = replace(survey, counted=longest, _replayed={})
    return {
        "predicted": round(value, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "replayed": round(figure(replays.texts(k)), 3),
        "predicted_tokens": round(tokens_of(survey.texts(k)), 3),
        "predicted_price": round(tokens_of(survey.texts(k)) / value, 3),
        "c": round(survey.added.step(1) / machine.passes(1, 1), 4),
        "times_vary_by": round(machine.spread, 3),
    }


def realised(
    generator: Generator, prompts: Sequence[str], temperature: float, k: int, options: Any
) -> dict[str, Any]:
    """Plain and speculative decoding of these prompts, in turn."""
    engine = generator.engine
    plain = Generator(engine.target, tokenizer=generator.tokenizer, max_batch=1)
    params = sampling(temperature, options.tokens)
    rounds: dict[bool, list[float]] = {False: [], True: []}
    whole: dict[bool, list[float]] = {False: [], True: []}
    tokens = passes = 0
    with engine.fixed(k):
        for runner in (plain, generator):
            runner.generate(prompts[0], params=params)  # warm
        for prompt in prompts:
            spent: dict[bool, list[Any]] = {False: [], True: []}
            for _ in range(options.repeats):
                for fast, runner in ((False, plain), (True, generator)):
                    spent[fast].append(runner.generate(prompt, params=params).stats)
            for fast, stats in spent.items():
                rounds[fast].append(statistics.median(s.round_seconds for s in stats))
                whole[fast].append(statistics.median(s.seconds for s in stats))
            tokens += spent[True][-1].emitted
            passes += spent[True][-1].rounds
    return {
        "realised": round(sum(rounds[False]) / sum(rounds[True]), 3),
        "realised_with_prefill": round(sum(whole[False]) / sum(whole[True]), 3),
        "realised_tokens": round(tokens / passes, 3),
        "realised_price": round(tokens / passes * sum(rounds[True]) / sum(rounds[False]), 3),
    }


if __name__ == "__main__":
    main()
