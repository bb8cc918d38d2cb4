"""Between two vocabularies: which tokens they share, and a text in the tokens of the other.

A token is the bytes it stands for. What one tokenizer splits otherwise than the other,
inside a character even, is spelled: by the longest tokens that make up the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..errors import VocabularyMismatchError
from ..models.tokenizer import Tokenizer

_SETTLED = 48
"""Bytes at the end of a text whose split may still change when more text comes."""


class Words:
    """A tokenizer's tokens as bytes, both ways.

    Args:
        rows: tokens that the model knows; a tokenizer may have more.

    Attributes:
        pieces: the bytes of each id; none of what is not text.
        ids: the id of bytes; of several the first that is a token of its own.

    Raises:
        VocabularyMismatchError: its tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, whose: str, rows: int | None = None) -> None:
        pieces = tokenizer.pieces
        if pieces is None:
            raise VocabularyMismatchError(
                f"the {whose}'s tokenizer does not say which bytes its tokens stand for (it is "
                "neither byte-level BPE nor SentencePiece): use a model with the same tokenizer"
            )
        pieces = pieces[:rows]
        self.tokenizer, self.pieces, self._rows = tokenizer, pieces, rows
        self.ids: dict[bytes, int] = {}
        for i in sorted(range(len(pieces)), key=lambda i: i in tokenizer.byte_fallbacks):
            if pieces[i] and i not in tokenizer.special_ids:
                self.ids.setdefault(pieces[i], i)
        self._longest = max(map(len, self.ids), default=0)

    def known(self, ids: Iterable[int]) -> list[int]:
        """Those that the model knows."""
        return [i for i in ids if self._rows is None or i < self._rows]

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """What ids stand for; ids that are no text stand for nothing."""
        pieces = self.pieces
        return b"".join(pieces[i] for i in ids if i < len(pieces))

    def split(self, text: bytes, begins: bool = False) -> list[int]:
        """The tokenizer's own split of a text within a larger one; spelled where it has none.

        Args:
            begins: whether it is the larger one's beginning, before which some put a blank.
        """
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:  # a character that is not complete
            end = error.start
            return (self.split(text[:end], begins) if end else []) + self.spell(text[end:])
        for given in (whole, whole[1:] if whole.startswith(" ") else whole):
            ids: list[int] = self.tokenizer.hf(given, add_special_tokens=False)["input_ids"]
            said = self.bytes_of(ids)
            if said == text or (begins and said == b" " + text):
                return ids
            if said == b" " + text and self.pieces[ids[0]] == b" ":
                return ids[1:]
        return self.spell(text)

    def spell(self, text: bytes) -> list[int]:
        """The longest tokens, one after the other; bytes that no token begins with are left out."""
        ids, at = list[int](), 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (i := self.ids.get(text[at:end])) is not None:
                    ids.append(i)
                    break
            at = end if i is not None else at + 1
        return ids


class Common:
    """The tokens that target and draft share: those of the same bytes.

    Attributes:
        pairs: target id and draft id of each, and of the ends of text, which mean the same.
        texts: how many of them are text.
    """

    def __init__(self, target: Words, draft: Words) -> None:
        self.target, self.draft = target, draft
        self.pairs = [
            (i, draft.ids[piece])
            for piece, i in sorted(target.ids.items(), key=lambda x: x[1])
            if piece in draft.ids
        ]
        self.texts = len(self.pairs)
        ends = zip(target.tokenizer.eos_token_ids, draft.tokenizer.eos_token_ids, strict=False)
        self.pairs += [(ours, theirs) for ours, theirs in ends if draft.known([theirs])]

    @cached_property
    def share(self) -> float:
        """Of the target's tokens."""
        return self.texts / max(1, len(self.target.ids))

    def gather(self, vocab_size: int) -> Tensor:
        """`[V]` int64: each target token's draft id, -1 where there is none."""
        index = torch.full((vocab_size,), -1)
        for ours, theirs in self.pairs:
            if ours < vocab_size:
                index[ours] = theirs
        return index


def special_pairs(target: Words, draft: Words) -> dict[int, int]:
    """The target's special tokens that are the draft's by name, too."""
    theirs = draft.tokenizer.vocabulary
    return {
        i: theirs[token]
        for token, i in target.tokenizer.vocabulary.items()
        if i in target.tokenizer.special_ids
        and theirs.get(token) in draft.tokenizer.special_ids
        and draft.known([theirs[token]])
    }


class Translated:
    """A growing text of target tokens as draft tokens.

    Attributes:
        ids: what the draft reads. They stand for the text's bytes, with a blank before the first
            where the draft's tokenizer puts one there.
        count: target tokens so far.
    """

    def __init__(self, target: Words, draft: Words, special: Mapping[int, int]) -> None:
        """Args:
        special: see `special_pairs`.
        """
        self._target, self._draft, self._special = target, draft, special
        self.ids = draft.known(draft.tokenizer.prefix_ids)
        self.count = 0
        self._ends: list[int] = [0] * len(self.ids)  # of the text, behind each id
        self._text = b""
        self._floor = len(self.ids)  # ids that stay whatever comes

    def extend(self, tokens: Sequence[int]) -> int:
        """Append target tokens; from which id on `ids` may be others than before."""
        self.count += len(tokens)
        changed, run = len(self.ids), list[int]()
        for token in (*tokens, None):
            if token is not None and token not in self._target.tokenizer.special_ids:
                run.append(token)
                continue
            if run:
                changed = min(changed, self._split(self._target.bytes_of(run)))
                run = []
            theirs = self._special.get(token) if token is not None else None
            begun = not self._text and self.ids[-1:] == [theirs]  # what the draft puts there, too
            if theirs is not None and not begun:
                self._put(theirs, len(self._text))
                self._floor = len(self.ids)
        return changed

    def _split(self, text: bytes) -> int:
        """The text goes on: its end is split anew."""
        self._text += text
        first = self._settled()
        at = self._ends[first - 1] if first else 0
        del self.ids[first:], self._ends[first:]
        begins = at == 0 and not self._draft.bytes_of(self.ids)
        ids = self._draft.split(self._text[at:], begins)
        at = len(self._text) - len(self._draft.bytes_of(ids))  # before a blank of its own: -1
        for i in ids:
            at += len(self._draft.pieces[i])
            self._put(i, at)
        return first

    def _put(self, i: int, end: int) -> None:
        self.ids.append(i)
        self._ends.append(end)

    def _settled(self) -> int:
        """How many ids are settled: up to a blank, before which tokenizers split anyway."""
        text = self._text
        for i in range(len(self.ids), self._floor, -1):
            end = self._ends[i - 1]
            if end <= len(text) - _SETTLED and text[end : end + 1].isspace():
                return i
            if end <= len(text) - 8 * _SETTLED:  # no blanks far and wide
                return i
        return self._floor
