"""An audit as a whole: which modes, for whom, and what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..errors import OptionError
from ..generator import Generator
from ..models.base import LanguageModel
from ..types import SamplingParams
from .exact import audit_rounds
from .greedy import audit_greedy
from .report import Report
from .sampled import Progress, audit_samples
from .scoring import PlainScorer
from .systems import GeneratorSystem, System

MODES = ("greedy", "sampled", "exact")

NARROW = 3
"""top_k of the exact mode where nothing smaller is asked for."""


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
            temperature and the system. Exact needs a generator and a narrow choice,
            and takes `top_k` 3 where it is larger on a wide vocabulary, and the first prompt.
        samples, false_alarm, seed: see `audit_samples`.
        greedy_tokens: length of greedy texts.
        progress: called with (what, done, total).

    Raises:
        OptionError: an unknown mode, nothing to audit with, or a mode that was asked for and
            cannot be.
    """
    check_modes(modes)
    if isinstance(system, Generator):
        generator: Generator | None = system
        own, drafting = scorers(system)
        scorer, draft = scorer or own, draft or drafting
        system = GeneratorSystem(system)
    else:
        generator = system.generator if isinstance(system, GeneratorSystem) else None
    if scorer is None:
        raise OptionError("an audit needs a scorer: PlainScorer of the target's checkpoint")
    report = Report(system.name, _setting(params, len(prompts), samples, false_alarm))
    for mode in modes or _fitting(params):
        try:
            if mode == "greedy":
                length = max(greedy_tokens, params.min_new_tokens)
                cold = replace(params, temperature=0.0, max_new_tokens=length)
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
    if generator.engine.target.vocab_size > NARROW and (params.top_k or NARROW + 1) > NARROW:
        wide = generator.engine.target.vocab_size**generator.engine.k > 256
        params = replace(params, top_k=NARROW) if wide else params
    tokenizer = generator.tokenizer
    return audit_rounds(
        generator.engine, scorer, prompts[:1], params, seed=seed, tokenizer=tokenizer
    )


def scorers(generator: Generator) -> tuple[PlainScorer, PlainScorer | None]:
    """Of a generator's target, and of its draft model if it has one."""
    target = generator.engine.target
    own = PlainScorer(target, generator.eos_token_ids, generator.tokenizer)
    model: LanguageModel | None = getattr(generator.engine.drafter, "model", None)
    if model is None:
        return own, None
    return own, PlainScorer(model, own.eos, own.tokenizer, target.vocab_size)


def _setting(
    params: SamplingParams, prompts: int, samples: int, false_alarm: float
) -> dict[str, Any]:
    """What is not as it would be by default."""
    plain = SamplingParams()
    given = {
        f.name: getattr(params, f.name)
        for f in fields(params)
        if getattr(params, f.name) != getattr(plain, f.name)
    }
    given = {k: v if _jsonable(v) else str(v) for k, v in given.items()}
    return given | {"prompts": prompts, "samples": samples, "false_alarm": false_alarm}


def _jsonable(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
