"""Whether the index of past outputs stays flat: 10 thousand tokens held against a million.

Time to add a token one by one and many at once, to look up and draft behind texts that were
not added, and memory per token; medians of rounds that take turns between the sizes.

    python benchmarks/lookup.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np
import torch

from environment import record
from outpace.drafters import Context, Memory, SuffixDrafter
from outpace.models import MarkovModel
from outpace.models.loading import inspect_checkpoint, load_tokenizer
from outpace.training.corpus import standard_library

PROMPT, OUTPUT, NEW = 64, 448, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokenizer = load_tokenizer(inspect_checkpoint("demo"))
    past = _tokens(tokenizer, False, max(options.sizes) + 2**16)
    fresh = _tokens(tokenizer, True, 2**16)
    drafters = {size: _filled(size, past) for size in options.sizes}
    rows: list[dict[str, Any]] = [
        {"tokens": size, "bytes per token": round(_bytes(size, past), 1)} for size in options.sizes
    ]
    times: dict[tuple[int, str], list[float]] = {}
    for turn in range(options.rounds):
        for size, drafter in drafters.items():
            for what, seconds in _measure(drafter, past, fresh, options.queries, turn).items():
                times.setdefault((size, what), []).append(seconds)
    for row in rows:
        for (size, what), seconds in times.items():
            if size == row["tokens"]:
                row[what] = round(1e6 * statistics.median(seconds), 2)
    record("lookup", rows)


def _tokens(tokenizer: Any, held_out: bool, count: int) -> list[int]:
    tokens: list[int] = []
    for file in standard_library(held_out=held_out):
        tokens += tokenizer.encode(file.text)
        if len(tokens) >= count:
            break
    return tokens[:count]


def _filled(size: int, past: list[int]) -> SuffixDrafter:
    """A drafter that remembers outputs of so many tokens in all."""
    drafter = SuffixDrafter(memory=Memory(size))
    target = MarkovModel(torch.full((2, 2), 0.5))
    drafter.start(target, target.new_cache(1, 4096))
    for start in range(0, size, OUTPUT):
        drafter.memory.add(past[start : start + OUTPUT], 0)
    return drafter


def _bytes(size: int, past: list[int]) -> float:
    tracemalloc.start()
    memory = Memory(size)
    memory.add(past[:size], 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / memory.past.capacity


def _measure(
    drafter: SuffixDrafter, past: list[int], fresh: list[int], queries: int, turn: int
) -> dict[str, float]:
    """Seconds per token and per query."""
    starts = np.random.default_rng(turn).integers(0, len(fresh) - PROMPT - NEW, queries)
    found = []
    for start in starts:
        tokens = fresh[start : start + PROMPT]
        drafter.open(Context(0, tokens, PROMPT))
        began = time.perf_counter()
        for i in range(NEW // 16):
            tokens += fresh[start + PROMPT + i : start + PROMPT + i + 1]
            drafter.propose(Context(0, tokens, PROMPT), 16)
        found.append((time.perf_counter() - began) / (NEW // 16))
        drafter._open.clear()
    index = drafter.memory.past
    new = past[-(2**14) :]
    began = time.perf_counter()
    for start in range(0, len(new), 4):  # as rounds add them
        index.extend(new[start : start + 4])
    one = (time.perf_counter() - began) / len(new)
    began = time.perf_counter()
    for start in range(0, len(new), OUTPUT):
        drafter.memory.add(new[start : start + OUTPUT], 0)
    many = (time.perf_counter() - began) / len(new)
    return {
        "µs per token added, four at once": one,
        "µs per token added, an output at once": many,
        "µs per draft": statistics.median(found),
    }


if __name__ == "__main__":
    main()
