"""`outpace drafters`: what can draft, in one line each; for a model, what may draft for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import common

if TYPE_CHECKING:
    from ..drafters.candidates import Candidate

_SHOWN = 12
"""Lines of what is left out, on a terminal."""


def drafters(
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder, hub id, or 'demo': list what may draft for it."),
    ] = None,
    device: common.Device = None,
    compile: common.Compile = None,
    quantize: common.Quantize = None,
    as_json: common.AsJson = False,
    no_color: common.NoColor = False,
) -> None:
    """List the drafters that --drafter takes, or those that may draft for a model, and why."""
    if model is None:
        _all(as_json, no_color)
        return
    found = _candidates(model, device, compile, quantize)
    if as_json:
        rows = [{"name": c.name, "fits": c.fits, "why": c.why} for c in found]
        print(json.dumps(rows))
    else:
        _print(model, found, no_color)


def _all(as_json: bool, no_color: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..drafters import entries

    found = entries()
    if as_json:
        print(json.dumps([asdict(entry) for entry in found]))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("drafter", "what it drafts", "requires"):
        table.add_column(head, overflow="fold")
    for entry in found:
        table.add_row(entry.usage, entry.summary, entry.requires)
    console = Console(no_color=no_color, highlight=False)
    console.print(table)
    console.print("Options go by position or by name; A+B is a cascade of both, the first first.")


def _candidates(
    model: str, device: str | None, compile: bool | None, quantize: str | None
) -> list[Candidate]:
    from transformers.utils import logging as transformers_logging

    from ..drafters import Setting
    from ..drafters.candidates import candidates
    from ..models.loading import (
        Compile,
        check_runner,
        choose_device,
        inspect_checkpoint,
        load_tokenizer,
    )
    from ..models.quantize import choose_quantization

    transformers_logging.set_verbosity_error()
    place, quantization = choose_device(device), choose_quantization(quantize)
    source = inspect_checkpoint(model)
    wanted: Compile = "auto" if compile is None else compile
    check_runner(source, place, wanted, quantization)
    return candidates(Setting(source, load_tokenizer(source), place, wanted, quantize))


def _print(model: str, found: Sequence[Candidate], no_color: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(no_color=no_color, highlight=False)
    fitting, others = [c for c in found if c.fits], [c for c in found if not c.fits]
    for head, rows in ((f"May draft for {model}:", fitting), ("Left out:", others[:_SHOWN])):
        table = Table("drafter", "why", box=None, pad_edge=False, show_header=False)
        for column in table.columns:
            column.overflow = "fold"
        for candidate in rows:
            table.add_row(escape(candidate.name), escape(candidate.why))
        if rows:
            console.print(head, markup=False)
            console.print(table)
    if len(others) > _SHOWN:
        console.print(f"... and {len(others) - _SHOWN} more: --json lists them.")
    if fitting:
        together = "+".join(c.name for c in fitting)
        console.print(f"Try: --drafter {together}", markup=False, soft_wrap=True)
