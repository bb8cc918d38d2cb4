"""What does drafter="auto" lose beside the best single drafter, luck of the machine apart?

The very engines decode the texts of the loads, but their clock goes by prices: a pass over so many
rows, a draft of K tokens, a look-up, a token that is read and a thought take what they took on a
machine on which that was measured, with some noise, whatever they take now. Engines differ by two
hundredths then, where those of one process that are timed in turns may differ by ten.

    python benchmarks/priced.py --measure     # on a machine with nothing else to do
    python benchmarks/priced.py [--prices prices ...]

Per load and temperature, tokens/s of each over plain decoding's, and of "auto" over the best single
drafter's, means of --seeds engines each; the first of --repeats is left out. Of the last "auto",
seconds of its parts, too, and rounds by who drafted, those of the first repeat among them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Virtual:
    """A clock that goes by prices, if there are any, and what has gone by."""

    def __init__(self) -> None:
        self.now, self.spent = 0.0, defaultdict[str, float](float)
        self.prices: dict[str, Any] = {}
        self._rng = random.Random(0)

    def __call__(self) -> float:
        return self.now if self.prices else REAL()

    def begin(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def passes(self, seconds: float, what: str) -> None:
        noise = NOISE * self._rng.gauss(0, 1) + (HICCUP if self._rng.random() < 0.01 else 0.0)
        took = seconds * math.exp(noise)
        self.now += took
        self.spent[what] += took


NOISE, HICCUP = 0.03, 0.4
"""Of what things take: a standard deviation of the logarithm, and what is added to that once in a
hundred times."""

REAL, CLOCK = time.perf_counter, Virtual()
time.perf_counter = CLOCK  # before anything holds on to it

import numpy as np  # noqa: E402

from environment import RESULTS, record  # noqa: E402
from never_slower import Bench, forget  # noqa: E402
from outpace.bench.loads import LOADS  # noqa: E402
from outpace.drafters.base import CertainDrafter  # noqa: E402
from outpace.drafters.model import ModelDrafter  # noqa: E402
from outpace.engine import Engine  # noqa: E402
from outpace.engine.control import Controller  # noqa: E402
from outpace.engine.control.held import Held  # noqa: E402
from outpace.engine.drafting import Drafting  # noqa: E402

SINGLE = ("DRAFT", "ngram", "suffix")
MOST = 16


def behind(cls: type, name: str, then: Callable[..., None]) -> None:
    """Whenever that has run."""
    run = getattr(cls, name)

    def both(self: Any, *args: Any, **options: Any) -> Any:
        found = run(self, *args, **options)
        then(self, *args, **options)
        return found

    setattr(cls, name, both)


def go_by_prices() -> None:
    """Let engines take what that takes by the table."""

    def drafted(self: Any, contexts: Any, lengths: Any, *_: Any) -> None:
        CLOCK.passes(CLOCK.prices["draft"][max(lengths)], "draft")

    def thought(self: Controller, *_: Any) -> None:
        kind = "auto" if len(self.members) > 1 else "single"
        CLOCK.passes(CLOCK.prices["thought"][kind], "thought")

    behind(
        Engine,
        "score",
        lambda self, running, draft: CLOCK.passes(
            CLOCK.prices["round"][draft.tokens.shape[1]], "round"
        ),
    )
    behind(ModelDrafter, "draft", drafted)
    behind(
        CertainDrafter,
        "draft",
        lambda self, *_: CLOCK.passes(CLOCK.prices["look"][self.name], "look"),
    )
    behind(Controller, "_choose", thought)
    catch_up = Drafting._catch_up

    def reads(self: Drafting, m: int, contexts: Any, clock: Any) -> None:
        lacking = sum(self._missed(m, c) for c in contexts)
        CLOCK.passes(lacking * CLOCK.prices["reading"], "reading")
        catch_up(self, m, contexts, clock)

    Drafting._catch_up = reads  # type: ignore[method-assign]


def measure(bench: Bench, o: argparse.Namespace) -> dict[str, Any]:
    """Prices, as controllers of these engines have come to believe them."""
    runs = {"auto": bench.automatic()} | {n: bench.generator(n, "auto", 1) for n in SINGLE}
    thoughts: dict[bool, list[float]] = {True: [], False: []}
    keep = Held.keep

    def kept(self: Held, question: Any, choice: Any, began: float) -> None:
        thoughts[self is runs["auto"].engine.controller._held].append(self._clock() - began)
        keep(self, question, choice, began)

    Held.keep = kept  # type: ignore[method-assign]
    for load in o.loads:
        for temperature in o.temperatures:
            for _ in range(2):
                forget(runs)
                bench.in_turns(runs, bench.prompts(load, o.prompts), temperature)
    known = {name: run.engine.controller._prices for name, run in runs.items()}
    rows = np.arange(1.0, MOST + 2)
    return {
        "round": [float(x) for x in known["auto"].rest(rows, 1)],
        "draft": [float(x) for x in known["DRAFT"].draft(0, 1)],
        "look": {name: known[name].look(0, 1) for name in SINGLE[1:]},
        "reading": known["DRAFT"].reading[0].value,
        "thought": {
            "auto": statistics.median(thoughts[True]),
            "single": statistics.median(thoughts[False]),
        },
    }


def pace(bench: Bench, name: str, load: str, temperature: float, seed: int) -> tuple[float, Any]:
    """Seconds per token by the clock, behind the first repeat, and the engine."""
    o = bench.options
    CLOCK.begin(seed)
    run = bench.automatic() if name == "auto" else bench.generator(name, "auto", 1)
    order, prompts = random.Random(seed), bench.prompts(load, o.prompts)
    for repeat in range(o.repeats):
        if repeat == 1:
            began, emitted = CLOCK.now, run.engine.stats.emitted
            CLOCK.spent.clear()
        forget({name: run})
        for i in order.sample(range(len(prompts)), len(prompts)):
            for _ in run.stream([prompts[i]], params=[bench.params(temperature, i)]):
                pass
    return (CLOCK.now - began) / (run.engine.stats.emitted - emitted), run.engine


def beside_best(bench: Bench, load: str, temperature: float) -> dict[str, Any]:
    """A row."""
    plain = CLOCK.prices["round"][0]

    def engines(who: str) -> list[tuple[float, Any]]:
        seeds = range(bench.options.seeds)
        return [pace(bench, who, load, temperature, seed) for seed in seeds]

    def mean(paces: list[tuple[float, Any]]) -> float:
        return statistics.fmean(seconds for seconds, _ in paces)

    paces = {who: mean(engines(who)) for who in SINGLE}
    autos = engines("auto")
    best, auto = min(paces, key=paces.__getitem__), mean(autos)
    row: dict[str, Any] = {"temperature": temperature, "load": load}
    row |= {who: round(plain / seconds, 3) for who, seconds in (paces | {"auto": auto}).items()}
    row |= {"best": best, "auto/best": round(paces[best] / auto, 3)}
    row["engines"] = [round(paces[best] / seconds, 3) for seconds, _ in autos]
    row["parts"] = {part: round(s, 3) for part, s in sorted(CLOCK.spent.items())}
    row["drafted by"] = dict(autos[-1][1].stats.drafters)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="what things take on this machine")
    parser.add_argument("--prices", nargs="+", default=["prices"], help="records of --measure")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--name")
    o = parser.parse_args()
    if o.repeats < 2:
        parser.error("the first repeat is left out: take --repeats of 2 or more")
    if min(o.seeds, o.prompts) < 1:
        parser.error("take --seeds and --prompts of 1 or more")
    for name in [] if o.measure else o.prices:
        if not (RESULTS / f"{name}.json").exists():
            parser.error(f"there is no record {name!r} in results/: run --measure --name {name}")
    o.pair, o.process, o.seeded, o.tokens, o.piece, o.texts = "shipped", 0, True, 128, 0, 4
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(o, Path(scratch))
        if o.measure:
            record(o.name or "prices", measure(bench, o))
            return
        go_by_prices()
        rows = []
        for name in o.prices:
            content = json.loads((RESULTS / f"{name}.json").read_text())
            CLOCK.prices = content["rows"]
            for temperature in o.temperatures:
                for load in o.loads:
                    row = {"prices": content["environment"]["machine"]}
                    rows.append(row | beside_best(bench, load, temperature))
                    print(rows[-1], flush=True)
                    record(o.name or "priced", rows, show=False)


if __name__ == "__main__":
    main()
