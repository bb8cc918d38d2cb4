"""Speculative over plain decoding, both by outpace, on held-out Python prompts.

For each pair (shipped, ballasted), temperature (0, 0.8), dtype and K: tokens/s
ratios per prompt, medians, beside what the formula gives from α_i and c. The
plain runs are interleaved with the speculative ones.

    python benchmarks/speculative.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import outpace
from environment import record
from outpace.bench.compare import compare
from outpace.bench.prompts import held_out_prompts
from pairs import pair_folders, sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped", "ballasted"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--k", nargs="+", type=int, default=[2, 3, 4, 5])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="speculative")
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.pairs:
            target, draft = pair_folders(name, Path(scratch))
            for dtype in options.dtypes:
                for temperature in options.temperatures:
                    for k in options.k:
                        generator = outpace.load(
                            str(target), str(draft), k, dtype=dtype, device=options.device
                        )
                        params = sampling(temperature, options.tokens)
                        found = compare(generator, prompts, params, options.repeats)
                        row = _row(found)
                        rows.append(
                            {
                                "pair": name,
                                "device": options.device,
                                "dtype": dtype,
                                "temperature": temperature,
                                "k": k,
                            }
                            | row
                        )
                        print(rows[-1], flush=True)
    compare_dtypes(rows)
    record(options.name, rows)


def compare_dtypes(rows: list[dict[str, Any]]) -> None:
    """Add each row's speed over plain decoding in the dtype in which that is fastest."""
    plain: dict[tuple[str, float], list[tuple[float, str]]] = {}
    for row in rows:
        key = row["pair"], row["temperature"]
        plain.setdefault(key, []).append((row["plain_tokens_per_s"], row["dtype"]))
    for row in rows:
        speed, dtype = max(plain[row["pair"], row["temperature"]])
        row["fastest_plain_dtype"] = dtype
        row["speedup_over_fastest_plain"] = round(row["speculative_tokens_per_s"] / speed, 3)


def _row(found: outpace.bench.compare.Comparison) -> dict[str, Any]:
    plain, fast = found.rows[1], found.rows[2]
    return {
        "plain_tokens_per_s": round(plain.tokens_per_second, 1),
        "speculative_tokens_per_s": round(fast.tokens_per_second, 1),
        "speedup": round(found.realised, 3),
        "formula": round(found.predicted, 3),
        "realised_over_formula": round(found.realised / found.predicted, 3),
        "decoding_speedup": round(found.decoding, 3),
        "decoding_over_formula": round(found.decoding / found.predicted, 3),
        "tokens_per_pass": round(fast.stats.tokens_per_pass, 3),
        "acceptance_rate": round(fast.stats.acceptance_rate or 0.0, 3),
        "alpha": [round(a, 3) for a in fast.stats.alpha],
        "c": round(found.cost, 3),
        "identical_texts": f"{found.identical}/{found.prompts}",
    }


if __name__ == "__main__":
    main()
