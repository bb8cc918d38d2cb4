"""The nouns every other module shares: sampling parameters, drafts, events, results."""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
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

Draw = Literal["top", "without", "with"]
"""How the children of a node come about: the likeliest tokens, which are certain, or drawn
ones, without or with replacement."""

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""`stop`: an EOS token, a stop string, or a constraint that allows nothing more;
`length`: `max_new_tokens`; `context`: no positions are left; `cancelled`: the
caller let go."""


_LARGEST = 1e30
"""Of what is added to logits or multiplied with them: single precision holds the result."""

_STATEFUL = (
    "DiaEOSDelayPatternLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WhisperNoSpeechDetection",
)
"""Logits processors of transformers that remember calls, and so what drafts were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy decoding (argmax, no division); must be >= 0.
        top_k: keep the k most likely tokens (ties with the k-th stay); None is off.
        top_p: keep the smallest set of most likely tokens whose mass reaches this.
        min_p: drop tokens less than this times as likely as the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens
            that stand in prompt or text; 1 is off, more than 1 repeats less.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that
            stand in the text, once and per occurrence; 0 is off.
        no_repeat_ngram: no so many tokens in a row stand twice in prompt and text.
        logit_bias: added to these ids' logits; -inf forbids one.
        bad_words: what must not stand in the text: words, or sequences of token ids.
        min_new_tokens: no EOS token before so many have been emitted.
        json_schema, regex, grammar: what the text must be: valid by a JSON schema
            (True for any JSON object), matched by a regular expression, or derived
            from a Lark grammar. One of them at most.
        transforms: functions called as transformers calls logits processors, with
            `input_ids` `[R, L]` and `scores` `[R, V]` of rows with prefixes of one
            length. They must depend on these alone: most prefixes they see are of
            drafts that are dropped again.
        transform_draft: whether drafts are shaped by all that looks at a prefix, too.
            The law is the same either way; acceptance and cost are not.
        logprobs: so many of the likeliest tokens are reported with each token.
        seed: all noise of the request follows from it; None draws a fresh one.
        max_new_tokens: emitted tokens at most, EOS included; at least 1.
        stop: strings that end the text; they and what follows are cut from it.
            Special tokens are not text: end at them with `eos_token_ids`.
        eos_token_ids: ids that end the request; None takes the model's own, an
            empty tuple none at all.
        speculate: whether anything may be drafted for it; False is plain decoding.
        on_context_full: what happens when the model runs out of positions before
            `max_new_tokens`: "stop" ends with reason "context", "error" refuses
            the request before it starts.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    transforms: tuple[Callable[..., Any], ...] = ()
    transform_draft: bool = True
    logprobs: int = 0
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    speculate: bool = True
    on_context_full: Literal["stop", "error"] = "stop"

    def __post_init__(self) -> None:
        whole = ("top_k", "seed", "max_new_tokens", "no_repeat_ngram", "min_new_tokens", "logprobs")
        for name in whole:
            object.__setattr__(self, name, _whole(getattr(self, name)))
        _check_number("temperature", self.temperature, 0.0, math.inf, "0 is greedy decoding")
        _check_number("top_p", self.top_p, 0.0, 1.0, "1 switches it off", open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 switches it off")
        penalty = self.repetition_penalty
        _check_number("repetition_penalty", penalty, 1 / _LARGEST, _LARGEST, "1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -_LARGEST, _LARGEST, "0 switches it off")
        check_whole_number("min_new_tokens", self.min_new_tokens, 0, "0 switches it off")
        check_whole_number("logprobs", self.logprobs, 0, "0 switches it off")
        if self.no_repeat_ngram is not None:
            check_whole_number("no_repeat_ngram", self.no_repeat_ngram, 1, "leave it out instead")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        object.__setattr__(self, "transforms", _functions(self.transforms))
        for name in ("transform_draft", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, not {getattr(self, name)!r}")
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
        self._check_constraint()

    def _check_constraint(self) -> None:
        given = self.constraint_fields
        for name in given:
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise OptionError(f"{name} takes text that is not empty, not {value!r}")
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} exclude each other: give one of them")
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}: lower it"
            )

    @property
    def constraint_fields(self) -> tuple[str, ...]:
        """Which of the fields that constrain the text are set."""
        names = ("json_schema", "regex", "grammar")
        return tuple(n for n in names if getattr(self, n) is not None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not what they are by default."""
        plain = SamplingParams()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in values.items() if x != getattr(plain, name)}

    def ends(self, eos: Sequence[int]) -> tuple[int, ...]:
        """Ids that end the request, where the model's own are `eos`."""
        return tuple(eos) if self.eos_token_ids is None else self.eos_token_ids

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
    good = number and low <= value <= high and abs(value) < math.inf
    if not good or (open_low and value <= low):
        above = f" {'>' if open_low else '>='} {low:g}" if low > -math.inf else ""
        below = f" and <= {high:g}" if high < math.inf else ""
        raise OptionError(f"{name} must be a number{above}{below}, not {value!r} ({hint})")


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


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and what is added to its logit, in order of ids."""
    if value is None:
        return ()
    try:
        pairs = [(_whole(i), x) for i, x in dict(value).items()]
    except (TypeError, ValueError):
        raise OptionError(f"logit_bias takes a dict of token id to number, not {value!r}") from None
    for i, x in pairs:
        check_whole_number("a token id in logit_bias", i, 0, "ids of the target's vocabulary")
        number = isinstance(x, Real) and not isinstance(x, bool)
        if not number or not (x == -math.inf or abs(x) <= _LARGEST):
            raise OptionError(
                f"logit_bias of token {i} must be a number or -inf, not {x!r} (-inf forbids it)"
            )
    return tuple(sorted((i, float(x)) for i, x in pairs))


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Words, and sequences of ids."""
    if value is None:
        return ()
    found: list[str | tuple[int, ...]] = []
    for word in _listed("bad_words takes words and sequences of token ids", value):
        if isinstance(word, str):
            found += _strings("bad_words", _unicode("bad_words", word))
            continue
        ids = tuple(_whole(i) for i in _listed("bad_words takes words and token ids", word))
        if not ids:
            raise OptionError("bad_words has an empty sequence of token ids: leave it out")
        for i in ids:
            check_whole_number("a token id in bad_words", i, 0, "ids of the target's vocabulary")
        found.append(ids)
    return tuple(found)


def _listed(what: str, value: Any) -> list[Any]:
    """A list, an array, or one text or number alone."""
    if isinstance(value, (np.ndarray, Tensor)):
        value = value.tolist()
    if isinstance(value, (bytes, bytearray, Mapping)):
        raise OptionError(f"{what}, not {value!r}")
    alone = isinstance(value, str) or not hasattr(value, "__iter__")
    return [value] if alone else list(value)


def _unicode(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is not valid Unicode: give UTF-8 text") from error
    return text


def _schema(value: Any) -> Any:
    """A JSON schema as text."""
    if value is None or value is False:
        return None
    if value is True:
        return '{"type": "object"}'
    if hasattr(value, "model_json_schema"):  # a pydantic model
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionError(f"json_schema is not JSON ({error}): give a JSON schema") from error
    if not isinstance(value, (Mapping, bool)):
        raise OptionError(f"json_schema takes a JSON schema (a dict, or its text), not {value!r}")
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"json_schema cannot be written as JSON ({error})") from error


def _functions(value: Any) -> tuple[Callable[..., Any], ...]:
    if value is None:
        return ()
    alone = callable(value) or not hasattr(value, "__iter__")
    functions = (value,) if alone else tuple(value)
    if not all(map(callable, functions)):
        raise OptionError(
            f"transforms takes functions (input_ids, scores) -> scores, not {value!r}"
        )
    for f in (*functions, *(value if hasattr(value, "__iter__") else ())):
        if type(f).__name__ in _STATEFUL:
            raise OptionError(
                f"{type(f).__name__} remembers its calls, of which most are for drafts that are "
                "dropped again: leave it out, or use plain decoding elsewhere"
            )
    return functions


class Shape(IntEnum):
    """What drafts may look like; each is a case of those behind it."""

    CHAIN = 0
    """One path."""
    PATHS = 1
    """Several of one length, which have nothing but the root in common."""
    TREE = 2


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
    def depth(self) -> int:
        """That of the deepest node; 0 if there is none."""
        return max(self.depths, default=0)

    @cached_property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

    @cached_property
    def shape(self) -> Shape:
        if self.is_chain:
            return Shape.CHAIN
        below = [p for p in self.parents if p >= 0]
        inner = set(below)
        ends = {self.depths[node] for node in range(len(self)) if node not in inner}
        apart = len(below) == len(inner)
        return Shape.PATHS if apart and len(ends) == 1 else Shape.TREE


@dataclass(frozen=True, slots=True)
class PointMass:
    """Every draft token was certain given its prefix: q is one-hot."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Each draft token was drawn from a row of q of its own.

    That is its law given the path before it and the siblings before it: of children
    that were drawn without replacement, a row lacks those before.
    """

    q: Tensor  # [B, N, V], rows sum to 1


@dataclass(frozen=True, slots=True)
class Independent(Rows):
    """The same of siblings that were drawn from one row, with replacement."""


Law = PointMass | Rows


@dataclass(frozen=True, slots=True)
class Resume:
    """A pass of which the first layers have run: their keys and values lie in the cache.

    Attributes:
        layer: how many they are.
        states: `[B, T, H]` behind them, of the root and every node.
    """

    layer: int
    states: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round, for B sequences.

    Attributes:
        tokens: `[B, N]` int64; row b uses its first `len(trees[b])` nodes.
        law: how the tokens were drawn. It must be the truth: every verifier's
            exactness rests on it.
        trees: one shape per sequence.
        resume: what drafting has computed of the target's pass, if it has.
    """

    tokens: Tensor
    law: Law
    trees: tuple[Tree, ...]
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        text: the text this token completes; empty while a multi-byte character
            or a possible stop string is still open. The events' texts joined
            are the result's text.
        logprob: natural log of the target model's own probability, before
            transforms, temperature, top-k, top-p and min-p.
        top_logprobs: the likeliest tokens' ids and log-probabilities, as many as
            `SamplingParams.logprobs` asks for.
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
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one prompt.

    `token_ids` holds every emitted token, the EOS token or the tokens of the
    stop string included; `text` is cut before them.

    Attributes:
        seed: that gives the text again; None where none does: it was drawn without one, and
            how it was drawn followed from measured times or from other requests.
    """

    prompt: str | None
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenEvent, ...]
    finish_reason: FinishReason
    seed: int | None
    stats: Stats
    stopped_by: str | int | None = None
    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)
