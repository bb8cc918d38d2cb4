"""`outpace drafters`: what can draft, in one line each."""

from __future__ import annotations

import json
from dataclasses import asdict

from . import common


def drafters(as_json: common.AsJson = False, no_color: common.NoColor = False) -> None:
    """List the drafters that --drafter takes, with their options and requirements."""
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
