"""Trees of equal size beside each other, and what Sequoia's tree promises beside what it keeps.

Chains, k-ary trees, Sequoia's and dynamic ones of 4 to 64 nodes, at temperature 0 and 1:
tokens per pass over all rounds, and medians over prompts of tokens per second over plain
decoding's, of runs that take turns. Sequoia's trees are measured on other prompts of the
same load. With --untimed there are no times: that is done either way round, and every rule for
trees is run at temperature 1 with the draws that suit it.

    python benchmarks/trees.py
    python benchmarks/trees.py --untimed --name trees-untimed
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import record
from outpace import SamplingParams, Stats
from outpace.assembly import Assembly
from outpace.bench.loads import load_prompts
from outpace.drafters import ModelDrafter, parse
from outpace.generator import Generator
from outpace.planner import Fit, fit, measure_acceptance, measure_costs
from outpace.trees import StaticBuilder, parse_tree
from outpace.trees.draw import summary
from outpace.verifiers import make_verifier
from pairs import pair_folders

K_ARY = {4: "2x1", 8: "2x1x1x1", 16: "4x1x1x1", 32: "2x3x1x1x1x1", 64: "4x3x1x1x1x1"}
DEPTH = {4: 3, 8: 4, 16: 6, 32: 8, 64: 10}
"""Of dynamic trees."""

DEPTHS = 12
"""Of Sequoia's trees, at most."""

RULES = (
    ("token", "2x2x1x1:draw=without"),
    ("token", "2x2x1x1:draw=with"),
    ("kseq", "2x2x1x1:draw=with"),
    ("traversal", "2x2x1x1:draw=without"),
    ("traversal", "2x2x1x1:draw=with"),
    ("match", "2x2x1x1:draw=top"),
    ("coupled", "2x2x1x1:draw=without"),
    ("token", "chains:3,4,draw=with"),
    ("traversal", "chains:3,4,draw=with"),
    ("multipath", "chains:3,4,draw=with"),
    ("token", "chain:4"),
    ("block", "chain:4"),
)


@dataclass(frozen=True)
class Case:
    """How one of them drafts: a tree by name, or a builder; a rule for temperatures above 0."""

    name: str
    size: int
    tree: Any
    rule: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped"])
    parser.add_argument("--loads", nargs="+", default=["function", "free"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(K_ARY))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--promise-prompts", type=int, default=64)
    parser.add_argument("--untimed", action="store_true")
    parser.add_argument("--name", default="trees")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"sizes": [], "rules": [], "promises": []}
    with tempfile.TemporaryDirectory() as scratch:
        for pair in options.pairs:
            bench = Bench(pair, *pair_folders(pair, Path(scratch)), options)
            for load in options.loads:
                for temperature in options.temperatures:
                    fits = bench.fits(load, temperature)
                    found["promises"] += bench.promises(load, temperature, fits)
                    if options.untimed:  # the other way round, too
                        others = bench.fits(load, temperature, half=0)
                        found["promises"] += bench.promises(load, temperature, others, half=1)
                    else:
                        found["sizes"] += bench.sizes(load, temperature, fits)
            if options.untimed:
                found["rules"] += bench.rules(options.loads[0])
    record(options.name, found)


