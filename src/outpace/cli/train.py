"""`outpace train`: the models outpace ships, made again."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

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
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise OptionError(f"cannot write to {out} ({error.strerror}): use a folder") from error
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
        note = ""
        if "train_loss" in row:
            note = f"loss {row['train_loss']:.3f}, {row['tokens_per_s']:.0f} tokens/s"
        self._bar.update(self._task, completed=row["step"], note=note)
        if not math.isnan(row.get("held_out_loss", math.nan)):
            self._bar.console.print(
                f"{self._stage} step {row['step']:.0f}: held-out loss "
                f"{row['held_out_loss']:.4f} nats per token"
            )

    def __exit__(self, *details: object) -> None:
        self._bar.stop()
