"""What each rule accepts, on the shipped pair: block against token, and the two that keep seeds.

Tokens per pass as they were emitted, per rule, with bootstrap intervals over prompts;
and, with less noise, block over token on the very same rounds: of every draft that the
run by token verification judged, the expected number of tokens emitted by either rule,
given p, q and the drafted tokens. Nothing is timed.

    python benchmarks/acceptance.py
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

import outpace
from environment import record
from outpace import SamplingParams
from outpace.bench.prompts import held_out_prompts
from outpace.types import Draft, Rows
from outpace.verifiers import Noise, TokenVerifier, Verdict

RULES = ("token", "block", "match", "coupled")
RESAMPLES = 2000


class Watched(TokenVerifier):
    """Token verification that notes what either rule would emit of the same drafts."""

    def __init__(self) -> None:
        self.token, self.block = 0.0, 0.0

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if isinstance(draft.law, Rows):
            for b, tree in enumerate(draft.trees):
                n = len(tree)
                by_token, by_block = expected(p[b], draft.law.q[b, :n], draft.tokens[b, :n])
                self.token, self.block = self.token + by_token, self.block + by_block
        return super().__call__(p, draft, noise)


def expected(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Tokens that a round emits by token and by block verification, given p, q and the draft.

    Sun et al., 2025, algorithms 1 and 2; p `[N + 1, V]`, q `[N, V]`, tokens `[N]`.
    """
    at = tokens.unsqueeze(1)
    n = len(tokens)
    ratios = (p[:n].gather(1, at).double() / q.gather(1, at).double()).flatten()
    by_token = 1 + float(ratios.clamp_max(1).cumprod(0).sum())
    joint, passes = 1.0, []
    for i, ratio in enumerate(ratios.tolist()):
        joint = min(1.0, joint * ratio)
        if i + 1 < n:
            left = float((joint * p[i + 1].double() - q[i + 1].double()).clamp_min(0).sum())
            whole = left + 1 - joint
            passes.append(left / whole if whole > 0 else 1.0)
        else:
            passes.append(joint)
    by_block, later = 1.0, 1.0  # no later prefix passed
    for i in reversed(range(n)):
        by_block += (i + 1) * passes[i] * later
        later *= 1 - passes[i]
    return by_token, by_block


def interval(of: np.ndarray, over: np.ndarray) -> tuple[float, float, float]:
    """A ratio of sums over prompts, and its 95 % interval by bootstrap."""
    draws = np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))
    ratios = of[draws].sum(1) / over[draws].sum(1)
    return (
        float(of.sum() / over.sum()),
        *(float(x) for x in np.quantile(ratios, [0.025, 0.975])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.6, 0.8, 1.0])
    parser.add_argument("--k", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = held_out_prompts(options.prompts)
    generators = {
        (rule, k): outpace.load("demo", "demo-draft", k, verifier=rule, max_batch=options.seeds)
        for k in options.k
        for rule in RULES
    }
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        for k in options.k:
            rows.append(_row(generators, prompts, temperature, k, options))
            print(rows[-1], flush=True)
    record("acceptance", rows)


def _row(generators: Any, prompts: list[str], temperature: float, k: int, o: Any) -> dict[str, Any]:
    params = SamplingParams(temperature=temperature, max_new_tokens=o.tokens, eos_token_ids=())
    emitted = {rule: np.zeros(len(prompts)) for rule in RULES}
    passes = {rule: np.zeros(len(prompts)) for rule in RULES}
    would = {rule: np.zeros(len(prompts)) for rule in ("token", "block")}
    watched = Watched()
    generators["token", k].engine.verifier = watched
    for i, prompt in enumerate(prompts):
        seeds = [1000 * i + s for s in range(o.seeds)]
        watched.token = watched.block = 0.0
        for rule in RULES:
            results = generators[rule, k].generate([prompt] * o.seeds, params=params, seed=seeds)
            emitted[rule][i] = sum(r.stats.emitted for r in results)
            passes[rule][i] = sum(r.stats.rounds for r in results)
        would["token"][i], would["block"][i] = watched.token, watched.block
    row: dict[str, Any] = {
        "temperature": temperature,
        "k": k,
        "tokens": int(emitted["token"].sum()),
    }
    for rule in RULES:
        row[rule] = [round(x, 3) for x in interval(emitted[rule], passes[rule])]
    gain, low, high = interval(would["block"], would["token"])
    row["block_over_token_same_rounds"] = [round(x, 4) for x in (gain, low, high)]
    return row


if __name__ == "__main__":
    main()
