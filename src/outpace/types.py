"""The nouns every other module shares: sampling parameters, drafts, events, results."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from .errors import OptionError

if TYPE_CHECKING:
    from .engine.stats import Stats

Provenance = Literal["draft", "correction", "bonus", "plain"]
"""Where a token came from: `draft` (proposed and accepted), `correction` (drawn
from the residual after a rejection), `bonus` (drawn from p after a full
acceptance), `plain` (nothing was proposed)."""

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""`stop`: an EOS token or stop string; `length`: `max_new_tokens`; `context`: no
positions are left; `cancelled`: the caller let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy decoding (argmax, no division); must be >= 0.
        top_k: keep the k most likely tokens (ties with the k-th stay); None is off.
        top_p: keep the smallest set of most likely tokens whose mass reaches this.
        seed: all noise of the request follows from it; None draws a fresh one.
        max_new_tokens: emitted tokens at most, EOS included; at least 1.
        stop: strings that end the text; they and what follows are cut from it.
            Special tokens are not text: end at them with `eos_token_ids`.
        eos_token_ids: ids that end the request; None takes the model's own, an
            empty tuple none at all.
        on_context_full: what happens when the model runs out of positions before
            `max_new_tokens`: "stop" ends with reason "context", "error" refuses
            the request before it starts.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    on_context_full: Literal["stop", "error"] = "stop"

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_new_tokens"):
            object.__setattr__(self, name, _whole(getattr(self, name)))
        _check_number("temperature", self.temperature, 0.0, math.inf, "0 is greedy decoding")
        _check_number("top_p", self.top_p, 0.0, 1.0, "1 switches it off", open_low=True)
        if self.top_k is not None:
            check_whole_number("top_k", self.top_k, 1, "leave it out to keep every token")
        if self.seed is not None:
            check_whole_number("seed", self.seed, 0, "leave it out for a fresh one", below=2**64)
        check_whole_number("max_new_tokens", self.max_new_tokens, 1, "ask for at least one token")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        if self.eos_token_ids is not None:
            given: Any = self.eos_token_ids
            if isinstance(given, (np.ndarray, Tensor)):
                given = given.flatten().tolist()
            ids = [_whole(i) for i in (given if hasattr(given, "__iter__") else (given,))]
            for i in ids:
                check_whole_number(
                    "eos_token_ids", i, 0, "give token ids of the target's vocabulary"
                )
            object.__setattr__(self, "eos_token_ids", tuple(ids))
        if self.on_context_full not in ("stop", "error"):
            raise OptionError(
                f"on_context_full must be 'stop' or 'error', not {self.on_context_full!r}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from keyword options.

        Raises:
            OptionError: an unknown option, with the nearest known one.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise OptionError(f"unknown sampling option {name!r}: {hint}")
        return cls(**options)

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


def _check_number(
    name: str, value: Any, low: float, high: float, hint: str, *, open_low: bool = False
) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    good = number and low <= value <= high and value < math.inf and (value > low or not open_low)
    if not good:
        bound = f"{'>' if open_low else '>='} {low:g}" + (
            f" and <= {high:g}" if high < math.inf else ""
        )
        raise OptionError(f"{name} must be a number {bound}, not {value!r} ({hint})")


def check_whole_number(
    name: str, value: Any, low: int, hint: str, *, below: int | None = None
) -> int:
    """The value as a Python number.

    Raises:
        OptionError: not a whole number, or out of bounds.
    """
    value = _whole(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (below is not None and value >= below)
    ):
        bound = f">= {low}" + (" and below 2**64" if below is not None else "")
        raise OptionError(f"{name} must be a whole number {bound}, not {value!r} ({hint})")
    return value


def _whole(value: Any) -> Any:
    """Whole numbers of other libraries as Python's; anything else as it is."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(v, str) and v for v in values):
        raise OptionError(f"{name} takes non-empty strings, not {value!r}")
    return tuple(values)


@dataclass(frozen=True)
class Tree:
    """The shape of a draft: `parents[i]` is the node before node i, -1 the root.

    The root is the last committed token, which is not a node. Parents come
    before their children. A chain has `parents == (-1, 0, 1, ...)`.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not -1 <= p < i for i, p in enumerate(self.parents)):
            raise OptionError(f"parents must come before their children, got {self.parents}")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for p in self.parents:
            depths.append(1 if p < 0 else depths[p] + 1)
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))


@dataclass(frozen=True, slots=True)
class PointMass:
    """Every draft token was certain given its prefix: q is one-hot."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Each draft token was drawn from its own row of q, independently."""

    q: Tensor  # [B, N, V], rows sum to 1


Law = PointMass | Rows


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round, for B sequences.

    Attributes:
        tokens: `[B, N]` int64; row b uses its first `len(trees[b])` nodes.
        law: how the tokens were drawn. It must be the truth: every verifier's
            exactness rests on it.
        trees: one shape per sequence.
    """

    tokens: Tensor
    law: Law
    trees: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        text: the text this token completes; empty while a multi-byte character
            or a possible stop string is still open. The events' texts joined
            are the result's text.
        logprob: natural log of the target model's own probability, before
            temperature, top-k and top-p.
        provenance, depth: where it came from; depth is its place in its round,
            from 1.
        index: 0 for the first prompt of a batch, and so on.
    """

    text: str
    token_id: int
    logprob: float
    provenance: Provenance
    depth: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one prompt.

    `token_ids` holds every emitted token, the EOS token or the tokens of the
    stop string included; `text` is cut before them.
    """

    prompt: str | None
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenEvent, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    stopped_by: str | int | None = None
    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)
