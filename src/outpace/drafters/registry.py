"""Drafters by name: `NAME`, `NAME:VALUE,OPTION=VALUE`, a draft model's PATH, or several with `+`.

A name stands for a class or function whose parameters are the options, by
position or by name; their annotations say what they take. Other packages add
names through the entry point group `outpace.drafters`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .. import named
from ..errors import OptionError, first_line
from ..models.loading import DEMO_DRAFT, DEMO_TARGET
from .base import Drafter
from .blueprint import Blueprint, Checkpoint
from .cascade import Cascade
from .early_exit import EarlyExitDrafter
from .foreign import SLEM, TLI
from .lookahead import LookaheadDrafter
from .ngram import NgramDrafter
from .quantized import int4, int8
from .recycling import RecyclingDrafter
from .skip import SkipDrafter
from .suffix import SuffixDrafter

GROUP = "outpace.drafters"

Factory = Callable[..., Blueprint]

BUILT_IN: dict[str, Factory] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
    "lookahead": LookaheadDrafter,
    "early-exit": EarlyExitDrafter,
    "skip": SkipDrafter,
    "tli": TLI,
    "slem": SLEM,
    "int8": int8,
    "int4": int4,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list of drafters.

    Attributes:
        usage: its name with its options and what they are by default.
        summary: what it does.
        requires: what it needs of a target, or of the machine.
    """

    name: str
    usage: str
    summary: str
    requires: str


@cache
def _third_party() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def names() -> list[str]:
    """Every name there is, the built-in ones first."""
    return [*BUILT_IN, *(n for n in sorted(_third_party()) if n not in BUILT_IN)]


def factory(name: str) -> Factory:
    """What a name stands for.

    Raises:
        OptionError: another package's drafter cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    point = _third_party()[name]
    try:
        made: Factory = point.load()
    except Exception as error:
        raise OptionError(
            f"the drafter {name!r} ({point.value}) cannot be imported ({first_line(error)}): "
            "reinstall the package that brings it"
        ) from error
    return made


def entries() -> list[Entry]:
    """What can be named, and any draft model."""
    found = []
    for name in names():
        try:
            found.append(_entry(name, factory(name)))
        except OptionError as error:
            found.append(Entry(name, name, str(error), "-"))
    path = Entry(
        "PATH", "PATH", "A smaller model: a folder or a hub id.", "one vocabulary for both"
    )
    return [*found, path]


def _entry(name: str, make: Factory) -> Entry:
    said = f"the drafter {name!r}"
    summary = (inspect.getdoc(make) or "").partition("\n")[0]
    made = make if inspect.isclass(make) else named.kinds(said, make).get("return")
    requires = getattr(made, "requires", Drafter.requires)
    return Entry(name, named.usage(name, make, said), summary, requires)


def parse(text: str | Path) -> Blueprint:
    """The drafter that a string names.

    Raises:
        OptionError: no such name or option, or a value that is none for it.
    """
    if isinstance(text, Path) or _is_path(text):
        return Checkpoint(text)
    parts = [_parse_one(part) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else Cascade(parts)


def _is_path(text: str) -> bool:
    """Whether it can be nothing but a path: a name comes before a folder of that name."""
    name = text.partition(":")[0]
    if not text or name in names():
        return False
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError):  # no path that can be
        return False


def _parse_one(text: str) -> Blueprint:
    name, _, rest = text.partition(":")
    if name in names():
        made: Blueprint = named.make("drafter", name, factory(name), rest)
        return made
    if "/" in text or text in (DEMO_TARGET, DEMO_DRAFT) or _is_path(text):
        return Checkpoint(text)
    if name == "auto":
        raise OptionError(
            "'auto' is no drafter, but a choice among several: name one ('outpace drafters MODEL' "
            "lists them), or leave it out"
        )
    near = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
    raise OptionError(
        f"there is no drafter {name!r}: {hint} (or give a draft model: a folder, or a hub id as "
        "OWNER/NAME; 'outpace drafters' lists all)"
    )
