"""A decoding step over the machine's memory floor, beside transformers on the same weights.

A step cannot be faster than reading what it needs once: its matrices, and the keys and values
of the context. The floor is those bytes over the bandwidth at which this machine sums up a
gigabyte. Random weights, 1, 5 and 9 query rows behind 256 tokens; bandwidth, step and
transformers' step are measured in turn, and medians taken of their ratios. With --inductor,
transformers' step over a static cache joins them as `torch.compile` makes it: static shapes,
weights frozen, wrapper in C++.

    python benchmarks/floor.py
    python benchmarks/floor.py --inductor --sizes 4M 40M 100M --formats float32 bfloat16 --rows 1 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from environment import record
from outpace.models import inspect_checkpoint, load_model, prefill
from outpace.models.compiled import CompiledDecoder

CONTEXT = 256
SIZES = {  # hidden size, layers, heads, key-value heads, units of the MLP, vocabulary
    "4M": (256, 2, 4, 2, 768, 8192),
    "40M": (512, 12, 8, 4, 1536, 8192),
    "100M": (768, 12, 12, 4, 2304, 32768),
    "500M": (1280, 24, 20, 4, 3840, 65536),
}
FORMATS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 5, 9])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inductor", action="store_true")
    options = parser.parse_args()
    ballast = torch.ones(2**28)
    rows = []
    for size in options.sizes:
        for name in options.formats:
            rows += measure(size, name, options, ballast)
    record("inductor" if options.inductor else "floor", rows)


def write(size: str, dtype: torch.dtype, folder: Path, **more: int) -> tuple[Any, int]:
    """A random checkpoint; its configuration and number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, mlp, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=mlp,
        tie_word_embeddings=True,
        **{"max_position_embeddings": 2048} | more,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return config, sum(p.numel() for p in model.parameters())


def measure(
    size: str, name: str, options: argparse.Namespace, ballast: torch.Tensor
) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM, DynamicCache

    dtype, quantize = FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        config, parameters = write(size, dtype, Path(folder))
        source = inspect_checkpoint(Path(folder))
        model = load_model(source, dtype, "cpu", compile=True, quantize=quantize)
        assert isinstance(model, CompiledDecoder)
        reference = None
        if quantize is None:
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    kv_row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    text = torch.arange(CONTEXT)
    cache = model.new_cache(1, 1024)
    prefill(model, cache, 0, text.tolist())
    theirs = DynamicCache(config=config)
    item = torch.finfo(dtype).bits // 8
    fixed = matrix_bytes(model, config)

    def ours(tokens: torch.Tensor) -> None:
        model.forward(tokens, tokens + CONTEXT, cache, [0])

    def step(tokens: torch.Tensor) -> None:
        reference(input_ids=tokens, past_key_values=theirs, use_cache=True)
        theirs.crop(-tokens.shape[1])

    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        if reference is not None:
            reference(input_ids=text[None], past_key_values=theirs, use_cache=True)
        for n in options.rows:
            needed = fixed + kv_row * (CONTEXT + n) * item
            tokens = torch.arange(n)[None]
            parts = {"sum": ballast.sum, "ours": partial(ours, tokens)}
            if n > 1:
                parts["one row"] = partial(ours, tokens[:, :1])
            if reference is not None:
                parts["transformers"] = partial(step, tokens)
                if options.inductor:
                    parts["inductor"] = frozen(reference, config, text, tokens)
            spent = dict(zip(parts, in_turn(list(parts.values()), options.repeats), strict=True))
            floors = [needed * s / (ballast.numel() * 4) for s in spent["sum"]]
            row = {
                "size": size,
                "parameters": parameters,
                "format": name,
                "rows": n,
                "floor_ms": milliseconds(floors),
                "outpace_ms": milliseconds(spent["ours"]),
                "over_floor": ratio(spent["ours"], floors),
            }
            if n > 1:
                row["over_one_row"] = ratio(spent["ours"], spent["one row"])
            for peer in ("transformers", "inductor"):
                if peer in spent:
                    row[f"{peer}_ms"] = milliseconds(spent[peer])
                    row[f"over_{peer}"] = ratio(spent["ours"], spent[peer])
            found.append(row)
            print(row, flush=True)
    return found


def matrix_bytes(model: CompiledDecoder, config: Any) -> int:
    """What a step reads of the parameters: all but the embedding, of which it looks up rows."""
    item = torch.finfo(model.dtype).bits // 8
    return model.weight_bytes - config.vocab_size * config.hidden_size * item


def frozen(
    reference: Any, config: Any, text: torch.Tensor, tokens: torch.Tensor
) -> Callable[[], Any]:
    """transformers' step by `torch.compile`; compiled before it is returned."""
    import torch._inductor.config as inductor
    from transformers import StaticCache

    inductor.freezing = inductor.cpp_wrapper = True
    torch._dynamo.reset()
    cache = StaticCache(config=config, max_cache_len=2 * CONTEXT)
    with torch.no_grad():
        reference(input_ids=text[None], past_key_values=cache, use_cache=True)
    compiled = torch.compile(reference.forward, dynamic=False)
    positions = torch.arange(CONTEXT, CONTEXT + tokens.shape[1])[None]

    def step() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)
        with torch.no_grad():
            compiled(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True
            )

    step()
    return step


def in_turn(parts: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each part: a few of each per turn, the fastest of them; two turns to warm up."""
    seconds: list[list[float]] = [[] for _ in parts]
    for turn in range(-2, repeats):
        for part, spent in zip(parts, seconds, strict=True):
            best = float("inf")
            for _ in range(3):
                began = time.perf_counter()
                part()
                best = min(best, time.perf_counter() - began)
            if turn >= 0:
                spent.append(best)
    return seconds


def milliseconds(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def ratio(a: list[float], b: list[float]) -> float:
    return round(statistics.median(x / y for x, y in zip(a, b, strict=True)), 3)


if __name__ == "__main__":
    main()
