"""Formulas of speculation, the widespread wrong ones among them, and the rounds that decide.

Rounds are played: chances are drawn token by token, or rows go through a real verifier
(`outpace.planner.simulation`, which knows no formula). Beside it stands what the
formulas give, and how many standard errors each is off. Nothing is timed.

    python benchmarks/formulas.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from environment import record
from outpace import Stats
from outpace.planner import (
    RoundTimes,
    acceptance_rate,
    alpha_of_rate,
    alpha_of_rows,
    alphas_of,
    best_k,
    break_even,
    constant_price,
    interval,
    match_alpha_of_rows,
    operations_ratio,
    speedup,
    speedup_iid,
    step_by_step,
    tokens_block,
    tokens_by_depth,
    tokens_counted,
    tokens_iid,
    tokens_over_texts,
)
from outpace.planner.simulation import emitted, texts, verified
from outpace.verifiers import BlockVerifier, MatchVerifier, TokenVerifier

EASY_AND_HARD = (0.9, 0.6, 0.3)
"""α of three kinds of text."""

FREE = 32
"""Rows that a pass takes in the time of one, in the example of a machine."""


def row(
    what: str, played: NDArray[Any] | Sequence[float], right: float, wrong: dict[str, float]
) -> dict[str, Any]:
    """What was played, its standard error, and how many such errors each formula is off."""
    mean, error = float(np.mean(played)), float(np.std(played) / math.sqrt(len(played)))
    given = {"right": right} | wrong
    found: dict[str, Any] = {
        "what": what,
        "played": round(mean, 4),
        "standard_error": float(f"{error:.2g}"),
    }
    for name, value in given.items():
        found[name] = {"value": round(value, 4), "errors_off": round((value - mean) / error, 1)}
    print(found, flush=True)
    return found


def overcounted(alpha: float, k: int) -> float:
    """Wrong: 1 + α + ... + α^(K-1) are tokens that are tried, not those that are accepted."""
    return (1 - alpha**k) / (1 - alpha) + 1


def tokens(rounds: int) -> list[dict[str, Any]]:
    cases = ((0.7, 5), (0.8, 4), (0.4, 5), (0.2, 4))
    return [
        row(
            f"tokens per round, α={alpha}, K={k}",
            emitted([alpha], k, rounds),
            tokens_iid(alpha, k),
            {"(1-α^K)/(1-α)+1": overcounted(alpha, k), "1+Kα": 1 + k * alpha},
        )
        for alpha, k in cases
    ]


def speedups(rounds: int) -> list[dict[str, Any]]:
    found = []
    for alpha, k, c in ((0.7, 5, 0.2), (0.4, 5, 0.2), (0.2, 4, 0.5)):
        price = constant_price(c)(k)
        found.append(
            row(
                f"speedup, α={alpha}, K={k}, c={c}",
                emitted([alpha], k, rounds) / price,
                speedup_iid(alpha, k, c),
                {"((1-α^K)/(1-α)+1)/(Kc+1)": overcounted(alpha, k) / price},
            )
        )
    return found + [
        row(
            f"speedup, α={alpha}, K=4, c=0.1",
            emitted([alpha], 4, rounds) / 1.4,
            speedup_iid(alpha, 4, 0.1),
            {"(1+Kα)/(Kc+1)": (1 + 4 * alpha) / 1.4},
        )
        for alpha in (0.8, 0.6, 0.4, 0.2)
    ]


def rates(rounds: int) -> list[dict[str, Any]]:
    """α from counts, and tokens from the acceptance rate of other rounds."""
    alpha, k = 0.7, 5
    played = emitted([alpha], k, rounds)
    rate = acceptance_rate(float(emitted([alpha], k, 10 * rounds, 1).mean()), k)
    return [
        row(
            "accepted ÷ tried tokens, α=0.7, K=5",
            _by_round(played - 1, np.minimum(played, k)),
            alpha,
            {"accepted ÷ proposed": rate},
        ),
        row(
            "tokens per round, α=0.7, K=5, from an acceptance rate",
            played,
            tokens_iid(alpha_of_rate(rate, k), k),
            {"the rate as α": tokens_iid(rate, k)},
        ),
    ]


def _by_round(over: NDArray[Any], under: NDArray[Any]) -> NDArray[Any]:
    """Samples whose mean is a ratio of sums, and whose spread is the ratio's."""
    ratio = over.sum() / under.sum()
    return ratio + (over - ratio * under) / under.mean()


