"""How sure tokens per round are that were measured on some prompts.

Rounds of one text are alike: it is easy to draft, or it is not. To count rounds as independent
makes intervals much too short, so the prompt is the unit. The variance is the delete-one
jackknife's (Efron and Stein, "The jackknife estimate of variance", 1981), which takes any smooth
function of the counts, with Student's t for few prompts. A bootstrap over prompts agrees where
there are dozens of them, and is too short for ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..errors import OptionError
from ..types import check_whole_number
from .alphas import rising_root
from .formulas import Counted, tokens_counted

_C = TypeVar("_C", bound=Counted)


class Interval(NamedTuple):
    """What was found, and the bounds that hold the truth as often as was asked for."""

    value: float
    low: float
    high: float


def interval(
    prompts: Sequence[_C],
    figure: Callable[[Sequence[_C]], float] = tokens_counted,
    *,
    level: float = 0.95,
    coming: int | None = None,
) -> Interval:
    """An interval for a figure of all prompts like these, or of some that are still to come.

    Args:
        prompts: what was counted, prompt by prompt (all rounds of one together).
        figure: from counts to a number, such as `tokens_counted(c) / price(k)` for a speedup.
            Prices are taken as known.
        level: how often it holds the truth.
        coming: so many other prompts of the same kind will be run, and the interval is for the
            figure that they will show. By default for the mean over all there are.

    Raises:
        OptionError: there are fewer than two prompts, or level or coming cannot be.
    """
    count = len(prompts)
    if count < 2:
        raise OptionError(
            "an interval needs two prompts or more: what one varies by says nothing of others"
        )
    if not 0 < level < 1:
        raise OptionError(f"level must lie between 0 and 1, not {level!r}")
    value = figure(prompts)
    without = [figure([*prompts[:i], *prompts[i + 1 :]]) for i in range(count)]
    middle = math.fsum(without) / count
    variance = (count - 1) / count * math.fsum((x - middle) ** 2 for x in without)
    if coming is not None:
        variance *= 1 + count / check_whole_number("coming", coming, 1, "prompts to be run")
    half = t_quantile(level, count - 1) * math.sqrt(variance)
    return Interval(value, value - half, value + half)


def t_quantile(level: float, freedom: int) -> float:
    """The t with P(|T| < t) = level for Student's distribution.

    Abramowitz and Stegun, 1964, 26.7.3 and 26.7.4, which are finite sums, solved for the angle.
    """
    quarter = math.pi / 2
    angle = quarter * rising_root(lambda part: _within(quarter * part, freedom) - level)
    return math.sqrt(freedom) * math.tan(angle)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < √ν tan(angle))."""
    cos, sin = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = cos if odd else 1.0, 0.0
    for i in range(odd + 2, freedom + 1, 2):
        total += term
        term *= cos * cos * (i - 1) / i
    return (angle + sin * total) * 2 / math.pi if odd else sin * total
