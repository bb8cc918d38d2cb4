"""Tokenizers: loading, chat templates, text that streams, and whether two of them agree."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, OptionError, VocabularyMismatchError, first_line
from ..sampling import Transform
from ..sampling.transforms import BadText, BadTokens, completing_ids
from .constraint import Grammars

_REPLACEMENT = "\ufffd"
_BLANK = "\u2581"  # SentencePiece's space
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROMPT_WINDOW = 6


class Tokenizer:
    """A Hugging Face tokenizer with what generation needs of it."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self._completing = lru_cache(maxsize=512)(self._ids_completing)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        if not any((folder / name).exists() for name in names):
            raise CheckpointError(
                f"{folder} has no tokenizer (tokenizer.json): save it there with "
                "tokenizer.save_pretrained"
            )
        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except Exception as error:
            raise CheckpointError(
                f"the tokenizer in {folder} cannot be read ({first_line(error)}): "
                "download the checkpoint again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            OptionError: the text holds what is no Unicode character.
        """
        return self._ids(text, add_special_tokens=True)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError("the prompt is not valid Unicode: give UTF-8 text") from error
        return list(self.hf(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.hf.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            OptionError: no chat template, or messages it does not accept.
        """
        if not getattr(self.hf, "chat_template", None):
            raise OptionError(
                "this model has no chat template: pass a plain prompt (without --chat)"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise OptionError(f"a message needs 'role' and 'content', got {message!r}")
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise OptionError(
                f"the chat template refused the messages: {first_line(error)}"
            ) from error
        return self._ids(text, add_special_tokens=False)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self.hf.eos_token_id
        return () if eos is None else (int(eos),)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token string to id, added tokens included."""
        return dict(self.hf.get_vocab())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are not text: those with a role, and all that the tokenizer flags so."""
        added = getattr(self.hf, "added_tokens_decoder", {})
        flagged = (i for i, token in added.items() if token.special)
        return frozenset(self.hf.all_special_ids).union(flagged)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for the text that continues a prompt."""
        pieces = self.byte_pieces
        return ByteDetokenizer(pieces) if pieces is not None else WindowDetokenizer(self, prompt)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles constraints for it."""
        return Grammars(self.hf)

    def bad_words(self, words: Sequence[str]) -> list[Transform]:
        """Transforms that keep words out of the text.

        Where decoding is concatenation they look at the text itself; else at the tokens that
        spell a word, alone and behind a space, as others do.
        """
        pieces = self.byte_pieces
        if pieces is not None:
            texts = [word.encode() for word in words]
            return [BadText(pieces, texts, [self._completing(text) for text in texts])]
        spelled = [self._ids(t, add_special_tokens=False) for w in words for t in (w, " " + w)]
        return [BadTokens([ids for ids in spelled if ids])]

    def _ids_completing(self, word: bytes) -> list[Tensor]:
        assert self.byte_pieces is not None
        return completing_ids(self.byte_pieces, word)

    @cached_property
    def byte_pieces(self) -> list[bytes] | None:
        """Each id's bytes, where decoding is concatenation (byte-level BPE); else None."""
        backend = getattr(self.hf, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
            return None
        to_byte = _byte_alphabet()
        pieces = [b""] * (max(self.vocabulary.values()) + 1)
        for token, i in self.vocabulary.items():
            if i in self.special_ids:
                continue
            if any(c not in to_byte for c in token):
                pieces[i] = token.encode()
            else:
                pieces[i] = bytes(to_byte[c] for c in token)
        return pieces

    @cached_property
    def pieces(self) -> list[bytes] | None:
        """Each id's bytes within a text, of byte-level BPE and of SentencePiece; else None."""
        if self.byte_pieces is not None:
            return self.byte_pieces
        decoder = getattr(getattr(self.hf, "backend_tokenizer", None), "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = state.get("decoders", [state])
        blanks = [s for s in steps if s.get("type") == "Metaspace" or _replaces_blank(s)]
        if not blanks:
            return None
        pieces = [b""] * (max(self.vocabulary.values()) + 1)
        for token, i in self.vocabulary.items():
            if i in self.byte_fallbacks:
                pieces[i] = bytes([int(token[3:-1], 16)])
            elif i not in self.special_ids:
                pieces[i] = token.replace(_BLANK, " ").encode()
        return pieces

    @cached_property
    def byte_fallbacks(self) -> frozenset[int]:
        """Ids of SentencePiece's tokens for single bytes."""
        if self.byte_pieces is not None:
            return frozenset()
        return frozenset(i for t, i in self.vocabulary.items() if _BYTE.fullmatch(t))

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What it puts before every text (BOS)."""
        ids: list[int] = self.hf("")["input_ids"]
        return tuple(i for i in ids if i in self.special_ids and i not in self.eos_token_ids)


class Detokenizer:
    """Turns ids into text as they come; a multi-byte character is held back until whole."""

    def push(self, token: int) -> str:
        """The text this id completes."""
        raise NotImplementedError

    def flush(self) -> str:
        """What is left at the end, incomplete characters replaced."""
        raise NotImplementedError


class ByteDetokenizer(Detokenizer):
    """For byte-level BPE: an id is a byte string, UTF-8 is decoded incrementally."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token] if token < len(self._pieces) else b"")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For any tokenizer: decode a short window twice, with and without the new ids.

    The window begins where text was last complete, at first within the prompt,
    so leading spaces that a tokenizer strips at the start of a text are not lost.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_PROMPT_WINDOW:])
        if tokenizer.decode(self._ids).endswith(_REPLACEMENT):
            self._ids = []  # the prompt ends within a character
        self._start = 0  # the window's first id
        self._read = len(self._ids)  # ids whose text is out

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._new_text(final=False)

    def flush(self) -> str:
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(_REPLACEMENT) and not final):
            return ""
        if now.startswith(before):
            new = now[len(before) :]
        else:  # a stray byte undid the character before it, which is out already
            new = self._tokenizer.decode(self._ids[self._read :])
        self._start, self._read = self._read, len(self._ids)
        return new


class NullDetokenizer(Detokenizer):
    """For models without text (the toy model)."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def check_vocabularies(target: Tokenizer, draft: Tokenizer, draft_width: int) -> list[str]:
    """Whether the draft's ids mean what the target's mean.

    Ids that only one tokenizer defines are padding to the other: harmless as
    long as the draft has an embedding row for every id it may be fed.

    Args:
        draft_width: rows of the draft's embedding.

    Returns:
        Remarks worth showing (added tokens that only one side has).

    Raises:
        VocabularyMismatchError: an id means two things, or the draft is too narrow.
    """
    ours = {i: t for t, i in target.vocabulary.items()}
    theirs = {i: t for t, i in draft.vocabulary.items()}
    clashes = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    if clashes:
        i = clashes[0]
        raise VocabularyMismatchError(
            f"the tokenizers differ on {len(clashes)} of {len(ours)} ids, e.g. id {i} is "
            f"{ours[i]!r} to the target and {theirs[i]!r} to the draft: use a draft model "
            "with the target's tokenizer"
        )
    only_target = sorted(ours.keys() - theirs.keys())
    if any(i >= draft_width for i in only_target):
        i = next(i for i in only_target if i >= draft_width)
        raise VocabularyMismatchError(
            f"the draft has {draft_width} embedding rows, but the target's token {ours[i]!r} has "
            f"id {i}: use a draft model with the target's tokenizer"
        )
    only_draft = sorted(theirs.keys() - ours.keys())
    remarks = []
    for who, whose, other in (("target", only_target, ours), ("draft", only_draft, theirs)):
        if whose:
            remarks.append(
                f"{len(whose)} tokens are known to the {who} alone, e.g. {other[whose[0]]!r} "
                f"(id {whose[0]})"
            )
    return remarks


def _replaces_blank(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    return step.get("type") == "Replace" and text == _BLANK


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2's): character to byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in plain)
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table
