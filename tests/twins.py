"""Slow, readable twins of the sampling parameters: one row, one whole prefix, Python's lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from outpace import SamplingParams

Row = list[float]
Tokens = list[int]


def biased(row: Row, bias: Mapping[int, float]) -> Row:
    return [x + bias.get(token, 0.0) for token, x in enumerate(row)]


def penalised(
    row: Row,
    prompt: Tokens,
    text: Tokens,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Row:
    out = []
    for token, x in enumerate(row):
        if token in prompt or token in text:
            x = x / repetition if x > 0 else x * repetition
        if token in text:
            x = x - presence - frequency * text.count(token)
        out.append(x)
    return out


def without(row: Row, tokens: Collection[int]) -> Row:
    return [-math.inf if token in tokens else x for token, x in enumerate(row)]


def repeating(prefix: Tokens, n: int, vocab: int) -> set[int]:
    """Tokens whose last n would stand in the prefix already."""
    runs = [prefix[i : i + n] for i in range(len(prefix) - n + 1)]
    return {token for token in range(vocab) if [*prefix, token][-n:] in runs}


def completing(prefix: Tokens, sequences: Collection[Sequence[int]], vocab: int) -> set[int]:
    """Tokens behind which one of the sequences would stand at the end."""
    return {
        token
        for token in range(vocab)
        for sequence in sequences
        if [*prefix, token][-len(sequence) :] == list(sequence)
    }


def spelling(prefix: Tokens, pieces: Sequence[bytes], words: Collection[bytes]) -> set[int]:
    """Tokens whose bytes would complete a word, whatever stands before."""
    before = b"".join(pieces[token] for token in prefix)
    return {
        token
        for token, piece in enumerate(pieces)
        for word in words
        if word in (before + piece)[max(0, len(before) - len(word) + 1) :]
    }


def shaped(
    row: Row,
    prompt: Tokens,
    text: Tokens,
    s: SamplingParams,
    also: Sequence[Callable[[Row, Tokens], Row]] = (),
) -> Row:
    """Logits behind all transforms; `also` are the twins of the user's functions."""
    prefix = [*prompt, *text]
    row = biased(row, dict(s.logit_bias))
    penalties = s.repetition_penalty, s.presence_penalty, s.frequency_penalty
    row = penalised(row, prompt, text, *penalties)
    if s.no_repeat_ngram:
        row = without(row, repeating(prefix, s.no_repeat_ngram, len(row)))
    row = without(row, completing(prefix, s.bad_words, len(row)))
    if len(text) < s.min_new_tokens:
        row = without(row, s.eos_token_ids or ())
    for function in also:
        row = function(row, prefix)
    return row


def law(row: Row, s: SamplingParams) -> Row:
    """Probabilities by temperature, top-k, top-p and min-p."""
    if s.temperature == 0:
        best = row.index(max(row))
        return [float(i == best) for i in range(len(row))]
    scaled = [(x - max(row)) / s.temperature for x in row]
    if s.top_k is not None and s.top_k < len(row):
        threshold = sorted(scaled, reverse=True)[s.top_k - 1]
        scaled = [x if x >= threshold else -math.inf for x in scaled]
    p = _normalised([math.exp(x) for x in scaled])
    if s.top_p < 1:
        kept, mass = set(), 0.0
        for i in sorted(range(len(p)), key=lambda i: -p[i]):
            if mass >= s.top_p:
                break
            kept.add(i)
            mass += p[i]
        p = _normalised([x if i in kept else 0.0 for i, x in enumerate(p)])
    return _normalised([x if x >= s.min_p * max(p) else 0.0 for x in p])


def _normalised(weights: Row) -> Row:
    return [w / sum(weights) for w in weights]
