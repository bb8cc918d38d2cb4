"""Drafters by name: `NAME`, `NAME:VALUE,OPTION=VALUE`, a draft model's PATH, or several with `+`.

A name stands for a class or function whose parameters are the options, by
position or by name; their annotations say what they take. Other packages add
names through the entry point group `outpace.drafters`.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

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
    options = ",".join(
        p.name.replace("_", "-") + ("" if p.default in (p.empty, None) else f"={p.default}")
        for p in _options(name, make)
    )
    summary = (inspect.getdoc(make) or "").partition("\n")[0]
    made = make if inspect.isclass(make) else _kinds(name, make).get("return")
    requires = getattr(made, "requires", Drafter.requires)
    return Entry(name, f"{name}:{options}" if options else name, summary, requires)


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
        return _make(name, factory(name), rest)
    if "/" in text or text in (DEMO_TARGET, DEMO_DRAFT) or _is_path(text):
        return Checkpoint(text)
    near = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
    raise OptionError(
        f"there is no drafter {name!r}: {hint} (or give a draft model: a folder, or a hub id as "
        "OWNER/NAME; 'outpace drafters' lists all)"
    )


def _make(name: str, make: Factory, given: str) -> Blueprint:
    options, kinds = _options(name, make), _kinds(name, make)
    values: dict[str, Any] = {}
    for position, value in enumerate(given.split(",") if given else []):
        key, equals, rest = value.partition("=")
        if equals:
            option = next((o for o in options if o.name == key.replace("-", "_")), None)
            if option is None:
                raise OptionError(f"the drafter {name!r} has no option {key!r}{_known(options)}")
            value = rest
        elif position < len(options):
            option = options[position]
        else:
            raise OptionError(
                f"the drafter {name!r} takes {len(options)} values at most{_known(options)}"
            )
        if option.name in values:
            raise OptionError(f"{option.name} is given twice in '{name}:{given}'")
        values[option.name] = _value(name, option.name, kinds.get(option.name, str), value)
    missing = [o.name for o in options if o.default is o.empty and o.name not in values]
    if missing:
        raise OptionError(f"the drafter {name!r} needs {missing[0]}: write '{name}:{missing[0]}'")
    return make(**values)


def _options(name: str, make: Factory) -> list[inspect.Parameter]:
    """The parameters that a string can set.

    Raises:
        OptionError: it has no signature.
    """
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError) as error:
        raise OptionError(f"the drafter {name!r} cannot be called ({error})") from error
    return [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _kinds(name: str, make: Factory) -> dict[str, Any]:
    """What annotations say.

    Raises:
        OptionError: they name what is not there.
    """
    try:
        return typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except Exception as error:
        raise OptionError(
            f"the drafter {name!r} has annotations that cannot be read ({first_line(error)})"
        ) from error


def _known(options: Sequence[inspect.Parameter]) -> str:
    return f": it has {', '.join(o.name.replace('_', '-') for o in options)}" if options else ""


def _value(name: str, option: str, kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is bool:
        if text.lower() in ("true", "yes", "1", "false", "no", "0"):
            return text.lower() in ("true", "yes", "1")
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    else:
        return text
    what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    raise OptionError(f"{option} of the drafter {name!r} must be {what}, not {text!r}")
