"""Constrained decoding: what the text must be, as a transform.

The grammars are llguidance's (an Earley parser over a lexer of derivatives,
Rust, MIT): JSON schemas, regular expressions and context-free grammars, masks
in tens of microseconds without a table made ahead, and parsers that go back any
number of tokens, which rows of a block need. Where only one text may come next,
its canonical tokens must spell it; elsewhere any tokens may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError, first_line
from ..sampling import Prefixes
from ..types import SamplingParams


class Grammars:
    """Compiles constraints for one tokenizer; what is costly is kept."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._lexicon = lru_cache(maxsize=4)(self._make_lexicon)
        self._compiled = lru_cache(maxsize=16)(self._compile)

    def constraint(self, params: SamplingParams, vocab_size: int, eos: Sequence[int]) -> Constraint:
        """The constraint that a request asks for.

        Args:
            vocab_size: V, the width of the logits.
            eos: ids that end the request.

        Raises:
            OptionError: llguidance is missing, or cannot use the tokenizer or the grammar.
        """
        name = params.constraint_fields[0]
        lexicon_eos = tuple(sorted(eos)) or self._own_eos()
        matcher = self._compiled(name, getattr(params, name), vocab_size, lexicon_eos)
        return Constraint(matcher, frozenset(eos), vocab_size, lexicon_eos)

    def _own_eos(self) -> tuple[int, ...]:
        eos = self._hf.eos_token_id
        return (int(eos) if eos is not None else 0,)

    def _make_lexicon(self, vocab_size: int, eos: tuple[int, ...]) -> Any:
        _need_llguidance()
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._hf, n_vocab=vocab_size, eos_token=list(eos))
        except Exception as error:
            raise OptionError(
                f"llguidance cannot use this tokenizer ({first_line(error)}): constrained decoding "
                "needs a fast tokenizer (tokenizer.json)"
            ) from error

    def _compile(self, name: str, text: str, vocab_size: int, eos: tuple[int, ...]) -> Any:
        _need_llguidance()
        from llguidance import LLMatcher

        make: dict[str, Callable[[str], str]] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        lexicon = self._lexicon(vocab_size, eos)
        try:
            matcher = LLMatcher(lexicon, make[name](text), log_level=0)
            failure = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:
            failure = first_line(error)
        if failure:
            raise OptionError(f"{name} cannot be used: {' '.join(failure.split())}")
        return matcher


def _need_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "constrained decoding needs llguidance: pip install 'outpace[constrain]'"
        ) from error


class Constraint:
    """Forbids tokens that the text, so far and along a path, cannot go on with.

    Args:
        matcher: llguidance's, at the beginning of the text.
        eos: ids that end the request.
        lexicon_eos: ids that end a text to the matcher.
    """

    def __init__(
        self, matcher: Any, eos: frozenset[int], vocab_size: int, lexicon_eos: tuple[int, ...]
    ) -> None:
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._eos, self._vocab_size = eos, vocab_size
        self._spare = [i for i in lexicon_eos if i not in eos]  # end nothing for this request
        self._read: list[int] = []  # the text that the matcher has seen
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        self._catch_up(prefixes)
        for row, path in enumerate(prefixes.paths):
            mask = self._mask(tuple(path))
            if mask is not None:
                logits[row].masked_fill_(~mask.to(logits.device), -torch.inf)
        return logits

    def complete(self, path: Sequence[int]) -> bool:
        """Whether the text, as last read, with this path is all that it must be."""
        with self._behind(path) as reached:
            return reached and bool(self._matcher.is_accepting())

    def _catch_up(self, prefixes: Prefixes) -> None:
        new = list(prefixes.tokens[prefixes.prompt + len(self._read) :])
        if new:
            self._masks.clear()
            self._read += new
            self._matcher.consume_tokens(new)
            self._check()

    def _mask(self, path: tuple[int, ...]) -> Tensor | None:
        """Allowed tokens `[V]` bool behind a path; None where the text cannot come."""
        if path not in self._masks:
            with self._behind(path) as reached:
                self._masks[path] = self._allowed() if reached else None
        return self._masks[path]

    @contextmanager
    def _behind(self, path: Sequence[int]) -> Iterator[bool]:
        """The matcher behind a path, and whether it could go there."""
        if not self._eos.isdisjoint(path):
            yield False
            return
        consumed = self._matcher.try_consume_tokens(list(path))
        try:
            yield consumed == len(path)
        finally:
            if self._matcher.is_error():  # for good; the text may go elsewhere
                self._matcher = self._fresh.deep_copy()
                self._matcher.consume_tokens(self._read)
            else:
                self._matcher.rollback(consumed)

    def _allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        mask[self._spare] = False
        return torch.from_numpy(mask)

    def _check(self) -> None:
        if self._matcher.is_error():
            said = " ".join(str(self._matcher.get_error()).partition("<state>")[0].split())
            raise OptionError(f"the constraint cannot go on ({said}): simplify it")
