"""One forward pass of about 40M parameters: the lean decoder against transformers.

Random weights, bf16 by default, 256 tokens of context, 1 and 5 query rows, interleaved,
medians. The ratio is lean time over transformers' time.

    python benchmarks/forward.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from environment import record
from outpace.models import inspect_checkpoint, load_model, prefill

CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)  # as checkpoints are, mostly
        model.save_pretrained(folder)
        parameters = sum(p.numel() for p in model.parameters())
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        reference.to(options.device).eval()
        lean = load_model(inspect_checkpoint(Path(folder)), dtype, options.device)
        text = torch.arange(CONTEXT, device=options.device)
        cache = lean.new_cache(1, 1024)
        prefill(lean, cache, 0, text.tolist())
        with torch.inference_mode():
            theirs = DynamicCache(config=config)
            reference(input_ids=text[None], past_key_values=theirs, use_cache=True)
            for n in (1, 5):
                tokens = torch.arange(n, device=options.device)[None]
                positions = tokens + CONTEXT
                seconds: dict[str, list[float]] = {"lean": [], "transformers": []}
                for _ in range(options.repeats + 10):
                    began = _now(options.device)
                    lean.forward(tokens, positions, cache, [0])
                    middle = _now(options.device)
                    reference(input_ids=tokens, past_key_values=theirs, use_cache=True)
                    ended = _now(options.device)
                    theirs.crop(-n)
                    seconds["lean"].append(middle - began)
                    seconds["transformers"].append(ended - middle)
                a, b = (statistics.median(s[10:]) for s in seconds.values())
                rows.append(
                    {
                        "parameters": parameters,
                        "dtype": options.dtype,
                        "query_rows": n,
                        "lean_ms": round(a * 1e3, 3),
                        "transformers_ms": round(b * 1e3, 3),
                        "ratio": round(a / b, 3),
                    }
                )
    defaults = {"cpu", "bfloat16"}
    record("-".join(["forward", *sorted({options.device, options.dtype} - defaults)]), rows)


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
