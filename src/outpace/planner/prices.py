"""Speedup over plain decoding: tokens per round ÷ price.

The price of a round is its time ÷ the time of a plain pass of the same batch. With costs that
are constants it is K c + 1 (Leviathan et al., 2023, theorem 3.8). A target's pass over K + 1 rows
of B sequences costs what it costs, though, so `RoundTimes` takes it as a measured function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import OptionError
from ..types import check_whole_number
from .alphas import alpha_for
from .formulas import tokens_iid

PassTime = Callable[[float, float], float]
"""Seconds of a pass over (rows of each sequence, sequences), such as `trees.PassTimes`."""

DraftTime = Callable[[float, float], float]
"""Seconds to draft (K tokens for each, sequences)."""

Price = Callable[[float], float]
"""From K to the time of a round in plain passes. Of 0 it is 1."""


def step_by_step(step: PassTime) -> DraftTime:
    """Drafting token by token: K passes over one row of each sequence."""
    return lambda k, batch: k * step(1, batch)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What rounds take. All sequences of a batch draft, are scored and end their rounds together.

    Where drafts differ in length the longest counts for all: rows are padded to it.

    Attributes:
        target: seconds of a target pass by rows and batch, verdict included.
        draft: seconds of drafting by K and batch; `step_by_step` for models.
        around: seconds per round besides.
    """

    target: PassTime
    draft: DraftTime
    around: float = 0.0

    def __post_init__(self) -> None:
        _check_cost("around", self.around)

    def seconds(self, k: float, batch: float = 1) -> float:
        """Of a round with K, and of a plain pass with 0."""
        if not k:
            return self.target(1, batch)
        return self.draft(k, batch) + self.target(k + 1, batch) + self.around

    def price(self, batch: int = 1) -> Price:
        """Rounds of so many sequences, in plain passes of as many.

        Raises:
            OptionError: the batch is none, or a plain pass takes no time.
        """
        check_whole_number("batch", batch, 1, "sequences in it")
        plain = self.target(1, batch)
        if not 0 < plain < math.inf:
            raise OptionError(f"a plain pass cannot take {plain} seconds: give measured ones")
        return lambda k: self.seconds(k, batch) / plain


def constant_price(c: float, begun: float = 0.0) -> Price:
    """K c + 1: costs that depend on neither rows nor batch.

    Args:
        c: draft step time ÷ target pass time.
        begun: how much of the target's pass the draft has done; see `Drafter`.

    Raises:
        OptionError: c is negative or not finite, or begun no share.
    """
    _check_cost("c", c)
    if not 0 <= begun < 1:
        raise OptionError(f"begun must be a share of the pass, from 0 to below 1, not {begun!r}")
    return lambda k: k * c + 1 - begun if k else 1.0


def speedup(tokens: float | Sequence[float], price: float) -> float:
    """Tokens/s over plain decoding's, while the batch is full.

    Σ_b E_b / (draft(K, B) + target(K + 1, B)) against B / target(1, B): the mean E over price.
    The mean is that of sequences that decode now. For texts that are decoded from beginning to
    end it is `tokens_over_texts`.

    Args:
        tokens: per round, or of each sequence of the batch.
        price: of the round, in plain passes.

    Raises:
        OptionError: there are no tokens, or the price is not above 0.
    """
    each = [tokens] if isinstance(tokens, (int, float)) else list(tokens)
    if not each or not all(0 <= e < math.inf for e in each):
        raise OptionError(f"tokens per round must be finite numbers, one or more, not {tokens!r}")
    if not 0 < price < math.inf:
        raise OptionError(f"a round's price must be above 0 and finite, not {price!r}")
    return math.fsum(each) / len(each) / price


def speedup_iid(alpha: float, k: int, c: float) -> float:
    """(1 - α^(K+1)) / ((1 - α)(K c + 1)): Leviathan et al., 2023, theorem 3.8.

    Raises:
        OptionError: α is no probability, K no length, or c no cost.
    """
    return speedup(tokens_iid(alpha, k), constant_price(c)(k))


def most_speedup(k: int, price: Price) -> float:
    """The bound that no draft of length K exceeds: (K + 1) ÷ price, where all are accepted.

    With constant costs it rises with K to 1/c.
    """
    return speedup(tokens_iid(1.0, k), price(k))


def best_k(tokens: Callable[[int], float], price: Price, k_max: int) -> tuple[int, float]:
    """The draft length of 0 to `k_max` that promises most, and its speedup; of equals the shortest.

    0 is plain decoding: it is the answer where nothing beats 1.

    Args:
        tokens: from K to tokens per round, such as `lambda k: tokens_iid(0.8, k)`.

    Raises:
        OptionError: `k_max` is no length.
    """
    check_whole_number("k_max", k_max, 0, "0 leaves plain decoding alone")
    found = (0, 1.0)
    for k in range(1, k_max + 1):
        promised = speedup(tokens(k), price(k))
        if promised > found[1]:
            found = (k, promised)
    return found


def break_even(price: Price, k: int) -> float | None:
    """The α from which on drafts of length K are faster than plain decoding, each token alike.

    None where they never are: K + 1 tokens are not more than the price. With constant costs
    and K = 1 it is c.

    Raises:
        OptionError: K is no length above 0.
    """
    check_whole_number("k", k, 1, "0 is plain decoding itself")
    asked = price(k)
    if asked >= k + 1:
        return None
    return alpha_for(max(asked, 1.0), k)


def break_even_any(price: Price, k_max: int) -> tuple[int, float] | None:
    """The K of up to `k_max` that pays from the smallest α on, and that α; None if none pays.

    With constant costs that is K = 1 and α = c: if it is right more often than that, some draft
    pays (Leviathan et al., 2023, corollary 3.9). Where the first rows cost more than further
    ones it may be a longer one.

    Raises:
        OptionError: `k_max` is no length above 0.
    """
    check_whole_number("k_max", k_max, 1, "0 is plain decoding itself")
    found = [(alpha, k) for k in range(1, k_max + 1) if (alpha := break_even(price, k)) is not None]
    return min(found)[::-1] if found else None


def _check_cost(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise OptionError(f"{name} must be a cost of 0 or more, not {value!r}")
