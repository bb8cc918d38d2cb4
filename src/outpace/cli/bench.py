"""`outpace bench`: a drafter beside plain decoding, and a draft model alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from . import common

if TYPE_CHECKING:
    from ..bench.compare import Comparison


@common.with_sampling()
def bench(
    sampling: Mapping[str, Any],
    prompts: Annotated[int, typer.Option("--prompts", "-p", help="How many prompts.")] = 8,
    prompt_file: common.PromptFile = None,
    repeats: Annotated[int, typer.Option("--repeats", "-r", help="Runs per prompt.")] = 3,
    model: common.Model = "demo",
    drafter: common.DrafterName = None,
    k: common.DraftLength = "auto",
    verifier: common.VerifierName = None,
    tree: common.TreeName = None,
    seed: common.Seed = None,
    max_new_tokens: common.MaxNewTokens = 128,
    dtype: common.Dtype = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> None:
    """Measure the drafter and what speculation gains, on held-out Python functions by default."""
    from rich.console import Console

    from ..bench.compare import compare
    from ..types import SamplingParams

    params = SamplingParams(seed=seed, max_new_tokens=max_new_tokens, eos_token_ids=(), **sampling)
    if repeats < 1:
        raise OptionError("--repeats must be at least 1")
    name = common.drafter_for(model, drafter)
    if name is None or common.draft_length(k) == 0:
        raise OptionError("bench measures a drafter: give --drafter and -k 1 or more")
    texts = common.prompts_of(prompt_file, prompts)
    generator = common.load_with_bar(
        model,
        name,
        k,
        dtype,
        device,
        check=lambda assembly: assembly.check(params, texts),
        compile=compile,
        verifier=verifier,
        tree=tree,
        quantize=quantize,
        max_batch=1,
    )
    with common.progress_bars(no_color) as advance:
        found = compare(generator, texts, params, repeats, advance)
    if as_json:
        engine, target = generator.engine, generator.engine.target
        setting: dict[str, Any] = {"model": model, "drafter": name, "k": common.draft_length(k)}
        setting |= {"verifier": engine.verifier.name}
        setting |= {"temperature": params.temperature, "quantize": quantize}
        machine = {"device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
        print(json.dumps(setting | machine | found.to_dict()))
    else:
        _print(found, params.temperature, Console(no_color=no_color, highlight=False))


def _print(found: Comparison, temperature: float, console: object) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(caption="medians; accepted: acceptance rate, full: full-accept fraction")
    heads = ("", "time", "tokens", "tokens/s", "accepted", "full", "speedup")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            row.mode,
            f"{row.seconds:.3f} s",
            str(row.tokens),
            f"{row.tokens_per_second:.0f}",
            common.percent(row.stats.acceptance_rate),
            common.percent(row.stats.full_accept_fraction),
            f"{row.speedup:.2f}x",
        )
    console.print(table)
    stats = found.rows[-1].stats
    alphas = " ".join(f"{a:.2f}" for a in stats.alpha) or "-"
    console.print(
        f"α by depth {alphas} · {stats.tokens_per_pass:.2f} tokens per pass · the formula gives "
        f"{found.predicted:.2f}x from α and c, realised without prefill {found.decoding:.2f}x "
        f"({found.decoding / found.predicted:.0%})"
    )
    if temperature == 0:
        console.print(
            f"speculative text equals plain text on {found.identical} of {found.prompts} prompts"
        )
