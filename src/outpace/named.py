"""What can be named with options in one string: `NAME:VALUE,OPTION=VALUE`.

A name stands for a class or function whose parameters are the options, by
position or by name; their annotations say what they take.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .errors import OptionError, first_line


def make(what: str, name: str, factory: Callable[..., Any], given: str, **more: Any) -> Any:
    """What a name with these options stands for.

    Args:
        what: the kind of thing, for errors.
        given: the options, without the name.
        more: arguments that a string does not set.

    Raises:
        OptionError: an unknown option, a value that is none for it, or one that is missing.
    """
    said = f"the {what} {name!r}"
    found = [o for o in options(said, factory) if o.name not in more]
    annotated = kinds(said, factory)
    values: dict[str, Any] = {}
    for position, value in enumerate(given.split(",") if given else []):
        key, equals, rest = value.partition("=")
        if equals:
            option = next((o for o in found if o.name == key.replace("-", "_")), None)
            if option is None:
                raise OptionError(f"{said} has no option {key!r}{_known(found)}")
            value = rest
        elif position < len(found):
            option = found[position]
        else:
            raise OptionError(f"{said} takes {len(found)} values at most{_known(found)}")
        if option.name in values:
            raise OptionError(f"{option.name} is given twice in '{name}:{given}'")
        values[option.name] = _value(said, option.name, annotated.get(option.name, str), value)
    missing = [o.name for o in found if o.default is o.empty and o.name not in values]
    if missing:
        raise OptionError(f"{said} needs {missing[0]}: write '{name}:{missing[0]}'")
    return factory(**values, **more)


def options(said: str, factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a string can set.

    Raises:
        OptionError: it has no signature.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise OptionError(f"{said} cannot be called ({error})") from error
    return [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def kinds(said: str, factory: Callable[..., Any]) -> dict[str, Any]:
    """What annotations say.

    Raises:
        OptionError: they name what is not there.
    """
    try:
        made: Any = factory.__init__ if inspect.isclass(factory) else factory
        return typing.get_type_hints(made)
    except Exception as error:
        line = first_line(error)
        raise OptionError(f"{said} has annotations that cannot be read ({line})") from error


def usage(name: str, factory: Callable[..., Any], said: str, left_out: Sequence[str] = ()) -> str:
    """A name with its options and what they are by default."""
    listed = ",".join(
        p.name.replace("_", "-") + ("" if p.default in (p.empty, None) else f"={p.default}")
        for p in options(said, factory)
        if p.name not in left_out
    )
    return f"{name}:{listed}" if listed else name


def _known(found: Sequence[inspect.Parameter]) -> str:
    return f": it has {', '.join(o.name.replace('_', '-') for o in found)}" if found else ""


def _value(said: str, option: str, kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        raise OptionError(f"{option} of {said} must be one of {', '.join(choices)}, not {text!r}")
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
    raise OptionError(f"{option} of {said} must be {what}, not {text!r}")
