"""Small real tokenizers that tests make."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace.models.tokenizer import Tokenizer


def byte_level(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]] = (), **special: str
) -> Tokenizer:
    """Byte-level BPE with these tokens as ids 0, 1, ...; `special` as eos_token="..."."""
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


def letters(characters: str) -> Tokenizer:
    """One token per character."""
    return byte_level(list(characters))
