"""The public object: text in, exact text out."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, cast, overload

import numpy as np
from torch import Tensor

from .drafters import Drafter
from .engine import Engine, Request, Stats
from .engine.checks import AUTO
from .errors import OptionError, OutpaceError
from .models.base import LanguageModel
from .models.tokenizer import Tokenizer
from .types import Result, SamplingParams, TokenEvent
from .verifiers import Verifier

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]


class Generator:
    """Generates from a target, with or without a drafter. Made by `load`, or from parts.

    Attributes:
        engine: the engine underneath; its `stats` cover everything so far.
        remarks: what the vocabulary check found worth showing.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        k: int | str | None = AUTO,
        *,
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
        verifier: Verifier | None = None,
        max_batch: int = 8,
        max_len: int | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos)
        self.remarks = tuple(remarks)
        self.engine = Engine(target, drafter, k, verifier, max_batch, max_len)

    @overload
    def generate(
        self,
        prompts: str,
        *,
        params: SamplingParams | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: list[str],
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Any: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Generate for one prompt or many at once.

        Args:
            prompts: a text (or its token ids), or a list of them.
            messages: instead of prompts, a conversation or a list of them, put
                through the model's chat template.
            params: sampling parameters, for all or one per prompt.
            seed: one for all prompts (equal prompts then give equal texts), or
                one per prompt.
            options: the fields of `SamplingParams`, instead of `params`.

        Returns:
            A `Result`, or a list of them where a list was given.

        Raises:
            OutpaceError: before anything is generated.
        """
        with self.stream(prompts, messages=messages, params=params, seed=seed, **options) as stream:
            for _ in stream:
                pass
            return stream.results if stream.many else stream.results[0]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Stream:
        """Like `generate`, event by event; several streams may run side by side."""
        ids, texts, many = encode(self.tokenizer, prompts, messages)
        all_params = _spread(params, seed, options, len(ids))
        if self.tokenizer is None and any(p.stop for p in all_params):
            raise OptionError("stop strings need a tokenizer: pass one, or use eos_token_ids")
        requests: list[Request] = []
        try:
            for index, (prompt, p) in enumerate(zip(ids, all_params, strict=True)):
                with numbered(index, many):
                    request = self.engine.submit(
                        prompt, p, eos=self.eos_token_ids, tokenizer=self.tokenizer, index=index
                    )
                requests.append(request)
        except Exception:
            for request in requests:
                self.engine.cancel(request)
            raise
        return Stream(self.engine, requests, texts, many)


def encode(
    tokenizer: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt] | None,
    messages: Messages | Sequence[Messages] | None,
) -> tuple[list[list[int]], list[str | None], bool]:
    """Token ids, texts where texts were given, and whether a list was given.

    Raises:
        OptionError: nothing, both, or something empty was given, or there is no
            tokenizer or chat template for it.
    """
    if (prompts is None) == (messages is None):
        raise OptionError("give either prompts or messages")
    given: list[Any]
    if messages is not None:
        if isinstance(messages, Mapping):
            raise OptionError("messages takes a list of messages, not one: put it in brackets")
        many = bool(messages) and not isinstance(messages[0], Mapping)
        given = list(messages) if many else [messages]
        if not given or not all(given):
            raise OptionError("messages is empty: give at least one message with a role")
        return [_need(tokenizer).chat(m) for m in given], [None] * len(given), many
    many = not isinstance(prompts, str) and not _is_ids(prompts)
    given = list(cast(Any, prompts)) if many else [prompts]
    if not given:
        raise OptionError("the list of prompts is empty: give at least one prompt")
    ids = []
    for index, prompt in enumerate(given):
        with numbered(index, many):
            ids.append(_ids(tokenizer, prompt))
    return ids, [p if isinstance(p, str) else None for p in given], many


@contextmanager
def numbered(index: int, many: bool) -> Iterator[None]:
    """Says which of many prompts an error is about."""
    try:
        yield
    except OutpaceError as error:
        if not many:
            raise
        raise type(error)(f"prompt {index + 1}: {error}") from error


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids (a list of numbers, an array, a 1-D tensor)."""
    wrong = isinstance(prompts, (bytes, bytearray))
    if wrong or not isinstance(prompts, (Sequence, np.ndarray, Tensor)):
        raise OptionError(f"a prompt is text or token ids, not {type(prompts).__name__}")
    if isinstance(prompts, (np.ndarray, Tensor)):
        return prompts.ndim < 2
    return len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))


