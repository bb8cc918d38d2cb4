"""What a rule's acceptance is worth in time, and what sampling parameters cost.

Tokens per second over plain decoding with the same parameters, medians over prompts of
runs that take turns: each rule at several temperatures and K; and token verification
under penalties, bans and a JSON schema, with drafts that go through them, too, and with
drafts that do not.

    python benchmarks/rules.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import outpace
from environment import record
from outpace import SamplingParams
from outpace.bench.prompts import held_out_prompts
from outpace.drafters import ModelDrafter
from outpace.generator import Generator
from outpace.verifiers import make_verifier
from pairs import pair_folders, sampling

RULES = ("token", "block", "match", "coupled")
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 200}'
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p 0.9": {"top_p": 0.9},
    "bias": {"logit_bias": {10: 1.0, 11: -1.0}},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "no-repeat-ngram 4": {"no_repeat_ngram": 4},
    "bad words": {"bad_words": ("import", "lambda")},
    "JSON schema": {"json_schema": SCHEMA},
    "a function": {"transforms": (lambda ids, scores: scores * 1.0,)},
}

Contender = tuple[Generator, SamplingParams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped", "ballasted"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 0.8, 1.0])
    parser.add_argument("--k", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.pairs:
            target, draft = pair_folders(name, Path(scratch))
            loaded = outpace.load(str(target), str(draft))
            for temperature in options.temperatures:
                params = sampling(temperature, options.tokens)
                rivals = {"plain": (generator(loaded, 0, "token"), params)} | {
                    f"{rule} K={k}": (generator(loaded, k, rule), params)
                    for k in options.k
                    for rule in RULES
                }
                found = race(rivals, prompts, options.repeats)
                rows.append({"pair": name, "temperature": temperature} | found)
                print(rows[-1], flush=True)
            for setting, given in SETTINGS.items():
                params = replace(sampling(0.8, options.tokens), **given)
                fast, plain = (generator(loaded, k, "token") for k in (4, 0))
                rivals = {
                    "plain": (plain, params),
                    "drafts, too": (fast, params),
                    "target alone": (fast, replace(params, transform_draft=False)),
                    "plain, none": (plain, sampling(0.8, options.tokens)),
                }
                found = race(rivals, prompts, options.repeats)
                rows.append({"pair": name, "parameters": setting} | found)
                print(rows[-1], flush=True)
    record("rules", rows)


def generator(loaded: Generator, k: int, rule: str) -> Generator:
    """Another one of the same weights."""
    target, drafter = loaded.engine.target, loaded.engine.drafter
    assert isinstance(drafter, ModelDrafter)
    return Generator(
        target,
        ModelDrafter(drafter.model) if k else None,
        k,
        tokenizer=loaded.tokenizer,
        eos=loaded.eos_token_ids,
        verifier=make_verifier(rule),
        max_batch=1,
    )


def race(rivals: Mapping[str, Contender], prompts: list[str], repeats: int) -> dict[str, Any]:
    """Tokens/s over those of "plain", per prompt, and their median; tokens per pass beside it."""
    speed: dict[str, list[float]] = {name: [] for name in rivals}
    stats = {name: outpace.Stats() for name in rivals}
    for number, prompt in enumerate([prompts[0], *prompts]):
        taken: dict[str, list[float]] = {name: [] for name in rivals}
        for repeat in range(repeats):
            for name, (runner, params) in rivals.items():
                began = time.perf_counter()
                result = runner.generate(prompt, params=params, seed=repeat)
                seconds = time.perf_counter() - began
                taken[name].append(len(result.token_ids) / seconds)
                stats[name] = stats[name].merge(result.stats)
        if number:  # the first is for warming up
            for name in rivals:
                speed[name].append(statistics.median(taken[name]))
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(per, speed["plain"], strict=True)), 3)
        for name, per in speed.items()
    }
    passes = {name: round(s.tokens_per_pass, 2) for name, s in stats.items()}
    plain = round(statistics.median(speed["plain"]), 1)
    return {"plain_tokens_per_s": plain, "speedup": ratios, "tokens_per_pass": passes}


if __name__ == "__main__":
    main()
