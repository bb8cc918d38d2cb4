"""Transforms of logits that look at what stands before a row.

Every row is transformed by its own prefix: the request's tokens so far and the
drafted ones on the row's path. So what holds for plain decoding, a block of one
row, holds for every row of a block. A transform belongs to one request and may
remember what it has read of its tokens, which only grow; nothing else about a
call may leave a trace, because most drafted paths are never taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import DeadEndError, OptionError, OutpaceError, first_line

Path = Sequence[int]

Stuck = dict[int, OutpaceError | None]
"""Rows that have no token left, and why; None where the text is complete."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What stands before each of R rows.

    Attributes:
        tokens: of the request, prompt and emitted.
        prompt: how many of them are the prompt.
        paths: R paths of drafted tokens behind them.
    """

    tokens: Sequence[int]
    prompt: int
    paths: Sequence[Path]

    def tail(self, row: int, length: int) -> tuple[int, ...] | None:
        """The last tokens before a row; None where there are not as many."""
        path = self.paths[row][-length:] if length else ()
        rest = length - len(path)
        if rest > len(self.tokens):
            return None
        return (*self.tokens[len(self.tokens) - rest :], *path)


class Transform(Protocol):
    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Logits `[R, V]` of R rows, which it may change in place."""
        ...


class Pipeline:
    """A request's transforms, one after the other.

    Args:
        tokens: of the request; the list grows as it goes on.
        prompt: how many of them are the prompt.
        complete: whether the text with a path is whole, so that it may end where no token is left.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prompt: int,
        transforms: Sequence[Transform],
        complete: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self._tokens, self._prompt, self._transforms = tokens, prompt, transforms
        self._complete = complete

    def __call__(self, logits: Tensor, paths: Sequence[Path]) -> tuple[Tensor, Stuck]:
        """Transformed logits `[R, V]`, and the rows that have no token left.

        A row that a transform fails on says nothing about the others, which may be taken instead.
        """
        prefixes = Prefixes(self._tokens, self._prompt, paths)
        given, logits = logits, logits.clone()
        try:
            for transform in self._transforms:
                logits = transform(logits, prefixes)
        except OutpaceError as error:
            if len(paths) == 1:
                return torch.zeros_like(given), {0: error}
            alone = [self(given[i : i + 1], [path]) for i, path in enumerate(paths)]
            failed = {i: why[0] for i, (_, why) in enumerate(alone) if why}
            return torch.cat([rows for rows, _ in alone]), failed
        best = logits.amax(-1)
        at = [row for row, value in enumerate(best.tolist()) if value == -math.inf]
        if not at:
            return logits, {}
        why = {r: None if self._complete(paths[r]) else _dead_end() for r in at}
        return logits.masked_fill(torch.isneginf(best).unsqueeze(-1), 0), why


def _dead_end() -> OutpaceError:
    return DeadEndError(
        "no token is left to go on with: the constraint, bad words and other transforms exclude "
        "every one; loosen one of them"
    )


class LogitBias:
    """Adds to some tokens' logits."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._ids = torch.tensor(list(bias), device=device)
        self._values = torch.tensor(list(bias.values()), device=device)

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        logits[:, self._ids] += self._values.to(logits.dtype)
        return logits


class Penalties:
    """Repetition, presence and frequency penalties.

    Repetition (Keskar et al., "CTRL", 2019, section 4.1) divides a positive logit
    and multiplies a negative one, for tokens of prompt and text. Presence and
    frequency subtract, once and per occurrence, for tokens of the text.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._known: set[int] = set()
        self._seen = torch.empty(0, dtype=torch.int64, device=device)  # the same as ids
        self._emitted = torch.zeros(vocab_size, device=device)  # how often in the text
        self._subtracted = torch.zeros(vocab_size, device=device)
        self._read = 0

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        self._catch_up(prefixes)
        drafted = [Counter(path) for path in prefixes.paths]
        where = [(row, token) for row, path in enumerate(drafted) for token in path]
        if where:  # tokens whose counts are not those of the text
            rows, ids = torch.tensor(where, device=logits.device).T
            times = [float(n) for path in drafted for n in path.values()]
            counts = self._emitted[ids] + torch.tensor(times, device=logits.device)
            on_path = self._weaker(logits[rows, ids]) - self._subtraction(counts)
        if self._repetition != 1:
            logits.index_copy_(1, self._seen, self._weaker(logits.index_select(1, self._seen)))
        if self._presence or self._frequency:
            logits -= self._subtracted
        if where:
            logits[rows, ids] = on_path
        return logits

    def _weaker(self, logits: Tensor) -> Tensor:
        if self._repetition == 1:
            return logits
        choose = torch.minimum if self._repetition > 1 else torch.maximum  # a quotient if positive
        return choose(logits / self._repetition, logits * self._repetition)

    def _subtraction(self, counts: Tensor) -> Tensor:
        return self._frequency * counts + self._presence * (counts > 0)

    def _catch_up(self, prefixes: Prefixes) -> None:
        new = list(prefixes.tokens[self._read :])
        if not new:
            return
        device = self._seen.device
        fresh = [token for token in dict.fromkeys(new) if token not in self._known]
        self._known.update(fresh)
        self._seen = torch.cat([self._seen, torch.tensor(fresh, dtype=torch.int64, device=device)])
        if written := new[max(0, prefixes.prompt - self._read) :]:
            ids = torch.tensor(written, device=device)
            self._emitted.index_add_(0, ids, torch.ones_like(ids, dtype=self._emitted.dtype))
            self._subtracted[ids] = self._subtraction(self._emitted[ids])
        self._read += len(new)


class NoRepeatNgram:
    """No n tokens in a row stand twice in prompt and text (Paulus et al., 2018, section 2.5)."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._read = 0

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        self._catch_up(prefixes.tokens)
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, path in enumerate(prefixes.paths):
            tail = prefixes.tail(row, self._n - 1)
            if tail is None:
                continue
            rows.setdefault(tail, []).append(row)
            if path:  # n-grams that end on it
                length = min(self._n - 1 + len(path), len(prefixes.tokens) + len(path))
                end = prefixes.tail(row, length)
                assert end is not None
                banned = [last for key, last in _ngrams(end, self._n) if key == tail]
                logits[row, banned] = -torch.inf
        for tail, same in rows.items():
            if following := self._next.get(tail):
                ids = torch.tensor(list(following), device=logits.device)
                logits[torch.tensor(same, device=logits.device).unsqueeze(1), ids] = -torch.inf
        return logits

    def _catch_up(self, tokens: Sequence[int]) -> None:
        new = tokens[max(0, self._read - self._n + 1) :]
        if len(tokens) > self._read:
            for key, last in _ngrams(new, self._n):
                self._next.setdefault(key, set()).add(last)
        self._read = len(tokens)


