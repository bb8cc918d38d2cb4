"""A request's transforms, from its sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import OptionError
from ..models.tokenizer import Tokenizer
from ..sampling import Pipeline, Transform
from ..sampling.transforms import (
    BadTokens,
    LogitBias,
    MinNewTokens,
    NoRepeatNgram,
    Penalties,
    UserTransform,
)
from ..types import SamplingParams


def make_pipeline(
    params: SamplingParams,
    tokens: Sequence[int],
    vocab_size: int,
    eos: Sequence[int],
    tokenizer: Tokenizer | None,
    device: torch.device,
) -> Pipeline | None:
    """The transforms in their order: bias, penalties, what is forbidden, constraint, the user's.

    Args:
        tokens: of the request, a list that will grow; now the prompt.
        eos: ids that end the request.
        device: where laws are computed.

    Raises:
        OptionError: an id outside the vocabulary, or what needs a tokenizer without one.
    """
    _check_against(params, vocab_size)
    transforms: list[Transform] = []
    if params.logit_bias:
        transforms.append(LogitBias(dict(params.logit_bias), device))
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if penalties != (1, 0, 0):
        transforms.append(Penalties(vocab_size, device, *penalties))
    if params.no_repeat_ngram is not None:
        transforms.append(NoRepeatNgram(params.no_repeat_ngram))
    sequences = [w for w in params.bad_words if not isinstance(w, str)]
    words = [w for w in params.bad_words if isinstance(w, str)]
    if sequences:
        transforms.append(BadTokens(sequences))
    if words:
        transforms += _need(tokenizer, "bad_words of text").bad_words(words)
    ends = [i for i in eos if i < vocab_size]
    if params.min_new_tokens and ends:
        transforms.append(MinNewTokens(params.min_new_tokens, ends))
    constraint = None
    if fields := params.constraint_fields:
        grammars = _need(tokenizer, fields[0]).grammars
        constraint = grammars.constraint(params, vocab_size, ends)
        transforms.append(constraint)
    transforms += [UserTransform(function) for function in params.transforms]
    if not transforms:
        return None
    if constraint is None:
        return Pipeline(tokens, len(tokens), transforms)
    return Pipeline(tokens, len(tokens), transforms, constraint.complete)


def _need(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise OptionError(f"{what} needs a tokenizer, and this model has none")
    return tokenizer


def _check_against(params: SamplingParams, vocab_size: int) -> None:
    sequences = [word for word in params.bad_words if not isinstance(word, str)]
    if params.logprobs > vocab_size:
        raise OptionError(
            f"logprobs={params.logprobs} asks for more than the target's vocabulary of {vocab_size}"
        )
    given = {
        "logit_bias": [i for i, _ in params.logit_bias],
        "bad_words": [i for ids in sequences for i in ids],
    }
    for name, ids in given.items():
        if ids and max(ids) >= vocab_size:
            raise OptionError(
                f"{name} has token id {max(ids)}, which is outside the target's vocabulary of "
                f"{vocab_size}"
            )
