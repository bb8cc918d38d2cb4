"""`outpace layers`: which of a target's own layers can draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..types import SamplingParams
from . import common

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.layers import Choice


def layers(
    model: common.Model = "demo",
    prompts: Annotated[
        int, typer.Option("--prompts", "-p", help="How many texts to measure on.")
    ] = 4,
    prompt_file: common.PromptFile = None,
    temperature: common.Temperature = 0.0,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> None:
    """Find early exits and layers to skip that make the target its own drafter."""
    from rich.console import Console

    from ..bench.layers import choices
    from ..drafters import EarlyExitDrafter

    SamplingParams(temperature=temperature)
    texts = common.prompts_of(prompt_file, prompts)
    generator = common.load_with_bar(
        model,
        None,
        None,
        dtype,
        device,
        check=lambda assembly: assembly.check_drafter(EarlyExitDrafter(1)),
        compile=compile,
        max_batch=1,
    )
    assert generator.tokenizer is not None
    ids = [generator.tokenizer.encode(text) for text in texts]
    with common.progress_bars(no_color) as advance:
        found = choices(generator.engine.target, ids, temperature, advance)
    if as_json:
        print(json.dumps([asdict(choice) for choice in found]))
    else:
        _print(found, Console(no_color=no_color, highlight=False))


def _print(found: Sequence[Choice], console: Console) -> None:
    from rich.table import Table

    table = Table(caption="c: its step over the target's pass; speedup: by α, c and the best K")
    for i, head in enumerate(("drafter", "layers", "α", "c", "K", "speedup")):
        table.add_column(head, justify="left" if i == 0 else "right", overflow="fold")
    for c in found:
        row = (f"{c.layers}", f"{c.alpha:.2f}", f"{c.cost:.2f}", f"{c.k}", f"{c.speedup:.2f}x")
        table.add_row(c.drafter, *row)
    console.print(table)
    best = max(found, key=lambda c: c.speedup, default=None)
    if best is None or best.speedup <= 1:
        console.print("None of them makes this target faster: try another drafter.")
    else:
        console.print(f"Try: --drafter {best.drafter} -k {best.k}")
