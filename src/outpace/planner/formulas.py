"""Tokens per round, from acceptance.

A round of draft length K emits the accepted tokens and one more, which is the target's own.
Drafts are accepted from the front, so that

    E = 1 + Σ_{i=1..K} P(at least i are accepted).

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML
2023, has it for equal chances (equation 1); Sun et al., "Block verification accelerates
speculative decoding", ICLR 2025, judges prefixes jointly. What a round costs is in `prices`;
trees are `trees.expected_tokens`. `simulation` is what all of it is checked against, and
docs/formulas.md has the widespread formulas that it refutes.

Pure functions: numbers in, numbers out. Tokens are per round and sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..types import check_whole_number

_Floats = NDArray[np.float64]

_ROUNDING = 1e-6
"""By which a row's sum may differ from 1."""

_DIGITS = 14
"""Joint ratios that agree in so many digits are one."""

_MOST_STATES = 2_000_000
"""Joint ratios that are followed at once."""


class Counted(Protocol):
    """Rounds as they were counted; `Stats` is one.

    Attributes:
        rounds: all of them, those without a draft included.
        reached, accepted_at: by depth, from 1: rounds that got there with something to try,
            and rounds that accepted it.
    """

    @property
    def rounds(self) -> int: ...
    @property
    def reached(self) -> Sequence[int]: ...
    @property
    def accepted_at(self) -> Sequence[int]: ...


def tokens_iid(alpha: float, k: int) -> float:
    """Tokens per round if every token is accepted with the same chance, given that it is tried.

    (1 - α^(K+1)) / (1 - α), and K + 1 where α is 1: Leviathan et al., 2023, equation 1.

    Args:
        alpha: the chance α; not the acceptance rate, see `alphas.alpha_of_rate`.

    Raises:
        OptionError: α is no probability, or K no length.
    """
    return tokens_by_depth([alpha], k)


def tokens_by_depth(alphas: Sequence[float], k: int | None = None) -> float:
    """Tokens per round with a chance for each depth: 1 + α_1 + α_1 α_2 + ...

    That needs no independence: α_i is a chance given that depth i is reached, so products of
    them are the chances to get there. Pooled over different texts the α_i rise with depth, since
    only what is easily drafted gets deep, and E is exact all the same. But that is of rounds with
    the K that they were counted with. For another K take each text's own α_i (`alphas_of`), and
    then `tokens_over_texts`: with longer drafts more of the rounds are those of hard texts.

    Args:
        alphas: α_1, α_2, ...; beyond the last that one holds.
        k: K, by default as many as there are.

    Raises:
        OptionError: the α_i are no probabilities, there is none, or K is no length.
    """
    chances = [check_chance("α", alpha) for alpha in alphas]
    k = len(chances) if k is None else check_whole_number("k", k, 0, "a draft's length")
    if k and not chances:
        raise OptionError("there is no α to go by: give that of depth 1 at least")
    reach, terms = 1.0, [1.0]
    for depth in range(k):
        reach *= chances[min(depth, len(chances) - 1)]
        terms.append(reach)
    return math.fsum(terms)


def tokens_block(p: Sequence[float], q: Sequence[float], k: int) -> float:
    """Tokens per round by block verification, where every position has the same rows.

    Given a draft X the rule accepts at least i tokens with a chance whose mean over what
    follows is P_i = min(1, P_{i-1} p(X_i)/q(X_i)) (Sun et al., 2025, algorithm 2): with S_i
    from there, E[P_{i+1} | P_i] = Σ_x min(q, P_i p) = P_i - S_i, hence for the chance at i

        (P_i - S_i) + (1 - P_i + S_i) S_i / (S_i + 1 - P_i) = P_i.

    So E = 1 + Σ_i E[P_i], and the law of P_i is followed exactly. α = Σ min(p, q) does not
    determine it: pairs of rows with one α have different E. It lies between token
    verification's 1 + Σ α^i and 1 + K α.

    Args:
        p, q: `[V]` the target's and the draft's probabilities.

    Raises:
        OptionError: they are not rows of one vocabulary, K is no length, or there are too
            many different joint ratios to follow.
    """
    target, draft = check_rows(p, q)
    check_whole_number("k", k, 0, "a draft's length")
    drawn = draft > 0
    ratios, chances = _merged(target[drawn] / draft[drawn], draft[drawn])
    joint, mass, terms = np.ones(1), np.ones(1), [1.0]
    for _ in range(k):
        if joint.size * ratios.size > _MOST_STATES:
            raise OptionError(
                f"{joint.size * ratios.size} joint ratios are too many to follow: give rows of "
                "fewer tokens, or a shorter draft"
            )
        following = np.minimum(1, np.outer(joint, ratios)).round(_DIGITS)
        joint, mass = _merged(following.ravel(), np.outer(mass, chances).ravel())
        terms.append(float(joint @ mass))
    return math.fsum(terms)


