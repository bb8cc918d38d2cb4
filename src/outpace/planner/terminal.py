"""The landscape of `landscape`, as a table in colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import OptionError
from .landscape import SHOWN_KS, landscape, panels
from .plan import Option, Plan
from .reasons import at_once

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_ALPHAS = tuple(tenth / 10 for tenth in range(10, -1, -1))


def terminal(plan: Plan, batch: int, drafter: str | None = None) -> Table:
    """A drafter's landscape for the terminal, by default the most promising one's.

    Raises:
        OptionError: there is no plan for this batch, or no such drafter in it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = panels(plan, batch)
    panel = next((p for p in shown if drafter in (None, p.drafter)), None)
    if panel is None:
        names = ", ".join(panel.drafter for panel in shown)
        raise OptionError(f"no drafter {drafter!r} was measured: choose from {names}")
    ks = [k for k in SHOWN_KS if k <= panel.longest]
    best = panel.points[0]
    field = landscape(panel.prices[best.temperature], _SHOWN_ALPHAS, ks)
    marked = {_cell(option, ks): option for option in reversed(panel.points)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0), show_edge=False)
    table.title = f"speedup over α and K, {panel.drafter}, {at_once(batch)}"
    table.title_justify = "left"
    table.add_column("α \\ K", justify="right")
    for k in ks:
        table.add_column(str(k), justify="right", min_width=8)
    for alpha, row in zip(_SHOWN_ALPHAS, field, strict=True):
        cells = [Text(f"{alpha:.1f} ")]
        for k, value in zip(ks, row, strict=True):
            option = marked.get((alpha, k))
            text = f"{value:.2f}" if option is None else f"[{value:.2f}]"
            cells.append(Text(f"{text:>7} ", style=_style(value, option is not None)))
        table.add_row(*cells)
    here = ", ".join(
        f"T={o.temperature:g}: α={o.alpha:.2f}, K={o.k}, {o.speedup:.2f}x" for o in panel.points
    )
    table.caption = f"[ ] you are about here ({here})"
    table.caption_justify = "left"
    return table


def _cell(option: Option, ks: Sequence[int]) -> tuple[float, int]:
    """The α and K of the table that are nearest."""
    alpha = min(_SHOWN_ALPHAS, key=lambda alpha: abs(alpha - option.alpha))
    return alpha, min(ks, key=lambda k: abs(k - option.k))


def _style(value: float, marked: bool) -> str:
    """Green where it pays, red where it does not."""
    if value >= 2:
        colour = "black on green3"
    elif value >= 1.05:
        colour = "black on pale_green1"
    elif value >= 0.95:
        colour = "black on grey85"
    elif value >= 0.6:
        colour = "black on light_pink1"
    else:
        colour = "black on indian_red1"
    return f"bold {colour}" if marked else colour
