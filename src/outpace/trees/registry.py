"""Trees by one string: `4x2x1`, `dynamic:48,6`, `chains:4,5`, or ranks as a JSON list.

A name stands for a function whose parameters are the options, by position or by name:
`NAME:VALUE,OPTION=VALUE`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from .. import named
from ..errors import OptionError, first_line
from ..types import Draw, Tree
from .dynamic import DynamicBuilder
from .growth import Builder
from .static import SequoiaBuilder, StaticBuilder
from .topology import chain, check_nodes, from_ranks, k_ary, paths_tree

TreeLike = str | Path | Tree | Builder | Sequence[Sequence[int]]
"""A string, a file of ranks, a shape, paths of ranks, or a builder of one's own."""

_LIKE = "give one like [[0], [0, 0], [1]]"

_WIDTHS = re.compile(r"[0-9]+(x[0-9]+)+")


def chain_of(length: int, draw: Draw = "without") -> StaticBuilder:
    """One path."""
    return StaticBuilder(chain(check_nodes(length, "length")), draw)


def chains(count: int, length: int, draw: Draw = "without") -> StaticBuilder:
    """Several paths that begin together and have nothing in common."""
    return StaticBuilder(
        paths_tree(check_nodes(count, "count"), check_nodes(length, "length")), draw
    )


def widths(widths: str, draw: Draw = "without") -> StaticBuilder:
    """So many children per node, level by level."""
    try:
        each = [int(width) for width in widths.split("x")]
    except ValueError:
        raise OptionError(f"widths are numbers like '4x2x1', not {widths!r}") from None
    return StaticBuilder(k_ary(each), draw)


def sequoia(
    nodes: int | None = None, depth: int = 8, temperature: float = 0.8, draw: Draw = "without"
) -> SequoiaBuilder:
    """The tree of most tokens per second, by what is measured of models and machine (Sequoia)."""
    return SequoiaBuilder(nodes, depth, temperature, draw)


def dynamic(nodes: int = 48, depth: int = 6, width: int = 10, branches: int = 10) -> DynamicBuilder:
    """The nodes that are likeliest by the draft's own probabilities (EAGLE-2)."""
    return DynamicBuilder(nodes, depth, width, branches)


def opt(
    nodes: int = 48, depth: int = 10, width: int = 10, branches: int = 10, gain: float = 0.2
) -> DynamicBuilder:
    """The same, until a level adds no more than `gain` tokens to the expected length (OPT-Tree)."""
    return DynamicBuilder(nodes, depth, width, branches, gain)


BUILDERS: dict[str, Callable[..., Builder]] = {
    "chain": chain_of,
    "chains": chains,
    "widths": widths,
    "sequoia": sequoia,
    "dynamic": dynamic,
    "opt": opt,
}


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of the list of trees: a name with its options, and what it is."""

    usage: str
    summary: str


def tree_entries() -> list[TreeEntry]:
    """What can be named."""
    return [
        TreeEntry(_usage(name, make), (inspect.getdoc(make) or "").partition("\n")[0])
        for name, make in BUILDERS.items()
    ]


def _usage(name: str, make: Callable[..., Builder]) -> str:
    if make is widths:
        return named.usage("4x2x1", make, name, ["widths"])
    return named.usage(name, make, name)


def parse_tree(tree: TreeLike, draw: Draw = "without") -> Builder:
    """The builder that is meant.

    Args:
        draw: how children come about, where it does not say.

    Raises:
        OptionError: no such name, option, file or shape.
    """
    if isinstance(tree, Tree):
        return StaticBuilder(tree, draw)
    if isinstance(tree, Path):
        return _read(tree, draw)
    if isinstance(tree, str):
        return _parse(tree.strip(), draw)
    if isinstance(tree, Sequence):
        return _by_hand("the tree", tree, draw)
    needed = ("nodes", "depth", "shape", "draw", "weighs", "begin")
    if isinstance(tree, type) or not all(hasattr(tree, name) for name in needed):
        raise OptionError(f"tree takes a string, a path, a shape or paths of ranks, not {tree!r}")
    return tree


def _parse(text: str, draw: Draw) -> Builder:
    if text.startswith("["):
        return _ranks(text, "the tree", draw)
    name, _, rest = text.partition(":")
    if _WIDTHS.fullmatch(name):
        name, rest = "widths", f"{name},{rest}" if rest else name
    if name not in BUILDERS:
        if text.endswith(".json") or os.path.isfile(text):
            return _read(Path(text), draw)
        near = difflib.get_close_matches(name, BUILDERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(BUILDERS)}"
        raise OptionError(
            f"there is no tree {text!r}: {hint} (or widths like '4x2x1', ranks like "
            "'[[0],[0,0],[1]]', or a file of them; 'outpace tree' lists all)"
        )
    make = BUILDERS[name]
    given = {value.rpartition("=")[2] for value in rest.split(",")}
    if "draw" in inspect.signature(make).parameters and given.isdisjoint(get_args(Draw)):
        rest = f"{rest},draw={draw}".lstrip(",")
    made: Builder = named.make("tree", name, make, rest)
    return made


def _read(path: Path, draw: Draw) -> Builder:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OptionError(f"cannot read the tree in {path} ({reason}): check the path") from error
    return _ranks(text, f"the tree in {path}", draw)


def _ranks(text: str, what: str, draw: Draw) -> StaticBuilder:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{what} is not JSON ({first_line(error)}): {_LIKE}") from error
    return _by_hand(what, given.get("paths") if isinstance(given, dict) else given, draw)


def _by_hand(what: str, paths: Any, draw: Draw) -> StaticBuilder:
    if not isinstance(paths, Sequence) or not all(isinstance(path, Sequence) for path in paths):
        raise OptionError(f"{what} is no list of paths of ranks: {_LIKE}")
    if any(isinstance(rank, str) for path in paths for rank in path):
        raise OptionError(f"{what} has a path that is not made of whole numbers: {_LIKE}")
    return StaticBuilder(from_ranks(paths), draw)
