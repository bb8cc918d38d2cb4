"""`outpace plan`: what this machine and these prompts say about how to speculate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError, OutpaceError
from . import common

if TYPE_CHECKING:
    from ..assembly import Assembly
    from ..drafters import Blueprint
    from ..planner import Plan
    from .plan_report import Asked

_TOKENS = 64

_MEASURED_TOO = "ngram", "suffix", "int4"
"""Drafters that are measured beside those that `drafter="auto"` takes, where they can draft."""


def plan(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, hub id, or 'demo' (shipped).")
    ] = "demo",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="A name or a draft model, as 'outpace generate' takes it (repeatable); by default "
            "what could draft without any download.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", "-p", help="How many prompts to run, at most.")
    ] = 8,
    prompt_file: common.PromptFile = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="To plan for (repeatable); by default 0 and 0.8."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", "-b", help="Sequences at once (repeatable); by default 1."),
    ] = None,
    max_new_tokens: common.MaxNewTokens = _TOKENS,
    trees: Annotated[
        bool, typer.Option("--trees/--no-trees", help="Whether to try trees of draft models, too.")
    ] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", help="For timing passes, and again for each drafter.")
    ] = 30.0,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            help="Draw the landscape into this file (.png, .svg, ...); with several batches, "
            "those of the further ones into NAME-BATCH beside it.",
        ),
    ] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> None:
    """Measure this machine and your prompts, and say whether and how to speculate."""
    from .plan_report import Asked, asked_dict, print_plan

    flags = {} if compile is None else {"--compile" if compile else "--no-compile": ""}
    asked = Asked(
        model,
        tuple(dict.fromkeys(temperature or (0.0, 0.8))),
        tuple(sorted(set(batch or (1,)))),
        max_new_tokens,
        {"--dtype": dtype, "--device": device, "--quantize": quantize} | flags,
    )
    texts = _texts(prompt_file, prompts)
    _check(asked, drafter, seconds, picture)
    found, blueprints = _measured(
        asked, texts, drafter, trees, seconds, dtype, device, compile, quantize, no_color
    )
    if picture is not None:
        from ..planner import picture as draw
        from ..planner.reasons import at_once

        for size, file in _pictures(picture, asked.batches).items():
            draw(found, file, size, f"{model}: where speculation pays here, {at_once(size)}")
    if as_json:
        print(json.dumps(asked_dict(asked, texts, list(blueprints)) | found.to_dict()))
    else:
        print_plan(found, asked, no_color)


def _pictures(picture: Path, batches: Sequence[int]) -> dict[int, Path]:
    """Where the landscape of each batch goes."""
    first, *others = batches
    return {first: picture} | {b: picture.with_stem(f"{picture.stem}-{b}") for b in others}


def _texts(path: str | None, count: int) -> list[str]:
    """Prompts of the file, or the built-in ones."""
    from ..planner import PROMPTS

    if path is not None:
        return common.prompts_of(path, count)
    if count < 1:
        raise OptionError("--prompts must be at least 1")
    if count > len(PROMPTS):
        raise OptionError(
            f"there are {len(PROMPTS)} built-in prompts, not {count}: give more of your own "
            "(--prompt-file)"
        )
    return list(PROMPTS[:count])


def _check(
    asked: Asked, drafters: Sequence[str] | None, seconds: float, picture: Path | None
) -> None:
    """Whether there is something to plan, before anything is read."""
    from ..drafters import parse
    from ..pictures import check_path
    from ..types import SamplingParams, check_whole_number

    for temperature in asked.temperatures:
        SamplingParams(temperature=temperature, max_new_tokens=asked.tokens)
    for size in asked.batches:
        check_whole_number("batch", size, 1, "sequences at once")
    if asked.tokens < 8:
        raise OptionError("texts of fewer than 8 tokens say nothing: raise --max-new-tokens")
    if not 0 < seconds < float("inf"):
        raise OptionError(f"--seconds must be above 0, not {seconds}")
    for name in drafters or ():
        if name == "none":
            raise OptionError("plan measures drafters: plain decoding is always compared with")
        parse(name)
    if picture is not None:
        check_path(picture)


def checked(
    assembly: Assembly, asked: Asked, texts: Sequence[str], names: Sequence[str] | None
) -> dict[str, Blueprint]:
    """Drafters that can draft for the target. Those that were asked for must."""
    from ..drafters import parse
    from ..drafters.candidates import candidates
    from ..types import SamplingParams

    params = SamplingParams(max_new_tokens=asked.tokens, on_context_full="error")
    assembly.check(params, list(texts))
    found: dict[str, Blueprint] = {}
    if names:
        for name in names:
            found[name] = parse(name)
            assembly.remarks += assembly.check_drafter(found[name])
        return found
    made = {c.name: c.make() for c in candidates(assembly.setting) if c.make is not None}
    for name, blueprint in ({name: parse(name) for name in _MEASURED_TOO} | made).items():
        try:
            assembly.remarks += assembly.check_drafter(blueprint)
            found[name] = blueprint
        except OutpaceError as error:
            assembly.remarks.append(f"not measured: {error}")
    return found


def _measured(
    asked: Asked,
    texts: Sequence[str],
    names: Sequence[str] | None,
    trees: bool,
    seconds: float,
    dtype: str | None,
    device: str | None,
    compile: bool | None,
    quantize: str | None,
    no_color: bool,
) -> tuple[Plan, dict[str, Blueprint]]:
    from ..planner import Wanted, measure

    blueprints: dict[str, Blueprint] = {}

    def check(assembly: Assembly) -> None:
        blueprints.update(checked(assembly, asked, texts, names))

    how: dict[str, Any] = {"compile": compile, "quantize": quantize, "max_batch": 1}
    generator = common.load_with_bar(asked.model, None, None, dtype, device, check=check, **how)
    tokenizer = generator.tokenizer
    assert tokenizer is not None
    wanted = Wanted(
        prompts=[tokenizer.encode(text) for text in texts],
        temperatures=asked.temperatures,
        batches=asked.batches,
        tokens=asked.tokens,
        trees=trees,
        seconds=seconds,
    )
    target = generator.engine.target
    with common.progress_bars(no_color) as advance:
        found = measure(target, blueprints, wanted, tokenizer=tokenizer, progress=advance)
    return found, blueprints
