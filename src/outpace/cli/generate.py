"""`outpace generate`: text from a prompt, streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from ..types import Result


@common.with_sampling()
def generate(
    sampling: Mapping[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; standard input without it.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Read the prompt from a file ('-': stdin).")
    ] = None,
    model: common.Model = "demo",
    drafter: common.DrafterName = None,
    k: common.DraftLength = "auto",
    verifier: common.VerifierName = None,
    tree: common.TreeName = None,
    seed: common.Seed = None,
    max_new_tokens: common.MaxNewTokens = 128,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text (repeatable).")
    ] = None,
    logprobs: Annotated[
        int, typer.Option("--logprobs", help="With --json: so many likeliest tokens with each.")
    ] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System message; implies --chat.")
    ] = None,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics to stderr.")] = False,
    no_color: common.NoColor = False,
) -> None:
    """Generate from a model; on a terminal, tokens are coloured by where they came from."""
    from ..types import SamplingParams
    from .show import harmless

    params = SamplingParams(
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        **sampling,
    )
    text = _prompt(prompt, file)
    request: dict[str, Any] = {"prompts": text}
    if chat or system is not None:
        messages = [{"role": "system", "content": system}] if system is not None else []
        request = {"messages": [*messages, {"role": "user", "content": text}]}
    generator = common.load_with_bar(
        model,
        common.drafter_for(model, drafter),
        k,
        dtype,
        device,
        check=lambda assembly: assembly.check(params, **request),
        compile=compile,
        verifier=verifier,
        tree=tree,
        quantize=quantize,
        max_batch=1,
    )
    stream = generator.stream(params=params, **request)
    controller = generator.engine.controller
    with stream:
        if as_json:
            for _ in stream:
                pass
        elif sys.stdout.isatty() and not no_color:
            _show(stream, request.get("prompts", ""))
        else:
            shown = harmless if sys.stdout.isatty() else str  # a file gets the text as it is
            for event in stream:
                sys.stdout.write(shown(event.text))
                sys.stdout.flush()
            sys.stdout.write("\n")
    report = controller.report() if controller is not None and (as_json or stats) else None
    if as_json:
        control = None if report is None else report.to_dict()
        print(json.dumps(as_dict(stream.results[0]) | {"control": control}))
    if stats:
        from rich.console import Console

        console = Console(stderr=True, no_color=no_color)
        common.print_stats(stream.results[0].stats, console, report)


def _prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise OptionError("give a prompt or --file, not both")
    if prompt is None and file is None and sys.stdin is not None and sys.stdin.isatty():
        raise OptionError("no prompt: give one as argument, with --file, or on standard input")
    text = prompt if prompt is not None else common.read_text(file or "-")
    if not text:
        raise OptionError("the prompt is empty: give at least one token of text")
    return text


def _show(stream: Any, prompt: str) -> None:
    from rich.console import Console

    from .show import TokenView

    console = Console(highlight=False)
    with TokenView(console, lambda: common.describe(stream.stats), prompt) as view:
        for event in stream:
            view.add(event)
    console.print(f"[dim]{common.describe(stream.stats)}[/dim]")


def as_dict(result: Result) -> dict[str, Any]:
    """A result as JSON-ready data."""
    return {
        "prompt": result.prompt,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "seed": result.seed,
        "tokens": [asdict(event) for event in result.tokens],
        "stats": result.stats.to_dict(),
    }