class Bench:
    """A pair, loaded once."""

    def __init__(self, pair: str, target: Path, draft: Path, options: argparse.Namespace) -> None:
        self.pair, self.o = pair, options
        assembly = Assembly(str(target))
        self.plain = assembly.load()
        blueprint = parse(str(draft))
        assembly.check_drafter(blueprint)
        built = blueprint.build(self.plain.engine.target, lambda what, done, total: None)
        assert isinstance(built, ModelDrafter)
        self.draft = built.model

    def generator(self, tree: Any, rule: str, batch: int = 1) -> Generator:
        draw = make_verifier(rule).siblings
        builder = None if tree is None else parse_tree(tree, draw)
        drafter = ModelDrafter(self.draft, "draft", builder)
        target, tokenizer = self.plain.engine.target, self.plain.tokenizer
        verifier = make_verifier(rule)
        return Generator(target, drafter, tokenizer=tokenizer, verifier=verifier, max_batch=batch)

    def prompts(self, load: str) -> tuple[list[list[int]], list[list[int]]]:
        """Of a load by turns: to run, and to measure acceptance on."""
        tokenizer, o = self.plain.tokenizer, self.o
        assert tokenizer is not None
        ids = [tokenizer.encode(p) for p in load_prompts(load, 2 * o.promise_prompts)]
        return ids[::2], ids[1::2]

    def fits(self, load: str, temperature: float, half: int = 1) -> dict[int | None, Fit]:
        """Sequoia's trees of all sizes and of any, by recursive rejection without replacement."""
        engine, prompts = self.generator("2x1", "token", batch=8).engine, self.prompts(load)[half]
        how: dict[str, Any] = {"temperature": temperature, "draw": "without"}
        seen = measure_acceptance(engine, prompts, tokens=self.o.tokens, **how)
        costs = measure_costs(engine, prompts[0], most_nodes=max(self.o.sizes), **how)
        sizes = (*self.o.sizes, None)
        return {n: fit(temperature, seen, costs, max(self.o.sizes), DEPTHS, n) for n in sizes}

    def sizes(
        self, load: str, temperature: float, fits: dict[int | None, Fit]
    ) -> list[dict[str, Any]]:
        cases = []
        for size in self.o.sizes:
            sequoia = StaticBuilder(fits[size].choice.tree, "without")
            cases += [
                Case("chain", size, f"chain:{size}", "block"),
                Case(f"k-ary {K_ARY[size]}", size, K_ARY[size], "traversal"),
                Case(f"sequoia {summary(sequoia.tree)}", size, sequoia, "traversal"),
                Case("dynamic", size, f"dynamic:{size},{DEPTH[size]}", "match"),
            ]
        free = fits[None].choice.tree
        if len(free):
            found = f"sequoia of any size: {summary(free)}"
            cases.append(Case(found, len(free), StaticBuilder(free, "without"), "traversal"))
        cases.append(Case("chain, K = 4", 4, "chain:4", "token"))
        return self.run(cases, load, temperature)

    def rules(self, load: str) -> list[dict[str, Any]]:
        """Tokens per pass at temperature 1, in batches."""
        prompts = self.prompts(load)[0]
        params = SamplingParams(temperature=1.0, max_new_tokens=self.o.tokens, eos_token_ids=())
        rows = []
        for rule, tree in RULES:
            generator = self.generator(tree, rule, batch=16)
            generator.generate(prompts, params=params, seed=list(range(len(prompts))))
            per_pass = round(generator.engine.stats.tokens_per_pass, 3)
            row = {"pair": self.pair, "load": load, "rule": rule, "tree": tree}
            rows.append(row | {"tokens per pass": per_pass})
            print(rows[-1], flush=True)
        return rows

    def run(self, cases: list[Case], load: str, temperature: float) -> list[dict[str, Any]]:
        """Every case beside plain decoding, in turns."""
        o, prompts = self.o, self.prompts(load)[0][: self.o.prompts]
        runs = {"plain": self.plain}
        runs |= {f"{c.rule} {c.name} {c.size}": self.generator(c.tree, c.rule) for c in cases}
        speeds = {name: [[] for _ in prompts] for name in runs}
        stats = {name: Stats() for name in runs}
        for repeat in range(-1, o.repeats):
            for i, ids in enumerate(prompts[:1] if repeat < 0 else prompts):
                params = SamplingParams(
                    temperature=temperature, seed=i, max_new_tokens=o.tokens, eos_token_ids=()
                )
                for name, generator in runs.items():
                    began = time.perf_counter()
                    result = generator.generate(ids, params=params)
                    seconds = time.perf_counter() - began
                    if repeat >= 0:
                        speeds[name][i].append(len(result.token_ids) / seconds)
                        stats[name] = stats[name].merge(result.stats)
        median = {n: [statistics.median(s) for s in per] for n, per in speeds.items()}
        rows = []
        for case in cases:
            name = f"{case.rule} {case.name} {case.size}"
            ratio = [a / b for a, b in zip(median[name], median["plain"], strict=True)]
            seen = stats[name]
            rows.append(
                {
                    "pair": self.pair,
                    "load": load,
                    "temperature": temperature,
                    "tree": case.name,
                    "nodes": case.size,
                    "rule": case.rule if temperature else "greedy",
                    "tokens per pass": round(seen.tokens_per_pass, 2),
                    "speedup": round(statistics.median(ratio), 2),
                    "draft ms per round": round(1e3 * seen.draft_seconds / seen.rounds, 3),
                    "target ms per round": round(1e3 * seen.target_seconds / seen.rounds, 3),
                }
            )
            print(rows[-1], flush=True)
        return rows

    def promises(
        self, load: str, temperature: float, fits: dict[int | None, Fit], half: int = 0
    ) -> list[dict[str, Any]]:
        """What Sequoia's programme expects of its tree, and what rounds with it emit."""
        prompts = self.prompts(load)[half]
        rows = []
        for size in self.o.sizes:
            found = fits[size]
            generator = self.generator(found.choice.tree, "token", batch=8)
            params = SamplingParams(
                temperature=temperature, max_new_tokens=self.o.tokens, eos_token_ids=()
            )
            results = generator.generate(prompts, params=params, seed=list(range(len(prompts))))
            # The end cuts last rounds off.
            rounds = sum(r.stats.rounds - 1 for r in results)
            emitted = sum(_but_the_last_round(r) for r in results)
            rows.append(
                {
                    "pair": self.pair,
                    "load": load,
                    "temperature": temperature,
                    "tree": summary(found.choice.tree),
                    "expected": round(found.choice.tokens, 3),
                    "replayed": round(found.replayed, 3),
                    "realised": round(emitted / rounds, 3),
                    "expected over realised": round(found.choice.tokens * rounds / emitted, 3),
                    "rounds": rounds,
                }
            )
            print(rows[-1], flush=True)
        return rows


def _but_the_last_round(result: Any) -> int:
    """Tokens of all rounds but the last."""
    depths = [event.depth for event in result.tokens]
    last = len(depths) - 1 - depths[::-1].index(1)
    return last


if __name__ == "__main__":
    main()
