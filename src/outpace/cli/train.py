"""`outpace train`: the models outpace ships, made again."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import common

if TYPE_CHECKING:
    from rich.console import Console

    from ..assembly import Assembly

app = typer.Typer(no_args_is_help=True, help="Train models.")


@app.callback()
def _group() -> None:
    pass


@app.command("demo")
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Work folder; resumed if it exists.")],
    stage: Annotated[
        str,
        typer.Option("--stage", help="shallow, target, teach, draft, export, or all of them."),
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps of one stage instead of its default."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Stop and save after this long.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    compile_step: Annotated[
        bool, typer.Option("--compile", help="Compile the step (needs a C++ compiler).")
    ] = False,
) -> None:
    """Train the shipped pair on the Python standard library; resumable at any moment."""
    from rich.console import Console

    from ..errors import OptionError
    from ..models.loading import choose_device
    from ..training import demo as recipe
    from ..training.export import export_pair

    choose_device(device)
    if stage not in (*recipe.STAGES, "all", "export"):
        raise OptionError(f"unknown stage {stage!r}: use {', '.join(recipe.STAGES)}, export or all")
    if steps is not None and stage not in recipe.STAGES:
        raise OptionError("--steps goes with one --stage")
    if minutes is not None and not minutes > 0:
        raise OptionError(f"--minutes must be more than 0, not {minutes:g}")
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    for package in ("matplotlib", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"training needs {package}: pip install 'outpace[train]'")
    _check_writable(out)
    console = Console(stderr=True)
    names = [n for n in recipe.STAGES if stage in (n, "all")]
    for name in names:
        total = steps or recipe.STAGES[name].steps
        with _Bar(console, name, total) as bar:
            done = recipe.run_stage(
                name,
                out,
                steps=steps,
                should_stop=lambda: time.monotonic() > deadline,
                device=device,
                compile_step=compile_step,
                report=bar.report,
            )
        if not done:
            console.print(f"{name} is not finished: run the command again to go on")
            return
    if stage in ("all", "export"):
        console.print(f"wrote {export_pair(out)}")


@app.command("exit")
def exit_adapter(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the adapter.")],
    layers: Annotated[int, typer.Option("--layers", "-l", help="The exit: layers that draft.")],
    model: common.Model = "demo",
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Text to train on (repeatable); by default Python's."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of 8 x 256 tokens.")] = 300,
    dtype: common.Dtype = None,
    device: common.Device = None,
) -> None:
    """Train an adapter for an early exit; it drafts as early-exit:LAYERS,FOLDER."""
    import numpy as np
    from rich.console import Console

    from ..drafters import EarlyExitDrafter
    from ..models.loading import inspect_checkpoint
    from ..training.corpus import standard_library
    from ..training.exits import AdapterConfig, train_adapter, write_adapter

    config = AdapterConfig(layer=layers, steps=steps)
    _check_writable(out)
    wanted, tokens = config.steps * config.rows * config.length, list[int]()
    if file:
        texts = [common.read_text(str(path), "the text") for path in file]
    else:
        texts = [f.text for f in standard_library(held_out=False)]

    def check(assembly: Assembly) -> None:
        assembly.check_drafter(EarlyExitDrafter(layers))
        for text in texts:
            tokens.extend(assembly.tokenizer.encode(text))
            if len(tokens) > wanted:
                break
        config.windows_of(len(tokens), assembly.source.context_length)

    generator = common.load_with_bar(
        model,
        None,
        0,
        dtype,
        device,
        check=check,
        max_batch=1,
    )
    console = Console(stderr=True)
    with _Bar(console, f"exit behind layer {layers}", steps) as bar:
        target, source = generator.engine.target, inspect_checkpoint(model)
        adapter = train_adapter(target, source, np.array(tokens), config, bar.report)
    write_adapter(adapter, out, layers)
    console.print(f"wrote {out}: draft with early-exit:{layers},{out}")


def _check_writable(out: Path) -> None:
    from ..errors import OptionError

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise OptionError(f"cannot write to {out} ({error.strerror}): use a folder") from error


class _Bar:
    """One stage's progress: a bar, and a line per evaluation."""

    def __init__(self, console: Console, stage: str, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._stage = stage
        self._bar = Progress(
            TextColumn("{task.description}"), *columns, Remaining(), console=console
        )
        self._task = self._bar.add_task(stage, total=total, note="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def report(self, row: dict[str, float]) -> None:
        note = f"loss {row['train_loss']:.3f}, α {row['alpha']:.2f}" if "alpha" in row else ""
        if "tokens_per_s" in row:
            note = f"loss {row['train_loss']:.3f}, {row['tokens_per_s']:.0f} tokens/s"
        self._bar.update(self._task, completed=row["step"], note=note)
        if not math.isnan(row.get("held_out_loss", math.nan)):
            self._bar.console.print(
                f"{self._stage} step {row['step']:.0f}: held-out loss "
                f"{row['held_out_loss']:.4f} nats per token"
            )

    def __exit__(self, *details: object) -> None:
        self._bar.stop()
