"""The landscape of speculation: speedup over α and K at measured costs, and where you are in it.

A value is what a round would gain if every token passed with the same chance α and every round
drafted K tokens: tokens ÷ price (`tokens_iid`, `promises.price_of`). A point stands at the best K
of a drafter and the α at which the formula gives the tokens that were counted (`alpha_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..pictures import check_path, save
from .formulas import tokens_iid
from .plan import Option, Plan
from .prices import Price, speedup
from .promises import price_of
from .reasons import at_once
from .survey import Survey

_COLUMNS = 3
_MOST_PANELS = 6
_STEPS = 101
SHOWN_KS = (1, 2, 3, 4, 6, 8, 12, 16)
_DARK, _FAINT = "#212529", "#868e96"
_SLOWER, _EVEN, _FASTER = "#c2255c", "#f8f9fa", "#1971c2"
_MARKS, _DASHES = ("o", "s", "D", "^"), ("-", "--", ":", "-.")

_LABEL = 26
"""Points that a label is high."""

_HIGH, _NEAR = 0.9, 0.12
"""α whose label would leave the picture, and a distance at which two would touch."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A drafter's landscape.

    Attributes:
        prices: by temperature, from K to a round's price.
        longest: K that it was run with.
        points: the best option of each temperature.
    """

    drafter: str
    prices: dict[float, Price]
    longest: int
    points: tuple[Option, ...]


def landscape(price: Price, alphas: Sequence[float], ks: Sequence[int]) -> list[list[float]]:
    """Speedups `[α][K]`.

    Raises:
        OptionError: an α is no probability, or a K no length.
    """
    return [[speedup(tokens_iid(alpha, k), price(k)) for k in ks] for alpha in alphas]


def panels(plan: Plan, batch: int) -> list[Panel]:
    """One per drafter, the most promising first.

    Raises:
        OptionError: there is no plan for this batch.
    """
    advices = [advice for advice in plan.advices if advice.batch == batch]
    if not advices:
        raise OptionError(f"there is no plan for {batch} sequences: measure with that batch")
    best: dict[str, dict[float, Option]] = {}
    for advice in advices:
        for option in advice.options:
            if option.tree is None:  # the formula is for chains
                best.setdefault(option.drafter, {}).setdefault(advice.temperature, option)
    found = []
    for drafter, options in best.items():
        surveys: dict[float, Survey] = {t: plan.survey_of(o) for t, o in options.items()}
        prices = {t: price_of(plan.machine, s, batch) for t, s in surveys.items()}
        longest = max(s.longest for s in surveys.values())
        found.append(Panel(drafter, prices, longest, tuple(options.values())))
    return sorted(found, key=lambda panel: -max(o.speedup for o in panel.points))


def picture(plan: Plan, file: Path | str, batch: int | None = None, title: str = "") -> None:
    """Write the landscapes of all drafters; the suffix decides about the format.

    Args:
        batch: sequences at once, by default the smallest that was planned for.

    Raises:
        OptionError: the file cannot be written, or there is no plan for this batch.
    """
    path = Path(file)
    check_path(path)
    batch = min(advice.batch for advice in plan.advices) if batch is None else batch
    shown = panels(plan, batch)[:_MOST_PANELS]
    save(_figure(shown, batch, title), path)


def _figure(shown: Sequence[Panel], batch: int, title: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
    from matplotlib.figure import Figure

    columns = 2 if len(shown) == 4 else min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(max(6.4, 4.3 * columns + 0.9), 3.9 * rows + 0.9), layout="constrained")
    colours = LinearSegmentedColormap.from_list("speedup", [_SLOWER, _EVEN, _FASTER])
    highest = max(1.5, *(p.speedup for panel in shown for p in panel.points)) * 1.15
    norm = TwoSlopeNorm(1.0, 0.0, highest)
    grid = figure.subplots(rows, columns, squeeze=False)
    drawn: Any = None
    for number, axes in enumerate(grid.flat):
        if number >= len(shown):
            axes.set_axis_off()
            continue
        drawn = _draw(axes, shown[number], colours, norm)
        if number % columns == 0:
            axes.set_ylabel("α, the chance that a token passes")
        if number + columns >= len(shown):
            axes.set_xlabel("K, tokens drafted per round")
    bar = figure.colorbar(drawn, ax=grid, shrink=0.9, pad=0.02, extend="max")
    bar.set_label("speedup over plain decoding")
    bar.ax.axhline(1.0, color=_DARK, lw=1.2)
    bar.set_ticks(sorted({0.0, 0.5, 1.0, *(1 + step / 2 for step in range(int(2 * highest) - 1))}))
    bar.ax.yaxis.set_major_formatter("{x:g}x")
    _legend(figure, list(dict.fromkeys(t for panel in shown for t in panel.prices)))
    figure.suptitle(title or f"Where speculation pays here, {at_once(batch)}", size=12, color=_DARK)
    return figure


def _draw(axes: Any, panel: Panel, colours: Any, norm: Any) -> Any:
    ks = range(1, panel.longest + 1)
    alphas = [step / (_STEPS - 1) for step in range(_STEPS)]
    first = next(iter(panel.prices))
    fields = {t: landscape(price, alphas, ks) for t, price in panel.prices.items()}
    style = {"cmap": colours, "norm": norm}
    drawn = axes.pcolormesh(ks, alphas, fields[first], shading="nearest", rasterized=True, **style)
    wanted = [level for level in (1.5, 2.0, 3.0, 4.0, 6.0) if level < norm.vmax]
    if wanted and panel.longest > 1:
        lines = axes.contour(ks, alphas, fields[first], wanted, colors="white", linewidths=0.9)
        axes.clabel(lines, fmt="%gx", fontsize=7)
    for field, dashes in zip(fields.values(), cycle(_DASHES), strict=False):
        if panel.longest > 1:
            even = axes.contour(ks, alphas, field, [1.0], colors=_DARK, linewidths=1.5)
            even.set_linestyle(dashes)
    for number, option in enumerate(panel.points):
        _point(axes, option, number, panel)
    axes.set_xlim(0.5, panel.longest + 0.5)
    axes.set_ylim(0, 1.0)
    axes.set_xticks([k for k in SHOWN_KS if k <= panel.longest])
    axes.set_title(panel.drafter, size=10, color=_DARK)
    axes.tick_params(labelsize=8)
    return drawn


def _point(axes: Any, option: Option, number: int, panel: Panel) -> None:
    """A mark, and what it is, towards the middle of the picture."""
    axes.plot(
        option.k,
        option.alpha,
        _MARKS[number % len(_MARKS)],
        ms=9,
        mfc="white",
        mec=_DARK,
        mew=1.6,
        zorder=5,
        clip_on=False,
    )
    right = option.k < 0.6 * panel.longest
    lift = _LABEL * _lift(option, panel)
    axes.annotate(
        f"{panel.drafter}, T={option.temperature:g}\n{option.speedup:.2f}x",
        (option.k, option.alpha),
        (10 if right else -10, lift),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        size=8,
        color=_DARK,
        zorder=6,
        bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": _FAINT, "lw": 0.5, "alpha": 0.85},
    )


def _lift(option: Option, panel: Panel) -> float:
    """By how much of its height a label is moved, so that two do not lie upon each other."""
    top = -0.3 if option.alpha > _HIGH else 0.0
    above = [p for p in panel.points if p is not option and 0 <= p.alpha - option.alpha < _NEAR]
    below = [p for p in panel.points if p is not option and 0 < option.alpha - p.alpha < _NEAR]
    if above:
        return -1.3 if any(p.alpha > _HIGH for p in above) else -0.6
    return top if option.alpha > _HIGH or not below else 0.6


def _legend(figure: Any, temperatures: Sequence[float]) -> None:
    """Which line and mark is which temperature's."""
    from matplotlib.lines import Line2D

    style: Any = {"color": _DARK, "lw": 1.5, "mfc": "white", "mec": _DARK, "mew": 1.6, "ms": 8}
    handles = [
        Line2D([], [], ls=dashes, marker=mark, label=f"T={temperature:g}: you, and 1x", **style)
        for temperature, dashes, mark in zip(
            temperatures, cycle(_DASHES), cycle(_MARKS), strict=False
        )
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