def _ids(tokenizer: Tokenizer | None, prompt: Any) -> list[int]:
    """Token ids of one prompt."""
    if isinstance(prompt, str):
        if not prompt:  # before the tokenizer puts a BOS token there
            raise OptionError("the prompt is empty: give at least one token of text")
        return _need(tokenizer).encode(prompt)
    try:
        return [operator.index(t) for t in prompt]
    except TypeError as error:
        raise OptionError(f"a prompt is text or a list of token ids, not {prompt!r}") from error


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise OptionError("this generator has no tokenizer: give token ids")
    return tokenizer


class Stream:
    """Events of one call as they come; `results` once it is exhausted.

    Abandoned, closed or left as a context manager, it frees its slots.
    """

    def __init__(
        self, engine: Engine, requests: list[Request], texts: list[str | None], many: bool
    ) -> None:
        self.many = many
        self._engine = engine
        self._requests = requests
        self._texts = texts
        self._before = replace(engine.stats)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        while True:
            for request in self._requests:
                if request.fresh:
                    return request.fresh.popleft()
            for request in self._requests:
                if request.failure is not None:
                    raise request.failure
            if all(r.finish_reason is not None for r in self._requests):
                raise StopIteration
            self._engine.step()

    @property
    def stats(self) -> Stats:
        """So far, all prompts together; times are the engine's since the stream began."""
        total = Stats()
        for request in self._requests:
            total = total.merge(request.stats)
        now = self._engine.stats
        for name in (f.name for f in fields(Stats) if f.name.endswith("_seconds")):
            setattr(total, name, getattr(now, name) - getattr(self._before, name))
        return total

    @property
    def results(self) -> list[Result]:
        """One result per prompt.

        Raises:
            OptionError: the stream is not exhausted yet.
        """
        if any(r.finish_reason is None for r in self._requests):
            raise OptionError("the stream has not ended: read it to the end, or close it")
        pairs = zip(self._requests, self._texts, strict=True)
        return [_result(r, t, self._engine.repeats(r)) for r, t in pairs]

    def close(self) -> None:
        """Stop generating and free the slots; what was emitted stays in `results`."""
        for request in self._requests:
            self._engine.cancel(request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_requests"):
            self.close()


def _result(request: Request, prompt: str | None, repeats: bool) -> Result:
    assert request.finish_reason is not None
    return Result(
        prompt=prompt,
        text=request.text,
        token_ids=tuple(request.emitted),
        tokens=tuple(request.events),
        finish_reason=request.finish_reason,
        seed=request.seed if repeats else None,
        stats=request.stats,
        stopped_by=request.stopped_by,
        prompt_token_ids=request.prompt,
    )


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None,
    seed: int | Sequence[int] | None,
    options: Mapping[str, Any],
    count: int,
) -> list[SamplingParams]:
    """One set of sampling parameters per prompt."""
    if params is not None and options:
        raise OptionError(f"give params or {', '.join(options)}, not both")
    if params is None:
        params = SamplingParams.of(options)
    spread: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * count
    wrong = next((p for p in spread if not isinstance(p, SamplingParams)), None)
    if wrong is not None:
        raise OptionError(f"params takes outpace.SamplingParams, not {type(wrong).__name__}")
    if len(spread) != count:
        raise OptionError(f"{len(spread)} params for {count} prompts: give one, or one each")
    if seed is None:
        return spread
    many = isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, str)
    seeds: list[Any] = list(cast(Any, seed)) if many else [seed] * count
    if len(seeds) != count:
        raise OptionError(f"{len(seeds)} seeds for {count} prompts: give one, or one each")
    return [p.with_seed(s) for p, s in zip(spread, seeds, strict=True)]
