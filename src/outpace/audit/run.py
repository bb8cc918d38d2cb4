"""An audit as a whole: which modes, for whom, and what they found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..generator import Generator
from ..models.loading import Progress
from ..types import SamplingParams
from .exact import audit_rounds, choices_of
from .greedy import audit_greedy
from .report import Report
from .sampled import audit_samples
from .scoring import PlainScorer
from .systems import GeneratorSystem, System

MODES = ("greedy", "sampled", "exact")

MANY_DRAFTS = 256
"""Of a round; more are not enumerated as they are, but those of a smaller top_k."""

NARROWED_DRAFTS = 81
"""How many these are, about."""

MOST_CHOICES = 8
"""The largest such top_k: a short draft has few anyway."""


def audit(
    system: Generator | System,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    scorer: PlainScorer | None = None,
    draft: PlainScorer | None = None,
    modes: Sequence[str] | None = None,
    samples: int = 4000,
    false_alarm: float = 1e-4,
    greedy_tokens: int = 64,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Whether a system's output is the target's.

    Args:
        system: a generator of ours, or anything that continues prompts.
        prompts: token ids.
        params: how it samples; `max_new_tokens` is the length of a sample. Greedy
            texts are compared with the same parameters at temperature 0.
        scorer: of the target; by default the generator's own.
        draft: of the draft model, if there is one; by default the generator's.
        modes: of "greedy", "sampled" and "exact"; by default all that fit the
            temperature and the system. Exact takes a generator and its first prompt, under a
            smaller `top_k` where there would be too many drafts (3 at K = 4).
        samples, false_alarm, seed: see `audit_samples`.
        greedy_tokens: length of greedy texts.
        progress: called with (what, done, total).

    Raises:
        OptionError: an unknown mode, nothing to audit with, or a mode that was asked for and
            cannot be.
    """
    check_modes(modes)
    if isinstance(system, Generator):
        system = GeneratorSystem(system)
    generator = system.generator if isinstance(system, GeneratorSystem) else None
    if generator is not None:
        own, drafting = scorers(generator)
        scorer, draft = scorer or own, draft or drafting
    if scorer is None:
        raise OptionError("an audit needs a scorer: PlainScorer of the target's checkpoint")
    report = Report(system.name, _setting(params, len(prompts), samples, false_alarm))
    for mode in modes or _fitting(params):
        try:
            if mode == "greedy":
                length = max(greedy_tokens, params.min_new_tokens)
                cold = replace(params, temperature=0.0, max_new_tokens=length)
                cold = replace(cold, on_context_full="stop")
                part: Any = audit_greedy(system, scorer, prompts, cold, progress)
            elif mode == "sampled":
                part = audit_samples(
                    system,
                    scorer,
                    prompts,
                    params,
                    samples=samples,
                    false_alarm=false_alarm,
                    draft=draft,
                    seed=seed,
                    progress=progress,
                )
            else:
                part = _exact(generator, scorer, prompts, params, seed)
        except OptionError as error:
            if modes is not None or mode != "exact":
                raise
            report.left_out[mode] = str(error)
            continue
        report.parts[mode] = part
    return report


def check_modes(modes: Sequence[str] | None) -> None:
    """Refuse modes that there are not.

    Raises:
        OptionError: an unknown one.
    """
    for mode in modes or ():
        if mode not in MODES:
            raise OptionError(f"unknown mode {mode!r}: choose from {', '.join(MODES)}")


def _fitting(params: SamplingParams) -> tuple[str, ...]:
    return ("greedy",) if params.greedy else MODES


def _exact(
    generator: Generator | None,
    scorer: PlainScorer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seed: int,
) -> Any:
    if generator is None:
        raise OptionError("only generators of outpace can be enumerated, others by samples")
    engine, tokenizer = generator.engine, generator.tokenizer
    choices = min(params.top_k or engine.target.vocab_size, engine.target.vocab_size)
    k = max((k for _, k in choices_of(engine)), default=1)
    few = math.floor(NARROWED_DRAFTS ** (1 / max(1, k)) + 1e-9)
    few = min(max(few, 2), MOST_CHOICES)
    narrowed = few if choices**k > MANY_DRAFTS and few < choices else None
    params = params if narrowed is None else replace(params, top_k=narrowed)
    found = audit_rounds(engine, scorer, prompts[:1], params, seed=seed, tokenizer=tokenizer)
    return replace(found, narrowed=narrowed)


def scorers(generator: Generator) -> tuple[PlainScorer, PlainScorer | None]:
    """Of a generator's target, and of its draft model if it has one."""
    target = generator.engine.target
    own = PlainScorer(target, generator.eos_token_ids, generator.tokenizer)
    drafter = generator.engine.drafter
    model = None if drafter is None else drafter.alone
    if model is None:
        return own, None
    return own, PlainScorer(model, own.eos, own.tokenizer, target.vocab_size)


def _setting(
    params: SamplingParams, prompts: int, samples: int, false_alarm: float
) -> dict[str, Any]:
    """What is not as it would be by default."""
    given = {k: v if _jsonable(v) else str(v) for k, v in params.given.items()}
    return given | {"prompts": prompts, "samples": samples, "false_alarm": false_alarm}


def _jsonable(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
