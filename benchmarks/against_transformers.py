"""The same pair and prompts through transformers' assisted generation.

tokens/s including prefill, batch 1, interleaved prompt by prompt, medians of
per-prompt ratios; each engine in the dtype it is faster in. transformers runs
twice: with the same K, and as it comes (it drafts up to 20 tokens and stops
where the draft is not confident).

    python benchmarks/against_transformers.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import outpace
from environment import record
from outpace.bench.prompts import held_out_prompts
from pairs import pair_folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["shipped", "ballasted"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.pairs:
            folders = pair_folders(name, Path(scratch))
            for temperature in options.temperatures:
                runs = {
                    (engine, dtype): make(folders, dtype, temperature, options)
                    for dtype in options.dtypes
                    for engine, make in ENGINES.items()
                }
                rows.append(_row(_measure(runs, prompts, options.repeats), name, temperature))
                rows[-1] |= {"k": options.k, "device": options.device}
                print(rows[-1], flush=True)
    record("against-transformers", rows)


Run = Callable[[str, int], int]
Speeds = dict[tuple[str, str], list[float]]


def _measure(runs: dict[tuple[str, str], Run], prompts: list[str], repeats: int) -> Speeds:
    """Median tokens/s per prompt; every engine takes its turn on every prompt."""
    for run in runs.values():
        run(prompts[0], 0)
    speeds: Speeds = {key: [] for key in runs}
    for prompt in prompts:
        each: Speeds = {key: [] for key in runs}
        for seed in range(repeats):
            for key, run in runs.items():
                began = time.perf_counter()
                tokens = run(prompt, seed)
                each[key].append(tokens / (time.perf_counter() - began))
        for key, values in each.items():
            speeds[key].append(statistics.median(values))
    return speeds


def _row(speeds: Speeds, pair: str, temperature: float) -> dict[str, object]:
    """Each engine in the dtype it is faster in."""
    row: dict[str, object] = {"pair": pair, "temperature": temperature}
    best = {
        engine: max(
            (k for k in speeds if k[0] == engine), key=lambda k: statistics.median(speeds[k])
        )
        for engine in ENGINES
    }
    ours = speeds[best["outpace"]]
    for engine, key in best.items():
        row[f"{engine}_tokens_per_s"] = round(statistics.median(speeds[key]), 1)
        row[f"{engine}_dtype"] = key[1]
        if engine != "outpace":
            ratio = statistics.median(a / b for a, b in zip(ours, speeds[key], strict=True))
            row[f"over_{engine}"] = round(ratio, 3)
    return row


def _outpace(
    folders: tuple[Path, Path], dtype: str, temperature: float, options: argparse.Namespace
) -> Run:
    generator = outpace.load(
        str(folders[0]),
        str(folders[1]),
        options.k,
        dtype=dtype,
        device=options.device,
        max_batch=1,
    )

    def run(prompt: str, seed: int) -> int:
        result = generator.generate(
            prompt,
            temperature=temperature,
            seed=seed,
            max_new_tokens=options.tokens,
            eos_token_ids=(),
        )
        return len(result.token_ids)

    return run


def _transformers(
    folders: tuple[Path, Path],
    dtype: str,
    temperature: float,
    options: argparse.Namespace,
    same_k: bool = True,
) -> Run:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = getattr(torch, dtype)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(f, dtype=kind).to(options.device).eval()
        for f in folders
    )
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    if same_k:
        draft.generation_config.num_assistant_tokens = options.k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}

    def run(prompt: str, seed: int) -> int:
        ids = tokenizer(prompt, return_tensors="pt").to(options.device)
        torch.manual_seed(seed)
        out = target.generate(
            input_ids=ids["input_ids"],
            attention_mask=ids["attention_mask"],
            assistant_model=draft,
            max_new_tokens=options.tokens,
            do_sample=bool(temperature),
            **sampling,
        )
        return int(out.shape[1] - ids["input_ids"].shape[1])

    return run


ENGINES: dict[str, Callable[..., Run]] = {
    "outpace": _outpace,
    "transformers": _transformers,
    "transformers_as_it_comes": partial(_transformers, same_k=False),
}


if __name__ == "__main__":
    main()
