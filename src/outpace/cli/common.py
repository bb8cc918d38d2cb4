"""What the commands share: options, loading with a bar, tables."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from ..assembly import Assembly
    from ..engine.stats import Stats
    from ..generator import Generator

Model = Annotated[
    str, typer.Option("--model", "-m", help="Checkpoint folder, hub id, or 'demo' (shipped).")
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="Draft model: folder, hub id, 'demo-draft', or 'none'; "
        "by default demo-draft for the demo model, else none.",
    ),
]
DraftLength = Annotated[int, typer.Option("-k", "--k", help="Tokens drafted per round; 0: plain.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy decoding.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus mass in (0, 1]; 1 is off.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k most likely tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="At most this many.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N or mps.")]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Run passes as compiled C++ or CUDA graphs (Llama family); by default where possible.",
    ),
]
Quantize = Annotated[
    str | None, typer.Option("--quantize", help="Keep the target's weights as int8 or int4.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours, no moving lines.")]


def drafter_for(model: str, drafter: str | None) -> str | None:
    """The drafter as given; by default the shipped draft for the shipped target."""
    if drafter is None:
        return "demo-draft" if model == "demo" else None
    return None if drafter == "none" else drafter


def load_with_bar(
    model: str,
    drafter: str | None,
    k: int,
    dtype: str | None,
    device: str | None,
    check: Callable[[Assembly], None] = lambda assembly: None,
    compile: bool | None = None,
    **options: Any,
) -> Generator:
    """`outpace.load` with a progress bar on a terminal, remarks on stderr.

    `check` sees the assembly before any weight is read.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging as transformers_logging

    from ..assembly import Assembly

    transformers_logging.set_verbosity_error()
    console = Console(stderr=True)
    if not console.is_terminal:
        transformers_logging.disable_progress_bar()
    wanted: Any = "auto" if compile is None else compile
    assembly = Assembly(model, drafter, k, dtype=dtype, device=device, compile=wanted, **options)
    check(assembly)
    for remark in assembly.remarks:
        print(f"outpace: note: {remark}", file=sys.stderr)
    columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            generator = assembly.load(advance)
    for message in dict.fromkeys(str(w.message) for w in caught):
        print(f"outpace: note: {message}", file=sys.stderr)
    return generator


def read_text(path: str) -> str:
    """A prompt's text from a file, '-' is standard input.

    Raises:
        OptionError: it cannot be read as UTF-8 text.
    """
    try:
        if path != "-":
            return Path(path).read_text(encoding="utf-8")
        if sys.stdin is None:
            raise OptionError("no prompt: standard input is closed")
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OptionError(f"cannot read the prompt from {path} ({reason}): check the path") from (
            error
        )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def describe(stats: Stats) -> str:
    """One line of what matters while tokens stream."""
    parts = [f"{stats.emitted} tokens", f"{stats.tokens_per_second:.0f} tokens/s"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} accepted")
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
    return " · ".join(parts)


def print_stats(stats: Stats, console: Console) -> None:
    """Every figure of the glossary, as a small table."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("tokens", str(stats.emitted)),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
        ("rounds (target passes)", str(stats.rounds)),
        ("tokens per pass", f"{stats.tokens_per_pass:.2f}"),
        ("acceptance rate", percent(stats.acceptance_rate)),
        ("full-accept fraction", percent(stats.full_accept_fraction)),
        ("α by depth", " ".join(f"{a:.2f}" for a in stats.alpha) or "-"),
        ("c (draft step ÷ target pass)", f"{stats.draft_cost:.3f}" if stats.draft_cost else "-"),
        ("prefill", f"{stats.prefill_seconds:.3f} s"),
        ("draft", f"{stats.draft_seconds:.3f} s"),
        ("target", f"{stats.target_seconds:.3f} s"),
        ("rounds in all", f"{stats.round_seconds:.3f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
