"""Every drafter on four loads, and transformers' prompt lookup and early exit beside them.

Medians over prompts of tokens per second over plain decoding's, of runs that take turns;
tokens per pass, acceptance rate and c (draft step over plain target pass) over all of a
load's rounds. A drafter that remembers begins each pass over the prompts with nothing, and
has then seen the outputs of the prompts before.

    python benchmarks/drafters.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from environment import record
from outpace import SamplingParams, Stats
from outpace.assembly import Assembly
from outpace.audit.hf import TransformersSystem, load_causal_lm
from outpace.bench.loads import LOADS, load_prompts
from outpace.drafters import CascadeDrafter, Drafter, ModelDrafter, parse
from outpace.generator import Generator
from outpace.models.compiled import CompiledDecoder
from outpace.models.loading import inspect_checkpoint
from outpace.models.quantize import QUANTIZATIONS
from pairs import pair_folders

DRAFTERS = (
    "ngram",
    "ngram:branches=3",
    "suffix",
    "suffix:branching=yes",
    "recycling",
    "lookahead",
    "early-exit:7",
    "skip:5-11",
    "int8",
    "int4",
    "int8-own-cache",
    "int4-own-cache",
    "DRAFT",
    "tli:DRAFT",
    "slem:DRAFT",
    "suffix+DRAFT",
    "suffix+int4",
)
OWN = "-own-cache"
"""Behind a name: the same matrices draft on a cache of their own, and read the prompt, too."""

LASTING = {"int8", "int4", f"int8{OWN}", f"int4{OWN}", "DRAFT"}
"""What nothing of a run stays in, and takes long to build."""

PEERS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup": 8},
    "transformers, early exit": {"early_exit": 7},
}

Run = Callable[[list[int], SamplingParams], tuple[int, Stats | None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped"])
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS))
    parser.add_argument("--loads", nargs="+", default=list(LOADS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--adapter", help="of an exit behind 5 layers, by outpace train exit")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--name", default="drafters")
    options = parser.parse_args()
    if options.adapter:
        options.drafters.insert(0, "early-exit:5,ADAPTER")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in options.pairs:
            bench = Bench(*pair_folders(pair, Path(scratch)), options)
            for load in options.loads:
                for temperature in options.temperatures:
                    rows += bench.measure(pair, load, temperature)
    record(options.name, rows)


class Bench:
    """A pair, and who drafts for its target."""

    def __init__(self, target: Path, draft: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._assembly = Assembly(str(target))
        self._plain = self._assembly.load()
        self._paths = {"DRAFT": str(draft), "ADAPTER": str(options.adapter)}
        self._built: dict[str, Drafter] = {}
        for part in {p for name in options.drafters for p in name.split("+")} & LASTING:
            self._built[part] = self._build(part)
        self._peer: Any = None
        if not options.no_peers:
            model = self._plain.engine.target
            self._peer = load_causal_lm(inspect_checkpoint(target), model.dtype, model.device)

    def _build(self, name: str) -> Drafter:
        if name.endswith(OWN):
            target = cast(CompiledDecoder, self._plain.engine.target)
            how = QUANTIZATIONS[name.removesuffix(OWN)]
            return ModelDrafter(target.quantized(how, lambda: None), name)
        for word, path in self._paths.items():
            name = name.replace(word, path)
        blueprint = parse(name)
        self._assembly.check_drafter(blueprint)
        return blueprint.build(self._plain.engine.target, lambda what, done, total: None)

    def _fresh(self, name: str) -> Drafter:
        names = name.split("+")
        # A drafter serves one engine; what is read of a checkpoint may serve many.
        parts = [copy.copy(self._built[p]) if p in LASTING else self._build(p) for p in names]
        return parts[0] if len(parts) == 1 else CascadeDrafter(parts)

    def _runs(self) -> dict[str, Run]:
        """Everybody, with nothing remembered."""
        target, tokenizer = self._plain.engine.target, self._plain.tokenizer
        assert tokenizer is not None
        runs: dict[str, Run] = {}
        drafters = {"plain": None} | {n: self._fresh(n) for n in self._options.drafters}
        for name, drafter in drafters.items():
            generator = Generator(target, drafter, tokenizer=tokenizer, max_batch=1)

            def run(
                ids: list[int], params: SamplingParams, generator: Generator = generator
            ) -> tuple[int, Stats | None]:
                result = generator.generate(ids, params=params)
                return len(result.token_ids), result.stats

            runs[name] = run
        for name, how in PEERS.items() if self._peer is not None else ():
            system = TransformersSystem(self._peer, **how)

            def ask(
                ids: list[int], params: SamplingParams, system: TransformersSystem = system
            ) -> tuple[int, Stats | None]:
                return len(system.sample(ids, params, [0])[0]), None

            runs[name] = ask
        return runs

    def measure(self, pair: str, load: str, temperature: float) -> list[dict[str, Any]]:
        o, tokenizer = self._options, self._plain.tokenizer
        assert tokenizer is not None
        prompts = [tokenizer.encode(p) for p in load_prompts(load, o.prompts)]
        speeds: dict[str, list[list[float]]] = {}
        stats: dict[str, Stats] = {}
        for repeat in range(-1, o.repeats):
            runs = self._runs()
            for i, ids in enumerate(prompts[:1] if repeat < 0 else prompts):
                params = SamplingParams(
                    temperature=temperature, seed=i, max_new_tokens=o.tokens, eos_token_ids=()
                )
                for name, run in runs.items():
                    began = time.perf_counter()
                    count, found = run(ids, params)
                    seconds = time.perf_counter() - began
                    if repeat < 0:
                        continue
                    speeds.setdefault(name, [[] for _ in prompts])[i].append(count / seconds)
                    if found is not None:
                        stats[name] = stats.get(name, Stats()).merge(found)
        median = {n: [statistics.median(s) for s in per] for n, per in speeds.items()}
        rows = []
        for name in speeds:
            base = "transformers" if name.startswith("transformers") else "plain"
            ratio = [a / b for a, b in zip(median[name], median[base], strict=True)]
            row: dict[str, Any] = {"pair": pair, "load": load, "temperature": temperature}
            row |= {"drafter": name, "speedup": round(statistics.median(ratio), 2)}
            row["tokens/s"] = round(statistics.median(median[name]), 1)
            if name in stats and name != "plain":
                row |= _figures(stats[name], stats["plain"])
            rows.append(row)
            print(row, flush=True)
        return rows


def _figures(fast: Stats, plain: Stats) -> dict[str, Any]:
    step = fast.draft_seconds / fast.draft_steps if fast.draft_steps else 0.0
    cost = step / (plain.target_seconds / plain.rounds)
    rate = fast.acceptance_rate
    return {
        "tokens per pass": round(fast.tokens_per_pass, 2),
        "acceptance rate": None if rate is None else round(rate, 2),
        "c": round(cost, 3),
        "draft ms per round": round(1e3 * fast.draft_seconds / fast.rounds, 3),
        "target ms per round": round(1e3 * fast.target_seconds / fast.rounds, 3),
        "rest ms per round": round(
            1e3 * (fast.round_seconds - fast.draft_seconds - fast.target_seconds) / fast.rounds, 3
        ),
    }


if __name__ == "__main__":
    main()
