"""Memory over weights and cache, time per token as contexts grow, and many requests in a row.

Contexts: a random model of 100M parameters reads a text of 32k tokens; at 1k, 2k, ... the last
chunk of prefill, a step of one row and one of five are timed, the step beside the machine's
memory floor (weights, keys and values, at the bandwidth measured in turn); and how far the
process has grown at its peak since before the model was loaded, less weights and cache. Requests:
ten thousand short ones through one engine with the shipped pair; the process's memory after each
thousand.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import outpace
from environment import record
from floor import FORMATS, in_turn, matrix_bytes, milliseconds, ratio, write
from outpace.bench.prompts import held_out_prompts
from outpace.kernels import load_library
from outpace.models import inspect_checkpoint, load_model, load_tokenizer, prefill
from outpace.models.cache import SlotCache
from outpace.models.compiled import CompiledDecoder
from outpace.models.loading import locate
from pairs import sampling

MEGABYTE = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024 << i for i in range(6)])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    requests = many_requests(options.requests)
    ballast = torch.ones(2**28)
    contexts = [row for name in options.formats for row in long_context(name, options, ballast)]
    record("memory", {"requests": requests, "contexts": contexts})


def long_context(
    name: str, options: argparse.Namespace, ballast: torch.Tensor
) -> list[dict[str, Any]]:
    dtype, quantize = FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        config, _ = write("100M", dtype, Path(folder), max_position_embeddings=2**15)
        source = inspect_checkpoint(Path(folder))
        load_library()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, not counted
        before = resident()
        model = load_model(source, dtype, "cpu", compile=True, quantize=quantize)
    assert isinstance(model, CompiledDecoder)
    cache = model.new_cache(1, max(options.contexts))
    rows = []
    for n in options.contexts:
        reset_peak()
        done = cache.lengths[0]
        text = torch.arange(done, n - 16) % config.vocab_size
        prefill(model, cache, 0, text[:-512].tolist())
        began = time.perf_counter()
        prefill(model, cache, 0, text[-512:].tolist())
        chunk = time.perf_counter() - began
        steps = [partial(_step, model, cache, k) for k in (1, 5)]
        seconds = in_turn([ballast.sum, *steps], options.repeats)
        kv = kv_bytes(cache)
        needed = matrix_bytes(model, config) + kv * cache.lengths[0] / cache.capacity
        floors = [needed * s / (ballast.numel() * 4) for s in seconds[0]]
        row = {
            "format": name,
            "context": n,
            "prefill_ms_per_token": round(1e3 * chunk / 512, 3),
            "step_ms": milliseconds(seconds[1]),
            "step_over_floor": ratio(seconds[1], floors),
            "five_rows_over_one": ratio(seconds[2], seconds[1]),
            "weights_mb": round(model.weight_bytes / MEGABYTE, 1),
            "cache_mb": round(kv / MEGABYTE, 1),
            "peak_over_both_mb": round((peak() - before - model.weight_bytes - kv) / MEGABYTE, 1),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def _step(model: CompiledDecoder, cache: SlotCache, rows: int) -> None:
    at = torch.arange(rows).unsqueeze(0)
    model.forward(at, at + cache.lengths[0], cache, [0])


def many_requests(count: int) -> list[dict[str, Any]]:
    load_tokenizer(inspect_checkpoint(locate("demo")))  # so that its libraries are there before
    gc.collect()
    before = resident()
    generator = outpace.load("demo", "demo-draft", max_batch=1)
    weights = generator.engine.target.weight_bytes  # type: ignore[attr-defined]
    weights += generator.engine.drafter.model.weight_bytes  # type: ignore[union-attr]
    prompts = [p[-60:] for p in held_out_prompts(20)]
    rows = []
    for i in range(count + 1):
        generator.generate(prompts[i % 20], params=sampling(0.8 * (i % 2), 6 + i % 5))
        if i % max(1, count // 10) == 0:
            gc.collect()
            row = {
                "requests": i,
                "over_before_mb": round((resident() - before) / MEGABYTE, 1),
                "weights_mb": round(weights / MEGABYTE, 1),
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def kv_bytes(cache: SlotCache) -> int:
    return sum(t.numel() * t.element_size() for t in cache.storage)


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    """Since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
