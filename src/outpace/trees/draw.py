"""Trees to look at: as text, in a line, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..pictures import check_path, save
from ..types import Tree
from .topology import ranks, widths

_SPACING = 0.46
"""Inches between leaves."""

_LEVEL = 0.74
"""Inches between levels, at least."""

_WIDEST = 26.0
"""Inches; leaves move together where there are many."""

_TALL = 0.36
"""Inches, of a box at most."""

_SIDE = 0.95
"""Inches beside the tree, for what is said of a level."""

_SMALLEST = 4.0
"""Points; smaller letters are left out."""

_DARK, _LINE, _FAINT = "#212529", "#5c7cfa", "#868e96"
_LIGHT, _BLUE = (0.96, 0.97, 1.0), (0.57, 0.70, 1.0)
_MIDDLE: dict[str, Any] = {
    "ha": "center",
    "va": "center_baseline",
    "linespacing": 1.1,
    "parse_math": False,
}


def text(
    tree: Tree, labels: Sequence[str] | None = None, weights: Sequence[float] | None = None
) -> str:
    """A drawing in box characters, a line per node; children in order of rank.

    Args:
        labels: of the nodes, by default which child each is.
        weights: of the nodes, for example their probabilities, written behind the labels.

    Raises:
        OptionError: not as many labels or weights as nodes.
    """
    names = _names(tree, labels)
    if weights is not None:
        _check_count("weights", weights, tree)
        names = [f"{name} ({weight:.3g})" for name, weight in zip(names, weights, strict=True)]
    children = _children(tree)
    lines = ["root"]
    waiting = [(node, "") for node in reversed(children[-1])]
    while waiting:
        node, before = waiting.pop()
        last = node == children[tree.parents[node]][-1]
        lines.append(f"{before}{'└── ' if last else '├── '}{names[node]}")
        before += "    " if last else "│   "
        waiting += [(child, before) for child in reversed(children[node])]
    return "\n".join(lines)


def summary(tree: Tree) -> str:
    """Nodes, depth, and the widths of the levels, in a line."""
    levels = widths(tree)
    if not levels:
        return "no nodes"
    nodes = f"{len(tree)} node{'s' * (len(tree) > 1)}"
    return f"{nodes}, depth {len(levels)}, widths {' '.join(map(str, levels))}"


def places(tree: Tree) -> list[tuple[float, int]]:
    """Where the root and the nodes stand: x, and their depth; item i + 1 is node i.

    Leaves are 1 apart, from 0; a parent stands in the middle of its first and last child. No
    lines cross.
    """
    children = _children(tree)
    across = [0.0] * (len(tree) + 1)
    leaves = 0
    waiting = [-1]
    order: list[int] = []
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
        if not children[node]:
            across[node + 1] = float(leaves)
            leaves += 1
    for node in reversed(order):
        if below := children[node]:
            across[node + 1] = (across[below[0] + 1] + across[below[-1] + 1]) / 2
    return list(zip(across, (0, *tree.depths), strict=True))


def picture(
    tree: Tree,
    file: Path | str,
    weights: Sequence[float] | None = None,
    title: str = "",
    labels: Sequence[str] | None = None,
) -> None:
    """Write a picture; the suffix decides about the format, for example .png or .svg.

    Args:
        weights: of the nodes, for example their probabilities: the larger, the thicker the
            line to the node and the darker its box. They stand below the labels.
        labels: of the nodes, by default which child each is.

    Raises:
        OptionError: not as many labels or weights as nodes, weights below 0, or the file cannot
            be written.
    """
    names, shares = _names(tree, labels), [0.3] * len(tree)
    if weights is not None:
        shares = _shares(tree, weights)
        names = [f"{name}\n{weight:.2g}" for name, weight in zip(names, weights, strict=True)]
    path = Path(file)
    check_path(path)
    lines = [line for name in names for line in name.split("\n")]
    canvas = _Canvas(tree, max(map(len, ["root", *lines])), title)
    canvas.levels()
    canvas.edges(shares)
    canvas.boxes(names, shares)
    save(canvas.figure, path)


class _Canvas:
    """A figure whose units are inches, so that boxes and letters fit the distances.

    Attributes:
        where: the middle of each box; item 0 is the root, item i + 1 node i.
        wide, tall: of a box.
        letters: points; 0 where there is no room for them.
    """

    def __init__(self, tree: Tree, longest: int, title: str) -> None:
        from matplotlib.figure import Figure

        self.tree = tree
        found = places(tree)
        leaves = round(max(x for x, _ in found)) + 1
        depth = max(at for _, at in found)
        spacing = min(max(_SPACING, 0.14 + 0.085 * longest), _WIDEST / leaves)
        across = max(leaves * spacing, _SIDE, 0.1 * len(title) - 2 * _SIDE)
        self.level = max(_LEVEL, min(across / 20, 12 / max(depth, 1)))
        start = (across - (leaves - 1) * spacing) / 2
        self.where = [(start + x * spacing, -at * self.level) for x, at in found]
        self.wide, self.tall = 0.84 * spacing, min(_TALL, 0.9 * spacing)
        fitting = 72 * self.wide / (0.68 * longest + 0.4)
        self.letters = 0.0 if fitting < _SMALLEST else min(fitting, 9.0)
        self.left, self.right = -_SIDE, across + _SIDE
        top, bottom = 0.9 if title else 0.55, -depth * self.level - 0.4
        self.figure: Any = Figure(figsize=(self.right - self.left, top - bottom))
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(self.left, self.right), ylim=(bottom, top))
        self.axes.set_axis_off()
        middle = (self.left + self.right) / 2
        self.axes.text(middle, top - 0.28, title, size=11, color=_DARK, **_MIDDLE)

    def levels(self) -> None:
        """Beside each level its depth and how many nodes it has."""
        for depth, count in enumerate(widths(self.tree), 1):
            y = -depth * self.level
            style = {"size": 8, "color": _FAINT, "va": "center"}
            ends = [self.left + _SIDE, self.right - _SIDE]
            self.axes.plot(ends, [y, y], color="#f1f3f5", lw=1.5, zorder=0)
            self.axes.text(self.left + 0.15, y, f"depth {depth}", **style)
            nodes = "1 node" if count == 1 else f"{count} nodes"
            self.axes.text(self.right - 0.15, y, nodes, ha="right", **style)

    def edges(self, shares: Sequence[float]) -> None:
        """Curves from parents to nodes; a share from 0 to 1 is how thick.

        They stay between their levels, so that none runs behind another node.
        """
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        thick = min(1.0, 4 * self.wide)
        curve = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
        for (x, y), parent, share in zip(self.where[1:], self.tree.parents, shares, strict=True):
            x0, y0 = self.where[parent + 1]
            low, high = y + self.tall / 2, y0 - self.tall / 2
            bend = (low + high) / 2
            path = Curve([(x0, high), (x0, bend), (x, bend), (x, low)], curve)
            style = {"lw": thick * (0.7 + 4 * share), "ec": _LINE, "fc": "none", "zorder": 1}
            self.axes.add_patch(PathPatch(path, **style))

    def boxes(self, names: Sequence[str], shares: Sequence[float]) -> None:
        """The root and the nodes; a share from 0 to 1 is how dark, and all bear dark letters."""
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={0.3 * self.tall}"
        for (x, y), name, share in zip(self.where, ["root", *names], [None, *shares], strict=True):
            corner = (x - self.wide / 2, y - self.tall / 2)
            fill = "#ffffff" if share is None else _mixed(share)
            self.axes.add_patch(
                FancyBboxPatch(
                    corner, self.wide, self.tall, shape, fc=fill, ec=_LINE, lw=0.8, zorder=2
                )
            )
            if self.letters:
                size = self.letters
                self.axes.text(x, y, name, size=size, color=_DARK, zorder=3, **_MIDDLE)


def _mixed(share: float) -> tuple[float, ...]:
    """A blue that dark letters can be read on: lighter or darker by a share from 0 to 1."""
    return tuple(light + share * (dark - light) for light, dark in zip(_LIGHT, _BLUE, strict=True))


def _names(tree: Tree, labels: Sequence[str] | None) -> list[str]:
    """Of the nodes, in one line each."""
    if labels is None:
        return [str(rank) for rank in ranks(tree)]
    _check_count("labels", labels, tree)
    return [label if label.strip() and label.isprintable() else repr(label) for label in labels]


def _shares(tree: Tree, weights: Sequence[float]) -> list[float]:
    """Of the largest weight."""
    _check_count("weights", weights, tree)
    if not all(0 <= weight < math.inf for weight in weights):
        raise OptionError("weights must be numbers from 0: give, for example, probabilities")
    most = max((float(weight) for weight in weights), default=0.0) or 1.0
    return [float(weight) / most for weight in weights]


def _check_count(what: str, given: Sequence[object], tree: Tree) -> None:
    if len(given) != len(tree):
        raise OptionError(f"{len(given)} {what} for a tree of {len(tree)} nodes: give one per node")


def _children(tree: Tree) -> dict[int, list[int]]:
    """Of the root (-1) and of every node."""
    found: dict[int, list[int]] = {node: [] for node in range(-1, len(tree))}
    for node, parent in enumerate(tree.parents):
        found[parent].append(node)
    return found
