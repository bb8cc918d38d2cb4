"""An audit as a picture: by position, how far counts are from the law, and what would be seen."""

from __future__ import annotations

from pathlib import Path

from ..errors import OptionError
from ..pictures import check_path, save
from .report import Report, Sampled

_COLOURS = {"tokens": "#0b7285", "ranks": "#5f3dc4", "draft": "#d9480f"}


def plot(report: Report, path: Path) -> None:
    """Write a picture of the samples' tests; the suffix decides about the format.

    Raises:
        OptionError: there were no samples, or the file cannot be written.
    """
    part = report.parts.get("sampled")
    if not isinstance(part, Sampled):
        raise OptionError("a plot needs the sampled mode: leave --mode out, or use --mode sampled")
    check_path(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    least = min([part.share, *(max(t.p_value, 1e-30) for t in part.tests)])
    above.set(yscale="log", ylim=(least / 30, 3))
    kinds = [k for k in _COLOURS if any(t.kind == k for t in part.tests)]
    for number, kind in enumerate(kinds):
        tests = [t for t in part.tests if t.kind == kind]
        shift = (number - (len(kinds) - 1) / 2) * 0.18
        at = [t.position + shift for t in tests]
        colour = _COLOURS[kind]
        above.scatter(at, [max(t.p_value, 1e-30) for t in tests], color=colour, label=kind, s=30)
        below.bar(at, [t.distance for t in tests], width=0.16, color=colour)
        below.scatter(at, [t.detectable for t in tests], marker="_", color=colour, s=120)
    above.axhline(part.share, color="#c92a2a", linewidth=1, linestyle="--")
    above.text(
        1,
        part.share * 1.3,
        "decision",
        ha="right",
        va="bottom",
        fontsize=8,
        color="#c92a2a",
        transform=above.get_yaxis_transform(),
    )
    above.set_ylabel("p-value")
    if kinds:
        where = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}
        above.legend(frameon=False, ncols=3, fontsize=9, **where)
    below.set_ylabel("total variation")
    below.set_xlabel("position of the token (bars: beyond chance; dashes: found 9 times in 10)")
    below.set_ylim(bottom=0)
    last = max((t.position for t in part.tests), default=1)
    below.set_xlim(0.4, max(last, 4) + 0.6)
    below.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    verdict = "no difference was found" if part.sound else "this is NOT the target's law"
    figure.suptitle(f"{report.system}\n{verdict} ({part.samples} samples)", fontsize=11)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
