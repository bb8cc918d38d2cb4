"""The public object: text in, exact text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .drafters import Drafter
from .engine import Engine, Stats
from .engine.sequence import Sequence as Running
from .errors import IncompatibleError, OptionError
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
        k: int = 4,
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
            seed: one for all prompts, or one per prompt.
            options: the fields of `SamplingParams`, instead of `params`.

        Returns:
            A `Result`, or a list of them where a list was given.

        Raises:
            OutpaceError: before anything is generated.
        """
        stream = self.stream(prompts, messages=messages, params=params, seed=seed, **options)
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
        running: list[Running] = []
        try:
            for index, (prompt, p) in enumerate(zip(ids, all_params, strict=True)):
                detokenizer = self.tokenizer.detokenizer() if self.tokenizer else None
                running.append(
                    self.engine.submit(
                        prompt, p, eos=self.eos_token_ids, detokenizer=detokenizer, index=index
                    )
                )
        except Exception:
            for sequence in running:
                self.engine.cancel(sequence)
            raise
        return Stream(self.engine, running, texts, many)


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
        many = bool(messages) and not isinstance(messages[0], Mapping)
        given = list(messages) if many else [messages]
        if not given or not all(given):
            raise OptionError("messages is empty: give at least one message with a role")
        return [_need(tokenizer).chat(m) for m in given], [None] * len(given), many
    assert prompts is not None
    many = not isinstance(prompts, str) and not (len(prompts) > 0 and isinstance(prompts[0], int))
    given = list(prompts) if many else [prompts]
    if not given:
        raise OptionError("the list of prompts is empty: give at least one prompt")
    ids = [_need(tokenizer).encode(p) if isinstance(p, str) else [int(t) for t in p] for p in given]
    if not all(ids):
        raise OptionError("the prompt is empty: give at least one token of text")
    return ids, [p if isinstance(p, str) else None for p in given], many


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise OptionError("this generator has no tokenizer: give token ids")
    return tokenizer


class Stream:
    """Events of one call as they come; `results` once it is exhausted.

    Abandoned, closed or left as a context manager, it frees its slots.
    """

    def __init__(
        self, engine: Engine, running: list[Running], texts: list[str | None], many: bool
    ) -> None:
        self.many = many
        self._engine = engine
        self._running = running
        self._texts = texts

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        while True:
            for sequence in self._running:
                if sequence.fresh:
                    return sequence.fresh.popleft()
            if all(s.finish_reason is not None for s in self._running):
                raise StopIteration
            self._engine.step()

    @property
    def stats(self) -> Stats:
        """So far, all prompts together."""
        total = Stats()
        for sequence in self._running:
            total = total.merge(sequence.stats)
        return total

    @property
    def results(self) -> list[Result]:
        """One result per prompt.

        Raises:
            IncompatibleError: the stream is not exhausted yet.
        """
        if any(s.finish_reason is None for s in self._running):
            raise IncompatibleError("the stream has not ended: read it to the end, or close it")
        return [_result(s, t) for s, t in zip(self._running, self._texts, strict=True)]

    def close(self) -> None:
        """Stop generating and free the slots; what was emitted stays in `results`."""
        for sequence in self._running:
            self._engine.cancel(sequence)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_running"):
            self.close()


def _result(sequence: Running, prompt: str | None) -> Result:
    assert sequence.finish_reason is not None
    return Result(
        prompt=prompt,
        text=sequence.text,
        token_ids=tuple(sequence.emitted),
        tokens=tuple(sequence.events),
        finish_reason=sequence.finish_reason,
        seed=sequence.seed,
        stats=sequence.stats,
        stopped_by=sequence.stopped_by,
        prompt_token_ids=sequence.prompt,
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
    spread = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(spread) != count:
        raise OptionError(f"{len(spread)} params for {count} prompts: give one, or one each")
    if seed is None:
        return spread
    seeds = [seed] * count if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise OptionError(f"{len(seeds)} seeds for {count} prompts: give one, or one each")
    return [p.with_seed(s) for p, s in zip(spread, seeds, strict=True)]