def rules(rounds: int) -> list[dict[str, Any]]:
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    shared, other = alpha_of_rows(p, q), match_alpha_of_rows(p, q)
    found = [
        row(
            "tokens per round by token, p=.5 .3 .2, q=.2 .3 .5, K=4",
            verified(TokenVerifier(), p, q, 4, rounds),
            tokens_iid(shared, 4),
            {"α=Σpq": tokens_iid(other, 4)},
        ),
        row(
            "tokens per round by match, the same",
            verified(MatchVerifier(), p, q, 4, rounds),
            tokens_iid(other, 4),
            {"α=Σmin(p,q)": tokens_iid(shared, 4)},
        ),
    ]
    pairs = (((1 / 3, 2 / 3), (2 / 3, 1 / 3)), ((2 / 3, 1 / 3), (1.0, 0.0)))
    for name, (p2, q2) in zip(("1/3 2/3, q=2/3 1/3", "2/3 1/3, q=1 0"), pairs, strict=True):
        mean_alpha = alpha_of_rows(p2, q2)
        found.append(
            row(
                f"tokens per round by block, p={name}, α=2/3, K=4",
                verified(BlockVerifier(), p2, q2, 4, rounds),
                tokens_block(p2, q2, 4),
                {"token's formula": tokens_iid(mean_alpha, 4)},
            )
        )
    return found


def mixtures(runs: int) -> list[dict[str, Any]]:
    """Texts that differ, each of 2,000 tokens."""
    k, c = 8, 0.1
    played = [texts(EASY_AND_HARD, k, 2000, seed) for seed in range(runs)]
    each = [tokens_iid(alpha, k) for alpha in EASY_AND_HARD]
    price = constant_price(c)(k)
    spans = [[price * text.rounds / text.emitted for text in run] for run in played]
    alone = tokens_iid(float(np.mean(EASY_AND_HARD)), k)
    name = "α=0.9, 0.6, 0.3 in turn, K=8"
    shorter = [text for seed in range(runs) for text in texts(EASY_AND_HARD, 4, 2000, seed)]
    return [
        row(
            f"tokens per round, {name}",
            [tokens_counted(run) for run in played],
            tokens_over_texts(each),
            {
                "mean of E": float(np.mean(each)),
                "E of the mean α": alone,
            },
        ),
        row(
            f"the same from rounds with K=4, {name}",
            [tokens_counted(run) for run in played],
            tokens_over_texts([tokens_by_depth(alphas_of([text]), k) for text in shorter]),
            {"α by depth of all texts": tokens_by_depth(alphas_of(shorter), k)},
        ),
        row(
            f"time without ÷ time with, {name}, c=0.1",
            [len(run) / math.fsum(run) for run in spans],
            speedup(tokens_over_texts(each), price),
            {"mean of the texts' speedups": float(np.mean([e / price for e in each]))},
        ),
    ]


def machine() -> RoundTimes:
    """A pass reads weights, which takes 1, or computes, a 32nd per row, if that takes longer."""

    def roofline(rows: float, batch: float) -> float:
        return max(1.0, rows * batch / FREE)

    return RoundTimes(roofline, step_by_step(lambda rows, batch: 0.1 * roofline(rows, batch)))


