"""Is it ever slower than plain decoding, and does it find the best K?

Four questions, in one run each, those who are compared taking turns, so that a slow moment of the
machine is every one's. In "grid" a turn is one token per sequence. In the others, where a dozen
engines are compared, it is --texts prompts from their first token to their last: between two rounds
of one all others would run and drive what it keeps out of the caches, and who chooses keeps more.
All ratios are of decoding alone: prefill, the same pass of the target for every one of them, would
bring each ratio nearer to 1, and it comes in lumps that no turns share. A drafter's reading of the
prompt counts, whenever it reads.

    python benchmarks/never_slower.py grid      drafters x loads x temperatures x batches:
        seconds of plain decoding over those with k="auto", median of repeats, of which there are
        more where that is in doubt, and over those with fixed K, of one repeat; "prefill" is its
        share of the seconds of plain decoding, and "prefill, auto" how fast auto admits beside
        plain. There are two engines of plain decoding and of auto, whose means are compared;
        "plain again" and "auto again", of the second ones over the first of plain decoding, show
        how far engines that are alike differ
    python benchmarks/never_slower.py best      k="auto" beside every fixed K
    python benchmarks/never_slower.py change    a load that changes half-way: seconds behind the
        first 128 tokens of the new load beside the best fixed K on it
    python benchmarks/never_slower.py drafters  drafter="auto" beside every single drafter

Hostile drafters: "random" has the draft's shape and random weights, "self" is the target itself,
as dear as it is. "two loads" takes its prompts from "data" first and then from "free".
Requests have no seed unless --seeded. Every repeat takes the same prompts; the engines stay, unless
"grid" repeats a cell more often, but drafters forget the texts, and "cold" is the first repeat
alone, in which nothing is known. (On CUDA "grid" has one before that, which does not count: graphs
are recorded in it.)
"best" and "drafters" run --engines of those that choose, single drafters with k="auto" among them,
as what one learns first stays with it: their mean is held against the best. A fixed K, or a single
drafter, that took a tenth longer than the best of them in two repeats is out of the others. What
memory an engine gets makes it faster or slower than another for good: so "best", "change" and
"drafters" are asked in --processes of their own, one after the other.
The best in hindsight is that of one half of the processes (or, in a single one, of the repeats),
and is held against auto in the other: the best of many noisy ones is the luckiest, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from environment import record
from outpace import SamplingParams
from outpace.assembly import Assembly
from outpace.bench.loads import LOADS, load_prompts
from outpace.drafters import CascadeDrafter, Drafter, ModelDrafter, parse
from outpace.generator import Generator
from outpace.models.loading import load_model
from pairs import pair_folders

GRID = (
    *("DRAFT", "ngram", "suffix", "recycling", "int4", "early-exit:7"),
    *("suffix+DRAFT", "random", "self"),
)
SINGLE = ("DRAFT", "ngram", "suffix", "recycling", "int4")
FIXED = (1, 2, 3, 4, 5, 6, 8, 12, 16)
TWO_LOADS = "two loads"
BOUND, MOST = 0.97, 5
"""Of the grid: cells that are not above the first by two standard errors are repeated so many times
as often at most, plain decoding and auto alone, each time by engines built anew, as what memory one
gets and what it learns first stay with it. All repeats count, but for the cold one of those."""

AGAIN = ("plain again", "auto again")

BEHIND = 128
"""Tokens of a new load behind which the pace is taken."""

OUT, BY = 2, 1.1
"""Of those compared with the best: whoever took so many times as long as the fastest of them, in so
many repeats together, is out of the rest."""


Spent = dict[str, list[float]]
"""Seconds of each of those compared."""

Sample = tuple[dict[str, Any], int, Spent]
"""What was asked, repeats that do not count, and what was taken."""


class Bench:
    """A pair, its drafters, and prompts."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        target, draft = pair_folders(options.pair, scratch)
        self.assembly = Assembly(str(target), None)
        self._model = "demo" if options.pair == "shipped" else str(target)
        self.plain = self.assembly.load()
        self.target, self.tokenizer = self.plain.engine.target, self.plain.tokenizer
        self._draft = str(draft)
        self._kept: dict[str, Drafter] = {}
        self._order = random.Random(options.process or 0)

    def drafter(self, name: str) -> Drafter:
        """A new one; weights are read once."""
        names = name.split("+")
        if len(names) > 1:
            return CascadeDrafter([self.drafter(part) for part in names])
        if name not in ("DRAFT", "int4", "int8", "random", "self"):
            return self._build(name)
        if name not in self._kept:
            if name == "self":
                self._kept[name] = ModelDrafter(self.target, name)
            elif name == "random":
                self._kept[name] = ModelDrafter(self._random(), name)
            else:
                self._kept[name] = self._build(self._draft if name == "DRAFT" else name)
                self._kept[name].name = name  # no path of this machine
        return copy.copy(self._kept[name])

    def _build(self, name: str) -> Drafter:
        blueprint = parse(name)
        self.assembly.check_drafter(blueprint)
        return blueprint.build(self.target, lambda what, done, total: None)

    def _random(self) -> Any:
        """The draft with other weights of the same sizes."""
        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as folder:
            for file in Path(self._draft).iterdir():
                (Path(folder) / file.name).write_bytes(file.read_bytes())
            path = Path(folder) / "model.safetensors"
            generator = torch.Generator().manual_seed(0)
            weights = {
                name: torch.randn(w.shape, generator=generator).mul(0.05).to(w.dtype)
                for name, w in load_file(path).items()
            }
            save_file(weights, path, metadata={"format": "pt"})
            source = Assembly(folder, None).source
            return load_model(source, self.target.dtype, self.target.device)

    def generator(self, name: str | None, k: Any, batch: int) -> Generator:
        drafter = None if name is None else self.drafter(name)
        return Generator(self.target, drafter, k, tokenizer=self.tokenizer, max_batch=batch)

    def pairs(self, name: str, batch: int) -> dict[str, Generator]:
        """Two engines of plain decoding and two that choose."""
        plain = {who: self.generator(None, 0, batch) for who in twice("plain")}
        return plain | {who: self.generator(name, "auto", batch) for who in twice("auto")}

    def automatic(self) -> Generator:
        """Whose drafters it finds itself."""
        return Assembly(self._model, max_batch=1).load()

    def prompts(self, load: str, count: int) -> list[list[int]]:
        assert self.tokenizer is not None
        if load == TWO_LOADS:
            texts = load_prompts("data", count // 2) + load_prompts("free", count - count // 2)
        else:
            texts = load_prompts(load, count)
        return [self.tokenizer.encode(text) for text in texts]

    def params(self, temperature: float, index: int = 0) -> SamplingParams:
        seed = index if self.options.seeded else None
        return SamplingParams(
            temperature=temperature,
            seed=seed,
            max_new_tokens=self.options.tokens,
            eos_token_ids=(),
        )

    def seconds(
        self,
        runs: Mapping[str, Generator],
        prompts: Sequence[list[int]],
        temperature: float,
        repeats: int,
    ) -> tuple[Spent, Spent]:
        """Of decoding and of prefill: of each, a number per repeat."""
        decoding: Spent = {}
        prefill: Spent = {}
        for _ in range(repeats):
            out = beaten(of_kinds(decoding))
            some = {name: run for name, run in runs.items() if kind(name) not in out}
            forget(some)
            both = self.in_turns(some, prompts, temperature)
            for spent, found in zip((decoding, prefill), both, strict=True):
                add(spent, {name: [sum(seconds)] for name, seconds in found.items()})
        return decoding, prefill

    def in_turns(
        self, runs: Mapping[str, Generator], prompts: Sequence[list[int]], temperature: float
    ) -> tuple[Spent, Spent]:
        """Of decoding and of prefill: of each, a number per prompt, or per batch. Each turn is in
        another order: a machine's slow moments last for a second or two."""
        decoding, prefill = ({name: [] for name in runs} for _ in range(2))
        size = next(iter(runs.values())).engine.free_slots
        batches = [(start, prompts[start : start + size]) for start in range(0, len(prompts), size)]
        piece, whole = self.options.piece, not self.options.piece
        turn = self.options.texts if whole else 1
        for first in range(0, len(batches), turn):
            streams: dict[str, Iterator[Any]] = {}
            for name in self._order.sample(list(runs), len(runs)):
                for start, some in batches[first : first + turn]:
                    params = [self.params(temperature, start + i) for i in range(len(some))]
                    stream = runs[name].stream(list(some), params=params)
                    reading, seconds = self._admitted(runs[name])
                    prefill[name].append(seconds)
                    decoding[name].append(reading)
                    if whole:
                        decoding[name][-1] += _timed(stream)[1]
                    streams[name] = stream
            tokens = 0 if whole else piece * len(batches[first][1])
            while streams and not whole:
                for name in self._order.sample(list(streams), len(streams)):
                    got, seconds = _timed(islice(streams[name], tokens))
                    decoding[name][-1] += seconds
                    if got < tokens:
                        del streams[name]
        return decoding, prefill

    @staticmethod
    def _admitted(run: Generator) -> tuple[float, float]:
        """Seconds that the drafter takes to read prompts that wait, and all else that admits
        them."""
        began, before = time.perf_counter(), run.engine.stats.reading_seconds
        with torch.inference_mode():
            run.engine.admit()
        reading = run.engine.stats.reading_seconds - before
        return reading, time.perf_counter() - began - reading


def _timed(stream: Iterator[Any]) -> tuple[int, float]:
    """How many there were of it, and what that took."""
    began = time.perf_counter()
    return sum(1 for _ in stream), time.perf_counter() - began


def add(spent: Spent, more: Spent) -> None:
    for name, seconds in more.items():
        spent[name] = spent.get(name, []) + seconds


def forget(runs: Mapping[str, Generator]) -> None:
    """The texts of these very prompts, as drafters remember them."""
    for generator in runs.values():
        if generator.engine.drafter is not None:
            generator.engine.drafter.forget()


def grid(bench: Bench) -> Iterator[dict[str, Any]]:
    o = bench.options
    for batch in o.batches:
        for load in o.loads:
            prompts = bench.prompts(load, max(o.prompts, batch))
            for temperature in o.temperatures:
                for name in o.drafters:
                    runs = bench.pairs(name, batch)
                    fixed = {f"K={k}": bench.generator(name, k, batch) for k in o.k}
                    spent: Spent = {}
                    prefill: Spent = {}
                    if bench.target.device.type == "cuda":
                        bench.seconds(runs | fixed, prompts, temperature, 1)
                    for done in range(MOST * o.repeats):
                        if done >= o.repeats and not doubtful(both(spent)):
                            break
                        if done and done % o.repeats == 0:
                            runs = bench.pairs(name, batch)
                            bench.seconds(runs, prompts, temperature, 1)
                        some = runs if done else runs | fixed
                        more, read = bench.seconds(some, prompts, temperature, 1)
                        add(spent, more)
                        add(prefill, read)
                    row = {"load": load, "temperature": temperature, "batch": batch}
                    row |= {"drafter": name, "repeats": len(spent["auto"])}
                    for who in AGAIN:
                        row[who] = round(statistics.median(over(spent["plain"], spent[who])), 3)
                    row |= ratios(both(spent))
                    yield row | admission(spent, prefill) | choices(runs["auto"])


def twice(who: str) -> tuple[str, str]:
    return who, f"{who} again"


def both(spent: Spent) -> Spent:
    """Of two engines alike the mean: what memory one gets makes it faster or slower than another,
    by half a hundredth and for good."""
    found = {name: seconds for name, seconds in spent.items() if name not in AGAIN}
    for who in ("plain", "auto"):
        pairs = zip(*(spent[name] for name in twice(who)), strict=True)
        found[who] = [statistics.fmean(pair) for pair in pairs]
    return found


def admission(spent: Spent, prefill: Spent) -> dict[str, float]:
    """What prefill is of plain decoding with it, and plain's seconds of it over auto's."""
    read, decoded = sum(prefill["plain"]), sum(spent["plain"])
    faster = statistics.median(over(prefill["plain"], prefill["auto"]))
    return {"prefill": round(read / (read + decoded), 3), "prefill, auto": round(faster, 3)}


def ratios(spent: Spent) -> dict[str, Any]:
    """Plain seconds over each one's: medians of repeats, of which some have fewer, and the first
    repeat's of auto."""
    found: dict[str, Any] = {}
    for name, seconds in spent.items():
        if name != "plain":
            each = over(spent["plain"], seconds)
            found[name] = round(statistics.median(each), 3)
            if name == "auto":
                found["auto, cold"] = round(each[0], 3)
    return found


def over(plain: Sequence[float], seconds: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(plain, seconds, strict=False)]


def doubtful(spent: Spent) -> bool:
    """Whether auto may be below the bound. How far one repeat is from another does not follow from
    the first, which is cold."""
    each = over(spent["plain"], spent["auto"])
    if len(each) < 3:
        return True
    error = statistics.stdev(each[1:]) / math.sqrt(len(each))
    return statistics.median(each) - 2 * error < BOUND


def choices(generator: Generator) -> dict[str, Any]:
    """What was chosen how often, by one engine."""
    stats, controller = generator.engine.stats, generator.engine.controller
    assert controller is not None
    report = controller.report()
    return {
        "mean K": round(stats.draft_steps / stats.rounds, 2),
        "plain rounds": round(1 - stats.drafted_rounds / stats.rounds, 3),
        "drafted by": stats.drafters,
        "probe share": round(report.probe_share, 4),
    }


def best(bench: Bench) -> Iterator[Sample]:
    o = bench.options
    for load in o.loads:
        prompts = bench.prompts(load, o.prompts)
        for temperature in o.temperatures:
            for name in o.drafters:
                runs = {"plain": bench.generator(None, 0, 1)}
                runs |= several(lambda name=name: bench.generator(name, "auto", 1), o.engines)
                runs |= {f"K={k}": bench.generator(name, k, 1) for k in o.k}
                spent, _ = bench.seconds(runs, prompts, temperature, o.repeats)
                yield {"load": load, "temperature": temperature, "drafter": name}, 1, spent


def several(build: Callable[[], Generator], count: int, who: str = "auto") -> dict[str, Generator]:
    """The first is "auto", or whatever else they are."""
    return {f"{who} {i}" if i else who: build() for i in range(count)}


def kind(name: str) -> str:
    """Of a single drafter's engines the first one's name; those of auto are told apart."""
    first = name.split(" ")[0]
    return first if first in SINGLE else name


def of_kinds(spent: Spent) -> Spent:
    """Of engines of one kind the mean."""
    kinds: dict[str, list[list[float]]] = {}
    for name, seconds in spent.items():
        kinds.setdefault(kind(name), []).append(seconds)
    return {
        name: [statistics.fmean(some) for some in zip(*each, strict=True)]
        for name, each in kinds.items()
    }


def beaten(spent: Spent, skip: int = 1) -> set[str]:
    """Of many fixed K, or single drafters, those that are far from the best of them."""
    many = {n: s for n, s in spent.items() if n.startswith("K=") or n in SINGLE}
    seconds = {n: s[skip : skip + OUT] for n, s in many.items()}
    if len(seconds) < 2 or len(next(iter(seconds.values()))) < OUT:
        return set()
    best = min(map(sum, seconds.values()))
    return {n for n, s in seconds.items() if sum(s) > BY * best}


def beside_best(head: Mapping[str, Any], skip: int, processes: Sequence[Spent]) -> dict[str, Any]:
    """How fast all are beside plain decoding, and auto beside the best of the others: of engines
    the mean.

    Args:
        head: what the row is of.
        skip: repeats that are not counted: before the first nothing is learned.
        processes: of each what its engines took.
    """
    if len(processes) > 1:
        samples = [paces(spent, skip) for spent in processes]
    else:
        samples = [paces(processes[0], skip + at, 2) for at in (0, 1)]
    autos = [name for name in samples[0] if name.startswith("auto")]
    others = [name for name in samples[0] if name not in autos]
    whole, *halves = (mean(some) for some in (samples, samples[::2], samples[1::2]))

    def behind(pace: Mapping[str, float], top: str, who: Sequence[str] = autos) -> float:
        return pace[top] / statistics.fmean(pace[auto] for auto in who)

    tops = [min(others, key=lambda n, pace=pace: pace[n]) for pace in (whole, *halves)]

    def held(who: Sequence[str]) -> float:
        """Beside the best of one half, as the other half has it."""
        judged = zip(halves, reversed(tops[1:]), strict=True)
        return round(statistics.fmean(behind(pace, top, who) for pace, top in judged), 3)

    row = dict(head) | {name: round(1 / pace, 3) for name, pace in whole.items()}
    if skip:
        cold = [paces(spent, 0, len(spent["plain"])) for spent in processes]
        row["auto, cold"] = round(1 / statistics.fmean(pace[autos[0]] for pace in cold), 3)
    return row | {
        "best": tops[0],
        "auto/best": held(autos),
        "engines": {auto: held([auto]) for auto in autos},
        "processes": [round(behind(pace, tops[0]), 3) for pace in samples],
    }


def paces(spent: Spent, first: int, step: int = 1) -> dict[str, float]:
    """Seconds over those of plain decoding, in every so many-th of the repeats that one took part
    in."""
    return {
        name: sum(seconds[first::step]) / sum(spent["plain"][first : len(seconds) : step])
        for name, seconds in spent.items()
    }


def mean(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(pace[name] for pace in samples) for name in samples[0]}


def change(bench: Bench) -> Iterator[Sample]:
    """To each load from each other one, and from one temperature to another: seconds behind the
    first tokens of the new one. In every repeat new engines begin with the old load; what a K is
    worth does not depend on it."""
    o = bench.options
    moves = {(b, t): [(a, t) for a in o.loads if a != b] for b in o.loads for t in o.temperatures}
    for load in o.loads:
        moves.setdefault((load, 0.0), []).append((load, 1.2))
        moves.setdefault((load, 1.2), []).append((load, 0.0))
    skipped = -(-BEHIND // o.tokens)  # prompts
    texts = {load: bench.prompts(load, o.prompts) for load in o.loads}
    for name in o.drafters:
        fixed = {"plain": bench.generator(None, 0, 1)}
        fixed |= {f"K={k}": bench.generator(name, k, 1) for k in o.k}
        for (load, temperature), sources in moves.items():
            spent: Spent = {}
            for _ in range(o.repeats):
                forget(fixed)
                runs = {name: run for name, run in fixed.items() if name not in beaten(spent, 0)}
                for source in sources:
                    run = runs[f"auto from {source[0]}, T={source[1]}"] = bench.generator(
                        name, "auto", 1
                    )
                    for i, ids in enumerate(texts[source[0]]):
                        run.generate(ids, params=bench.params(source[1], i))
                seconds, _ = bench.in_turns(runs, texts[load], temperature)
                add(spent, {run: [sum(each[skipped:])] for run, each in seconds.items()})
            yield {"drafter": name, "load": load, "temperature": temperature}, 0, spent


def drafters(bench: Bench) -> Iterator[Sample]:
    o = bench.options
    for load in o.loads:
        prompts = bench.prompts(load, o.prompts)
        for temperature in o.temperatures:
            runs = {"plain": bench.generator(None, 0, 1)}
            runs |= several(bench.automatic, o.engines)
            for name in SINGLE:
                runs |= several(lambda name=name: bench.generator(name, "auto", 1), o.engines, name)
            spent, _ = bench.seconds(runs, prompts, temperature, o.repeats)
            head = {"load": load, "temperature": temperature}
            yield head | choices(runs["auto"]), 1, of_kinds(spent)


BESIDE_BEST: dict[str, Callable[[Bench], Iterator[Sample]]] = {
    "best": best,
    "change": change,
    "drafters": drafters,
}


LEAST = {"grid": 1, "best": 3, "change": 2, "drafters": 3}
"""Repeats: halves of them are compared, the first apart where engines stay."""


def samples(process: int) -> Iterator[Sample]:
    """Of this command in a process of its own."""
    command = [sys.executable, *sys.argv, "--process", str(process)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise SystemExit(child.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", choices=["grid", *BESIDE_BEST])
    parser.add_argument("--pair", choices=["shipped", "ballasted"], default="shipped")
    parser.add_argument("--drafters", nargs="+")
    parser.add_argument("--loads", nargs="+")
    parser.add_argument("--temperatures", nargs="+", type=float)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--k", nargs="*", type=int, help="fixed K to compare with")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--piece", type=int, help="tokens of a turn, per sequence")
    parser.add_argument("--texts", type=int, default=4, help="prompts of a turn of whole texts")
    parser.add_argument("--engines", type=int, default=3, help="that choose, of best and drafters")
    parser.add_argument("--processes", type=int, default=1, help="of best, change and drafters")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeded", action="store_true")
    parser.add_argument("--name")
    o = parser.parse_args()
    is_grid = o.question == "grid"
    o.k = o.k or ([4] if is_grid else FIXED)
    o.drafters = o.drafters or (GRID if is_grid else ["DRAFT"])
    o.loads = o.loads or ([*LOADS, TWO_LOADS] if is_grid else list(LOADS))
    o.temperatures = o.temperatures or ([0.0, 0.8, 1.2] if is_grid else [0.0, 0.8])
    o.piece = o.piece or (1 if is_grid else 0)
    least = LEAST[o.question]
    if min(o.engines, o.processes, o.texts) < 1 or o.repeats < least:
        parser.error(
            f"'{o.question}' takes --repeats of {least} or more, and --engines, --processes and "
            "--texts of 1 or more"
        )
    if o.question == "change" and o.prompts * o.tokens <= BEHIND:
        parser.error(f"'change' counts what is behind {BEHIND} tokens: raise --prompts or --tokens")
    name = o.name or f"never-slower-{o.question}"
    with tempfile.TemporaryDirectory() as scratch:
        if o.process is not None:
            for sample in BESIDE_BEST[o.question](Bench(o, Path(scratch))):
                print(json.dumps(sample), flush=True)
            return
        rows = []
        if is_grid:
            for row in grid(Bench(o, Path(scratch))):
                rows.append(row)
                print(row, flush=True)
                record(name, rows, show=False)
    found: list[tuple[dict[str, Any], int, list[Spent]]] = []
    for process in range(0 if is_grid else o.processes):
        for i, (head, skip, spent) in enumerate(samples(process)):
            found += [] if process else [(head, skip, [])]
            found[i][2].append(spent)
            rows = [beside_best(*each) for each in found]
            print(rows[i], flush=True)
            record(name, rows, show=False)
    print("worst:", min(rows, key=lambda row: row.get("auto/best", row.get("auto", 1.0))))


if __name__ == "__main__":
    main()
