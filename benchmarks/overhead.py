"""The realised speedup over the formula's, K = 1 to 8, and where the rest goes.

The formula takes K draft steps and a target pass for a round, and a target pass for a plain token.
What a round costs beyond that: its pass has K + 1 rows; what is around the pass (verification,
bookkeeping) is paid once per round, and once per plain token, which the formula leaves out, too.
All as parts of a round's time, prefill left out.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import outpace
from environment import record
from outpace.bench.compare import Comparison, compare
from outpace.bench.prompts import held_out_prompts
from pairs import pair_folders, sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--k", nargs="+", type=int, default=list(range(1, 9)))
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in options.pairs:
            target, draft = pair_folders(pair, Path(scratch))
            for temperature in options.temperatures:
                for k in options.k:
                    generator = outpace.load(target, draft, k)
                    params = sampling(temperature, options.tokens)
                    found = compare(generator, prompts, params, options.repeats)
                    row = {"pair": pair, "temperature": temperature, "k": k} | parts_of(found)
                    rows.append(row)
                    print(row, flush=True)
    record("overhead", rows)


def parts_of(found: Comparison) -> dict[str, Any]:
    plain, fast = found.rows[1].stats, found.rows[2].stats
    whole = fast.round_seconds / fast.rounds
    one, wide = plain.target_seconds / plain.rounds, fast.target_seconds / fast.rounds
    around = whole - (fast.draft_seconds + fast.target_seconds) / fast.rounds
    around_plain = (plain.round_seconds - plain.target_seconds) / plain.rounds
    return {
        "speedup": round(found.decoding, 3),
        "formula": round(found.predicted, 3),
        "over_formula": round(found.decoding / found.predicted, 3),
        "c": round(found.cost, 3),
        "tokens_per_pass": round(fast.tokens_per_pass, 3),
        "round_ms": round(1e3 * whole, 3),
        "draft": round(fast.draft_seconds / fast.rounds / whole, 3),
        "pass_of_one_row": round(one / whole, 3),
        "further_rows": round((wide - one) / whole, 3),
        "around_the_pass": round(around / whole, 3),
        "around_a_plain_pass_ms": round(1e3 * around_plain, 3),
    }


if __name__ == "__main__":
    main()
