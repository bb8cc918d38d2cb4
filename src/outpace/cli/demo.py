"""`outpace demo`: the first minute. Plain and speculative decoding side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from . import common

PROMPT = '''import os

def find_files(top, suffix):
    """Return the files below a directory whose names end with a suffix."""
    found = []
    for name in os.listdir(top):'''


def demo(
    prompt: Annotated[str, typer.Argument(help="Python to continue.")] = PROMPT,
    k: common.DraftLength = "auto",
    temperature: common.Temperature = 0.0,
    seed: common.Seed = None,
    max_new_tokens: common.MaxNewTokens = 96,
    no_color: common.NoColor = False,
) -> None:
    """Generate from the shipped pair, plainly and speculatively, and compare."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..generator import Generator
    from ..types import Result, SamplingParams
    from .show import STYLES, harmless, legend

    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    fast = common.load_with_bar(
        "demo",
        "demo-draft",
        k,
        None,
        None,
        check=lambda assembly: assembly.check(params, prompt),
        max_batch=1,
    )
    plain = Generator(
        fast.engine.target, tokenizer=fast.tokenizer, eos=fast.eos_token_ids, max_batch=1
    )
    for generator in (plain, fast):  # untimed: first calls allocate
        generator.generate(prompt, params=params)
    results: list[tuple[str, Result]] = [
        ("plain decoding", plain.generate(prompt, params=params)),
        (f"speculative, K = {k}", fast.generate(prompt, params=params)),
    ]
    console = Console(no_color=no_color, highlight=False)
    grid = Table(box=box.ROUNDED, width=min(console.width, 176), expand=True)
    cells = []
    for title, result in results:
        body = Text(harmless(prompt), style="dim")
        for event in result.tokens:
            body.append(harmless(event.text), style=STYLES[event.provenance])
        grid.add_column(title, ratio=1, footer=common.describe(result.stats), overflow="fold")
        cells.append(body)
    grid.show_footer = True
    grid.add_row(*cells)
    console.print(grid)
    console.print(Text("colours: ").append(legend()))
    (_, a), (_, b) = results
    ratio = b.stats.tokens_per_second / a.stats.tokens_per_second
    if temperature == 0:
        same = "the same" if a.token_ids == b.token_ids else "NOT the same"
        console.print(f"{same} {len(b.token_ids)} tokens, {ratio:.2f}x as fast")
    else:
        console.print(
            f"two draws from the same law (sampling): {ratio:.2f}x as many tokens per second"
        )
