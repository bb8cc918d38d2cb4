"""Rounds that are played instead of computed: what the formulas are checked against.

Nothing in here knows a formula. Tokens are tried one after the other until one is rejected,
or rows are drafted from and handed to a real verifier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.stats import Stats
from ..trees import chain
from ..types import Draft, PointMass, Rows, Tree
from ..verifiers import Noise, Verifier

_Counts = NDArray[np.int64]

_AT_ONCE = 50_000
"""Rounds that a verifier is given."""


def emitted(alphas: Sequence[float], k: int, rounds: int, seed: int = 0) -> _Counts:
    """`[rounds]` tokens of rounds in which depth i is accepted with chance α_i.

    Args:
        alphas: α_1, α_2, ...; beyond the last that one holds.
    """
    rng = np.random.default_rng(seed)
    tokens, going = np.ones(rounds, np.int64), np.full(rounds, True)
    for depth in range(k):
        going &= rng.random(rounds) < alphas[min(depth, len(alphas) - 1)]
        tokens += going
    return tokens


def texts(alphas: Sequence[float], k: int, tokens: int, seed: int = 0) -> list[Stats]:
    """One text per α, each of rounds until it has so many tokens: what was counted of it."""
    rng = np.random.default_rng(seed)
    kept = rng.random((len(alphas), tokens, k)) < np.reshape(alphas, (-1, 1, 1))
    going = kept.cumprod(2)  # [texts, rounds, K]
    begun = (going.sum(2) + 1).cumsum(1) - going.sum(2) - 1  # tokens that stood there
    found = []
    for rounds, stood in zip(going, begun, strict=True):
        mine = rounds[stood < tokens]
        accepted = mine.sum(0).tolist()
        found.append(
            Stats(
                rounds=len(mine),
                drafted_rounds=len(mine),
                full_accepts=accepted[-1],
                proposed=len(mine) * k,
                accepted=sum(accepted),
                emitted=len(mine) + sum(accepted),
                draft_steps=len(mine) * k,
                reached=[len(mine), *accepted[:-1]],
                accepted_at=accepted,
            )
        )
    return found


def verified(
    verifier: Verifier,
    p: Sequence[float],
    q: Sequence[float],
    k: int,
    rounds: int,
    seed: int = 0,
) -> _Counts:
    """`[rounds]` tokens of rounds by a verifier, with the same rows `[V]` everywhere.

    Args:
        p, q: of the target, and of the draft, whose K tokens are drawn from it.
    """
    generator = torch.Generator().manual_seed(seed)
    target, law = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    found = []
    for start in range(0, rounds, _AT_ONCE):
        count = min(_AT_ONCE, rounds - start)
        tokens = torch.multinomial(law, count * k, replacement=True, generator=generator)
        draft = Draft(
            tokens.view(count, k), Rows(law.expand(count, k, -1).contiguous()), (chain(k),) * count
        )
        found.append(_judged(verifier, target, draft, generator))
    return np.concatenate(found)


def verified_tree(
    verifier: Verifier,
    p: Sequence[float],
    tokens: Sequence[int],
    tree: Tree,
    rounds: int,
    seed: int = 0,
) -> _Counts:
    """`[rounds]` tokens of rounds with a tree of certain tokens, one per node."""
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(torch.tensor(tokens).repeat(rounds, 1), PointMass(), (tree,) * rounds)
    return _judged(verifier, torch.tensor(p, dtype=torch.float64), draft, generator)


def _judged(
    verifier: Verifier, p: torch.Tensor, draft: Draft, generator: torch.Generator
) -> _Counts:
    count, nodes = draft.tokens.shape
    noise = Noise(
        torch.rand(count, nodes, dtype=torch.float64, generator=generator),
        torch.rand(count, nodes + 1, dtype=torch.float64, generator=generator),
    )
    rows = p.expand(count, nodes + 1, -1).contiguous()
    result: _Counts = verifier(rows, draft, noise).accepted.numpy() + 1
    return result