def _ngrams(tokens: Sequence[int], n: int) -> list[tuple[tuple[int, ...], int]]:
    """Each n-gram as what comes first and its last token."""
    starts = range(len(tokens) - n + 1)
    return [(tuple(tokens[i : i + n - 1]), tokens[i + n - 1]) for i in starts]


class BadTokens:
    """Sequences of tokens that must not stand in the text."""

    def __init__(self, sequences: Sequence[Path]) -> None:
        self._sequences = sequences

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        for row in range(len(prefixes.paths)):
            banned = [
                s[-1] for s in self._sequences if prefixes.tail(row, len(s) - 1) == (*s[:-1],)
            ]
            if banned:
                logits[row, banned] = -torch.inf
        return logits


class BadText:
    """Words that must not stand in the text, however they are cut into tokens.

    Args:
        pieces: each id's bytes; a text is their concatenation.
        words: UTF-8.
        completing: `completing_ids` of each word.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        words: Sequence[bytes],
        completing: Sequence[Sequence[Tensor]],
    ) -> None:
        self._pieces = pieces
        self._words = list(zip(words, completing, strict=True))
        self._longest = max(map(len, words)) - 1

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        for row, path in enumerate(prefixes.paths):
            end = self._end(prefixes.tokens, path)
            for word, ids in self._words:
                for known, completing in enumerate(ids):
                    if len(completing) and end.endswith(word[:known]):
                        logits[row, completing] = -torch.inf
        return logits

    def _end(self, tokens: Sequence[int], path: Path) -> bytes:
        """The last bytes of a prefix, as many as may begin a word."""
        end = b""
        for token in chain(reversed(path), reversed(tokens)):  # some have no bytes
            if len(end) >= self._longest:
                break
            end = (self._pieces[token] if token < len(self._pieces) else b"") + end
        return end


def completing_ids(pieces: Sequence[bytes], word: bytes) -> list[Tensor]:
    """Ids `[...]` that complete a word behind its first 0, 1, 2, ... bytes.

    Behind none of them those that contain it.
    """
    found = []
    for n in range(len(word)):
        rest = word[n:]
        completes = [p.startswith(rest) if n else rest in p for p in pieces]
        found.append(torch.tensor(completes).nonzero().flatten())
    return found


class MinNewTokens:
    """The request does not end by a token before it has emitted so many."""

    def __init__(self, least: int, eos: Sequence[int]) -> None:
        self._least, self._eos = least, list(eos)

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        emitted = len(prefixes.tokens) - prefixes.prompt
        for row, path in enumerate(prefixes.paths):
            if emitted + len(path) < self._least:
                logits[row, self._eos] = -torch.inf
        return logits


class UserTransform:
    """A function of the user's, called as transformers calls its logits processors.

    Args:
        function: `(input_ids [R, L] int64, scores [R, V]) -> scores [R, V]`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._read = torch.empty(0, dtype=torch.int64)  # of the request's tokens

    def __call__(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        new = prefixes.tokens[len(self._read) :]
        self._read = torch.cat([self._read, torch.tensor(new, dtype=torch.int64)])
        out = logits.clone()
        for length in sorted({len(path) for path in prefixes.paths}):
            rows = [i for i, path in enumerate(prefixes.paths) if len(path) == length]
            paths = torch.tensor([prefixes.paths[i] for i in rows], dtype=torch.int64)
            ids = torch.cat([self._read.expand(len(rows), -1), paths], 1)
            out[rows] = self._call(ids.to(logits.device), logits[rows])
        return out

    def _call(self, ids: Tensor, scores: Tensor) -> Tensor:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            given: Any = self._function(ids, scores.clone())
        except Exception as error:
            raise OptionError(
                f"the transform {name} failed ({type(error).__name__}: {first_line(error)}): it "
                "takes input_ids [R, L] and scores [R, V]"
            ) from error
        if not isinstance(given, Tensor) or given.shape != scores.shape:
            said = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise OptionError(
                f"the transform {name} returned {said}: it must return scores of shape "
                f"{list(scores.shape)}"
            )
        if not _sound(given) and _sound(scores):
            raise OptionError(
                f"the transform {name} returned NaN or +inf: scores are numbers, or -inf for "
                "tokens that must not be drawn"
            )
        return given.to(scores.dtype)


def _sound(scores: Tensor) -> bool:
    return not bool((scores.isnan() | scores.isposinf()).any())
