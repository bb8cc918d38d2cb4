"""The greedy audit: the very tokens of plain decoding, and how near a tie another one was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..engine import Engine
from ..errors import OptionError
from ..models.base import rounding_doubt
from ..models.loading import Progress
from ..types import SamplingParams
from .report import Difference, Greedy
from .sampled import within_context
from .scoring import PlainScorer
from .systems import GeneratorSystem, System


def audit_greedy(
    system: System,
    scorer: PlainScorer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    progress: Progress = lambda what, done, total: None,
) -> Greedy:
    """Compare a system's greedy texts with plain decoding by the target, one text at a time.

    Raises:
        OptionError: no prompts, or a temperature above 0.
    """
    if not prompts:
        raise OptionError("an audit needs at least one prompt")
    if not params.greedy:
        raise OptionError("greedy texts are those of temperature 0: audit others by samples")
    params = within_context(params, system, scorer, prompts)
    plain = Engine(scorer.model, max_batch=1)
    strict = isinstance(system, GeneratorSystem) and not scorer.model.doubt(8, 8, True)
    differences, tokens = [], 0
    for number, prompt in enumerate(prompts):
        request = plain.submit(prompt, params, eos=scorer.eos, tokenizer=scorer.tokenizer)
        while plain.busy:
            plain.step()
        if request.failure is not None:
            raise request.failure
        expected = request.emitted
        (got,) = system.sample(prompt, params, [0])
        tokens += len(expected)
        if got != expected:
            found = _difference(scorer, number + 1, prompt, expected, got, params)
            differences.append(replace(found, near=found.near and not strict))
        progress("greedy texts", number + 1, len(prompts))
    return Greedy(len(prompts), tokens, tuple(differences))


def _difference(
    scorer: PlainScorer,
    number: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    params: SamplingParams,
) -> Difference:
    """The first token that differs."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    ours, theirs = (text[at] if at < len(text) else None for text in (expected, got))
    logits = next(iter(scorer.logits(prompt, [[*expected[:at], 0]], params)))[at].double()
    best = logits.topk(min(2, len(logits))).values
    margin = None
    if ours is not None and theirs is not None and 0 <= theirs < len(logits):
        margin = _finite(float(logits[ours] - logits[theirs]))
    bound = rounding_doubt(scorer.model.dtype) * float(best[0].abs())
    near = margin is not None and margin <= bound
    return Difference(
        number, at + 1, ours, theirs, margin, _finite(float(best[0] - best[-1])), near
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
