"""The chance α that a token is accepted, given that it is tried: from counts, rates and rows.

It is not the acceptance rate, accepted ÷ proposed tokens, in which all that stands behind the
first rejection counts as rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import OptionError
from ..types import check_whole_number
from .formulas import Counted, check_chance, check_rows, check_tokens, tokens_iid


def alphas_of(counts: Iterable[Counted]) -> tuple[float, ...]:
    """α_1, α_2, ... of rounds that were counted, as deep as any got; () if none was drafted for.

    Sums over rounds are divided, not α_i averaged: a text counts by its rounds.
    """
    pool = list(counts)
    found: list[float] = []
    for depth in range(max((len(count.reached) for count in pool), default=0)):
        deep = [count for count in pool if depth < len(count.reached)]
        reached = sum(count.reached[depth] for count in deep)
        if not reached:
            break
        found.append(sum(count.accepted_at[depth] for count in deep) / reached)
    return tuple(found)


def alpha_iid(counts: Iterable[Counted]) -> float:
    """The one α that explains counted rounds best: accepted ÷ tried tokens.

    Tried are those up to the first rejection. What is behind it was proposed, but nothing is
    known of it; to count it as rejected is the acceptance rate.

    Raises:
        OptionError: nothing was drafted.
    """
    pool = list(counts)
    tried = sum(sum(count.reached) for count in pool)
    if not tried:
        raise OptionError("no round with a draft was counted: run some first")
    return sum(sum(count.accepted_at) for count in pool) / tried


def acceptance_rate(tokens: float, k: int) -> float:
    """Accepted ÷ proposed tokens: (E - 1) / K. Below α for K > 1, the more the longer drafts are.

    Raises:
        OptionError: K is no length above 0, or a round cannot emit so many.
    """
    check_tokens(tokens, k, 1)
    return (tokens - 1) / k


def alpha_of_rate(rate: float, k: int) -> float:
    """α from an acceptance rate (accepted ÷ proposed), where all drafts have length K.

    Raises:
        OptionError: the rate is no probability, or K no length above 0.
    """
    check_whole_number("k", k, 1, "a draft's length")
    return alpha_for(1 + k * check_chance("an acceptance rate", rate), k)


def alpha_for(tokens: float, k: int) -> float:
    """The α at which a round with K emits so many tokens on average.

    Raises:
        OptionError: no α does.
    """
    check_tokens(tokens, k, 1)
    return rising_root(lambda alpha: tokens_iid(alpha, k) - tokens)


def alpha_of_rows(p: Sequence[float], q: Sequence[float]) -> float:
    """α of speculative sampling: Σ min(p, q) (Leviathan et al., 2023, corollary 3.6).

    Raises:
        OptionError: they are not rows of one vocabulary.
    """
    target, draft = check_rows(p, q)
    return float(np.minimum(target, draft).sum())


def match_alpha_of_rows(p: Sequence[float], q: Sequence[float]) -> float:
    """α of sample-and-match, where target and draft draw on their own: Σ p q.

    Raises:
        OptionError: they are not rows of one vocabulary.
    """
    target, draft = check_rows(p, q)
    return float(target @ draft)


def rising_root(f: Callable[[float], float]) -> float:
    """Where on [0, 1] a rising function reaches 0, to the last bit; 1 if it does not."""
    if f(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high
