"""What does k="auto" lose by its choices, and what by the time they take?

With a seed, whether the draft's token at a position is the text's follows from that position alone:
its noise is its own, however long drafts are. So texts that were drafted once tell what any K would
have accepted, and a controller replays them in seconds, on a machine whose prices are known, with
any luck of its clock. K 16 and 11 draft them here, and must agree wherever both judge a token;
"unjudged" are positions behind drafts that both accepted as a whole, which count as refused.

    python benchmarks/replay.py [--records never-slower-best-0.8 ...]

What a round of K takes follows from records of `never_slower.py best --seeded`: tokens per round,
as replayed, over tokens/s, mean of the loads. Measured times are off by what was seen there: 7 %
from round to round, a machine that wanders by 1 %, first rounds behind a prompt that take half, a
third and a tenth longer. Per record, load and temperature, tokens/s over those of the best fixed K,
mean of --seeds runs of --repeats times the same texts, the first left out: "choices" with thoughts
that take no time, "auto" with thoughts that take as many plain rounds as --thought.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from environment import RESULTS, record
from outpace import SamplingParams, load
from outpace.bench.loads import LOADS, load_prompts
from outpace.engine.control import Controller, Profile

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))
from simulation import Machine, Run, World  # what the tests made up

MOST, TOKENS = 16, 128
STEP, BEGIN = 0.1, 0.03
"""Of the draft, in plain rounds: how a round's price is shared has no part in what K is best."""

READING = 0.002
NOISE, WANDERS, BEHIND = 0.07, 0.01, (1.55, 1.33, 1.12)

DRAFT = Profile("draft", False, MOST, STEP)

Text = list[int]
"""How many tokens of a draft from a position on are right."""

Texts = dict[str, list[Text]]


def drafted(loads: Sequence[str], temperature: float, count: int) -> tuple[Texts, int]:
    """Of each load its texts; and how many positions nobody judged."""
    found: Texts = {}
    unjudged = 0
    generators = [load("demo", "demo-draft", k, max_batch=1) for k in (MOST, 11)]
    for name in loads:
        texts = found[name] = []
        for seed, prompt in enumerate(load_prompts(name, count)):
            right: list[bool | None] = [None] * TOKENS
            for generator in generators:
                judge(generator, prompt, temperature, seed, right)
            unjudged += right[:-1].count(None)
            text = [0] * (TOKENS + 1)
            for at in reversed(range(TOKENS)):
                text[at] = text[at + 1] + 1 if right[at] else 0
            texts.append(text)
    return found, unjudged


def judge(
    generator: Any, prompt: str, temperature: float, seed: int, right: list[bool | None]
) -> None:
    """Draft a text, and tell of each token whether the draft's was right."""
    engine, tokenizer = generator.engine, generator.tokenizer
    params = SamplingParams(
        temperature=temperature, seed=seed, max_new_tokens=TOKENS, eos_token_ids=()
    )
    request = engine.submit(tokenizer.encode(prompt), params)
    at, most = 0, engine.k
    while engine.busy:
        engine.step()
        accepted = len(request.emitted) - at - 1
        judged = [True] * accepted + [False] * (accepted < min(most, TOKENS - at - 1))
        for i, verdict in enumerate(judged, at):
            if right[i] not in (None, verdict):
                raise AssertionError(f"two K differ at token {i} of seed {seed}")
            right[i] = verdict
        at = len(request.emitted)


def rounds(text: Text, k: int) -> list[int]:
    """Of a fixed K: how far each draft goes."""
    at, found = 0, []
    while at < TOKENS:
        far = min(k, TOKENS - at - 1)
        found.append(far)
        at += min(text[at], far) + 1
    return found


def prices(name: str, texts: Texts) -> tuple[np.ndarray, str]:
    """What rounds of K = 0, 1, ... take, in plain ones, and on which machine."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    ks = [0] + [k for k in range(1, MOST + 1) if f"K={k}" in content["rows"][0]]
    curves = []
    for row in content["rows"]:
        some = texts[row["load"]]
        each = [TOKENS * len(some) / sum(len(rounds(t, k)) for t in some) for k in ks]
        curves.append([e / (row[f"K={k}"] if k else 1.0) for e, k in zip(each, ks, strict=True)])
    mean = np.interp(np.arange(MOST + 1), ks, np.mean(curves, axis=0))
    return mean, content["environment"]["machine"]


class Replay(World):
    """The text that is next."""

    text: Text

    def passed(self, b: int, member: int, at: int, k: int) -> int:
        return min(self.text[at], k)

    def expected(self, b: int, member: int, at: int, k: int) -> float:
        return 1 + min(self.text[at], k)


def fixed(texts: Sequence[Text], price: np.ndarray, k: int) -> float:
    """Plain rounds per token."""
    taken = 0.0
    for text in texts:
        each = price[rounds(text, k)]
        first = min(len(each), len(BEHIND))
        each[:first] *= BEHIND[:first]
        taken += each.sum()
    return taken / (TOKENS * len(texts))


def auto(
    texts: Sequence[Text], price: np.ndarray, repeats: int, seed: int, thought: float
) -> float:
    """Plain rounds per token behind the first repeat."""
    drafts = np.arange(MOST + 1)
    rest = price - np.where(drafts > 0, BEGIN + STEP * drafts, 0.0)
    machine = Machine(
        lambda rows: float(rest[rows - 1]),
        [STEP],
        reading=[READING],
        begin=[BEGIN],
        noise=NOISE,
        drift=WANDERS,
        behind=BEHIND,
    )
    looked = 0

    def clock() -> float:  # is asked before a thought, and behind it
        nonlocal looked
        looked += 1
        return looked * thought

    world = Replay(machine, [DRAFT], [lambda at, depth: 0.5], seed=seed)
    controller = Controller([DRAFT], clock=clock)
    seconds = 0.0
    for repeat in range(repeats):
        for text in texts:
            world.text, run, before = text, Run(), looked
            world.generate(controller, TOKENS, run)
            if repeat:
                seconds += sum(run.seconds) + (looked - before) / 2 * thought
    return seconds / (TOKENS * len(texts) * (repeats - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", nargs="+", default=["never-slower-best-0.8"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8, 1.2])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--thought", type=float, default=0.5, help="plain rounds that one takes")
    parser.add_argument("--name", default="replay")
    o = parser.parse_args()
    if o.repeats < 2:
        parser.error("the first repeat is left out: take --repeats of 2 or more")
    for name in o.records:
        if not (RESULTS / f"{name}.json").exists():
            parser.error(f"there is no record {name!r} in results/: run never_slower.py best")
    texts = {t: drafted(LOADS, t, o.prompts) for t in {0.8, *o.temperatures}}
    rows = []
    for name in o.records:
        price, machine = prices(name, texts[0.8][0])
        for temperature in o.temperatures:
            some, unjudged = texts[temperature]
            for load_name, each in some.items():
                paces = [fixed(each, price, k) for k in range(MOST + 1)]
                best = int(np.argmin(paces))
                row = {"prices": machine, "temperature": temperature, "load": load_name}
                row |= {"unjudged": unjudged, "best": f"K={best}"}
                row["speedup"] = round(float(paces[0] / paces[best]), 3)
                for what, thought in (("choices", 0.0), ("auto", o.thought)):
                    runs = [auto(each, price, o.repeats, s, thought) for s in range(o.seeds)]
                    row[what] = round(float(paces[best]) / statistics.fmean(runs), 3)
                rows.append(row)
                print(row, flush=True)
                record(o.name, rows, show=False)


if __name__ == "__main__":
    main()