def tokens_over_texts(tokens: Sequence[float], lengths: Sequence[float] | None = None) -> float:
    """Tokens per round over texts, each with its own: Σ n / Σ (n / E).

    The harmonic mean for texts of one length. The mean of the E is more: a text that is hard
    to draft has more rounds.

    Args:
        tokens: E of each text.
        lengths: n, what each emits; by default the same.

    Raises:
        OptionError: there is no text, or an E is below 1, or a length not above 0.
    """
    lengths = [1.0] * len(tokens) if lengths is None else lengths
    if not tokens or len(lengths) != len(tokens):
        raise OptionError("give tokens per round of one text or more, and a length for each")
    if not all(1 <= each < math.inf for each in tokens):
        raise OptionError(f"a round emits at least one token, not {min(tokens)}: give 1 or more")
    if not all(0 < length < math.inf for length in lengths):
        raise OptionError("a text's length must be above 0: leave empty ones out")
    rounds = math.fsum(n / each for n, each in zip(lengths, tokens, strict=True))
    return math.fsum(lengths) / rounds


def tokens_counted(counts: Iterable[Counted]) -> float:
    """Tokens per round of rounds that were counted: 1 + Σ_i α_i (share that reached depth i).

    It is `tokens_by_depth` of their α_i where all drafts have one length, and right where
    they have not, or where some rounds have no draft.

    Raises:
        OptionError: nothing was counted.
    """
    pool = list(counts)
    rounds = sum(count.rounds for count in pool)
    if not rounds:
        raise OptionError("no round was counted: run some first")
    return 1 + sum(sum(count.accepted_at) for count in pool) / rounds


def _merged(values: _Floats, masses: _Floats) -> tuple[_Floats, _Floats]:
    """Each value once, with all of its mass."""
    found, same = np.unique(values, return_inverse=True)
    return found, np.bincount(same.ravel(), masses).astype(np.float64)


def check_chance(name: str, value: float) -> float:
    """The value, which is a probability; else OptionError."""
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise OptionError(f"{name} must be a probability from 0 to 1, not {value!r}")
    return float(value)


def check_tokens(tokens: float, k: int, least: int = 0) -> None:
    """Raises OptionError if a round with K, which is `least` or more, cannot emit so many."""
    check_whole_number("k", k, least, "a draft's length")
    if not 1 <= tokens <= k + 1:
        raise OptionError(f"a round with k={k} emits 1 to {k + 1} tokens, not {tokens}")


def check_rows(p: Sequence[float], q: Sequence[float]) -> tuple[_Floats, _Floats]:
    """As arrays that sum to 1.

    Raises:
        OptionError: they are not rows of one vocabulary.
    """
    rows = []
    for name, row in (("p", p), ("q", q)):
        array = np.asarray(row, np.float64)
        if array.ndim != 1 or not (array >= 0).all() or not abs(array.sum() - 1) <= _ROUNDING:
            raise OptionError(f"{name} is no row of probabilities that sum to 1: give [V] of them")
        rows.append(array / array.sum())
    if len(rows[0]) != len(rows[1]):
        raise OptionError(
            f"p has {len(rows[0])} tokens and q {len(rows[1])}: give rows of one vocabulary"
        )
    return rows[0], rows[1]
