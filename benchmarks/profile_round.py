"""Where a round's time goes: the parts of drafting, scoring, verifying and committing.

Medians over the rounds of some held-out prompts, in microseconds. What a part costs here is more
than what it costs in a loop of its own: after a pass the processor's caches hold weights.

    python benchmarks/profile_round.py --temperature 0.8 --k 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import outpace
from environment import record
from outpace.bench.prompts import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo-draft")
    parser.add_argument("--k", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts)
    rows = []
    for k in options.k:
        drafter = options.drafter if k else None
        generator = outpace.load(options.model, drafter, k)
        spent = watch(generator.engine)
        for temperature in options.temperature:
            for prompt in prompts:
                generator.generate(
                    prompt,
                    temperature=temperature,
                    seed=0,
                    max_new_tokens=options.tokens,
                    eos_token_ids=(),
                )
            parts = {name: round(1e6 * statistics.median(s), 1) for name, s in spent.items()}
            counts = {name: round(len(s) / len(spent["round"]), 2) for name, s in spent.items()}
            rows.append({"k": k, "temperature": temperature, "us": parts, "per_round": counts})
            print(rows[-1], flush=True)
            spent.clear()
    record("profile-round", rows)


def watch(engine: Any) -> dict[str, list[float]]:
    """Seconds of every call of a round's parts, by name."""
    spent: dict[str, list[float]] = defaultdict(list)

    def time_calls(owner: Any, method: str, name: str | Callable[..., str]) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            out = call(*args, **more)
            label = name if isinstance(name, str) else name(*args)
            spent[label].append(time.perf_counter() - began)
            return out

        setattr(owner, method, timed)

    def of_pass(tokens: Any, *rest: Any) -> str:
        return "target pass" if tokens.shape[1] < 64 else "prefill"

    time_calls(engine, "_round", "round")
    for verb in ("draft", "score", "verify", "commit"):
        time_calls(engine, f"_{verb}", verb)
    time_calls(engine.target, "forward", of_pass)
    if engine.drafter is not None:
        model = engine.drafter.model
        time_calls(model, "forward", lambda tokens, *rest: "draft " + of_pass(tokens))
        if hasattr(model, "rollout"):
            time_calls(model, "rollout", "draft rollout")
    return spent


if __name__ == "__main__":
    main()
