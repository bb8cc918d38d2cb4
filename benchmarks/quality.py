"""What rounding the weights costs: perplexity on held-out files against bf16.

The shipped target (or --model) reads windows of Python files that it was never trained on. Beside
perplexity: the mean Kullback-Leibler divergence of its next-token law from that of bf16, in nats,
and how often the likeliest token is the same.

    python benchmarks/quality.py
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F

from environment import record
from outpace.models import inspect_checkpoint, load_model, load_tokenizer
from outpace.training.corpus import standard_library

FORMATS = {
    "bfloat16": ("bfloat16", None),
    "float32": ("float32", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    source = inspect_checkpoint(options.model)
    windows = held_out_windows(load_tokenizer(source), options.windows, options.length)
    rows: list[dict[str, Any]] = []
    reference: list[torch.Tensor] = []
    for name, (dtype, quantize) in FORMATS.items():
        model = load_model(source, dtype, "cpu", quantize=quantize)
        laws = [log_law(model, window) for window in windows]
        losses = torch.stack([loss(law, w) for law, w in zip(laws, windows, strict=True)])
        if not reference:
            reference, base = laws, losses
        pairs = list(zip(laws, reference, strict=True))
        divergence = [float((b.exp() * (b - a)).sum(-1).mean()) for a, b in pairs]
        agreement = [float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b in pairs]
        more = losses - base
        rows.append(
            {
                "format": name,
                "weight_megabytes": round(getattr(model, "weight_bytes", 0) / 1e6, 1),
                "perplexity": round(math.exp(losses.mean()), 4),
                "over_bf16": round(math.exp(more.mean()), 5),
                "standard_error": round(float(more.std() / math.sqrt(len(more))), 5),
                "divergence_from_bf16": round(sum(divergence) / len(divergence), 6),
                "same_likeliest_token": round(sum(agreement) / len(agreement), 4),
            }
        )
        print(rows[-1], flush=True)
    record("quality", {"model": options.model, "tokens": sum(map(len, windows)), "formats": rows})


def held_out_windows(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """The beginnings of evenly spaced held-out files."""
    found = []
    for file in standard_library(held_out=True):
        ids = tokenizer.encode(file.text[: 20 * length])[:length]
        if len(ids) == length:
            found.append(ids)
    step = max(1, len(found) // count)
    return found[::step][:count]


def log_law(model: Any, window: list[int]) -> torch.Tensor:
    """Log-probabilities `[T - 1, V]` of the token after each but the last."""
    cache, parts = model.new_cache(1, len(window)), []
    for start in range(0, len(window), 128):
        ids = torch.tensor([window[start : start + 128]])
        positions = torch.arange(start, start + ids.shape[1])[None]
        parts.append(F.log_softmax(model.forward(ids, positions, cache, [0]).logits[0].float(), -1))
        cache.commit(0, range(ids.shape[1]))
    return torch.cat(parts)[:-1]


def loss(law: torch.Tensor, window: list[int]) -> torch.Tensor:
    """Mean negative log-likelihood, nats per token."""
    return -law.gather(-1, torch.tensor(window[1:]).unsqueeze(-1)).mean()


if __name__ == "__main__":
    main()