def batches(rounds: int) -> list[dict[str, Any]]:
    """Sequences with α = 0.9 and 0.7 in turn, K = 4, on that machine, by batch."""
    k, found = 4, []
    for batch in (2, 8, 16, 32):
        alphas = [(0.9, 0.7)[i % 2] for i in range(batch)]
        every = [emitted([alpha], k, rounds // batch, i) for i, alpha in enumerate(alphas)]
        seconds = k * 0.1 * max(1.0, batch / FREE) + max(1.0, (k + 1) * batch / FREE)
        played = np.sum(every, 0) / seconds / (batch / max(1.0, batch / FREE))
        each, price = [tokens_iid(alpha, k) for alpha in alphas], machine().price(batch)
        best, most = best_k(lambda k, a=alphas: np.mean([tokens_iid(x, k) for x in a]), price, 16)
        found.append(
            row(
                f"speedup, {batch} sequences, K=4, c=0.1",
                played,
                speedup(each, price(k)),
                {"a target's pass costs 1": speedup(each, constant_price(0.1)(k))},
            )
            | {"best_k": best, "best_speedup": round(most, 4), "break_even": break_even(price, k)}
        )
    return found


def operations(rounds: int) -> list[dict[str, Any]]:
    alpha, k, ratio = 0.8, 4, 0.15
    played = emitted([alpha], k, rounds)
    return [
        row(
            "operations ÷ plain decoding's, α=0.8, K=4, ĉ=0.15",
            _by_round(np.full(rounds, k * ratio + k + 1), played),
            operations_ratio(tokens_iid(alpha, k), k, ratio),
            {"1+Kĉ": 1 + k * ratio},
        )
    ]


def _as_if_independent(counts: Sequence[Stats]) -> tuple[float, float]:
    """Wrong: 95 % from rounds as if no two were of one text."""
    rounds = sum(count.rounds for count in counts)
    depths = range(len(counts[0].accepted_at))
    at = [sum(count.accepted_at[d] for count in counts) / rounds for d in depths]
    variance = sum((2 * d + 1) * share for d, share in enumerate(at)) - sum(at) ** 2
    half = 1.96 * math.sqrt(variance / rounds)
    return 1 + sum(at) - half, 1 + sum(at) + half


def _bootstrapped(counts: Sequence[Stats], rng: np.random.Generator) -> tuple[float, float]:
    """95 % by percentiles of prompts that are drawn again."""
    drawn = rng.integers(0, len(counts), (500, len(counts)))
    tokens, rounds = (np.array([getattr(c, n) for c in counts]) for n in ("emitted", "rounds"))
    low, high = np.quantile(tokens[drawn].sum(1) / rounds[drawn].sum(1), [0.025, 0.975])
    return float(low), float(high)


def coverage(runs: int) -> list[dict[str, Any]]:
    """How often 95 % intervals hold the truth: prompts of three kinds, 60 tokens each, K = 4."""
    truth = tokens_counted(texts(EASY_AND_HARD * 8000, 4, 60, 1))
    found = []
    for count in (5, 10, 20, 40):
        rng, hits = np.random.default_rng(0), np.zeros(4)
        for run in range(runs):
            seen, later = (
                texts(rng.choice(EASY_AND_HARD, count), 4, 60, 2 * run + i + 10) for i in (0, 1)
            )
            bounds = [interval(seen)[1:], _as_if_independent(seen), _bootstrapped(seen, rng)]
            hits[:3] += [low <= truth <= high for low, high in bounds]
            _, low, high = interval(seen, coming=count)
            hits[3] += low <= tokens_counted(later) <= high
        names = ("jackknife_over_prompts", "rounds_as_if_independent", "bootstrap_over_prompts")
        shares = dict(zip((*names, "of_as_many_to_come"), (hits / runs).tolist(), strict=True))
        found.append({"what": f"95 % intervals from {count} prompts", "hold": shares})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    rows = [*tokens(options.rounds), *speedups(options.rounds), *rates(options.rounds)]
    rows += [*rules(options.rounds), *mixtures(100), *batches(options.rounds)]
    rows += [*operations(options.rounds), *coverage(options.runs)]
    record("formulas", rows)


if __name__ == "__main__":
    main()
