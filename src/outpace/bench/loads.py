"""Four kinds of prompts on which drafters differ, all made from held-out files alone.

"function" completes a function, "edit" rewrites one with a name renamed, "data"
goes on with a table of records, "free" goes on with a file from any line of it.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from ..errors import OptionError
from .prompts import held_out_prompts, spread

LOADS: tuple[str, ...] = ("function", "edit", "data", "free")

_PIECE = (160, 300)  # characters of a function to rewrite
_NEW_NAMES = ("item", "value", "other", "first", "second", "result", "thing")
_ROWS = 10
_TABLE = 1200  # characters at most
_WINDOW = (350, 700)  # characters of free text
_FEWEST_LINES = 40  # of a file whose middle is shown
_HEADER = re.compile(r"\s*(async def|def|class)\b|\s*@")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def load_prompts(load: str, count: int) -> list[str]:
    """The first `count` prompts of a load, library files first; the same ones each time.

    Raises:
        OptionError: an unknown load, with the nearest known one, or too few prompts.
    """
    if load not in LOADS:
        near = difflib.get_close_matches(load, LOADS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(LOADS)}"
        raise OptionError(f"unknown load {load!r}: {hint}")
    if load == "function":
        return held_out_prompts(count)
    found = list(dict.fromkeys(spread({"edit": _edits, "data": _tables, "free": _cuts}[load])))
    if len(found) < count:
        raise OptionError(
            f"the held-out files have {len(found)} prompts of load {load!r}, {count} were asked for"
        )
    return found[:count]


def _functions(text: str) -> list[_Function]:
    """Functions and methods in the order of the file."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, _Function)]
    return sorted(found, key=lambda n: n.lineno)


def _edits(text: str) -> Iterator[str]:
    """A short function, a comment that renames a name, and the first lines with it renamed.

    Short, because the shipped target hardly repeats what is further up.
    """
    lines = [line + "\n" for line in text.split("\n")]  # as ast counts them
    for node in _functions(text):
        piece = "".join(lines[node.lineno - 1 : node.end_lineno])
        if not _PIECE[0] <= len(piece) <= _PIECE[1]:
            continue
        begun = max(3, node.body[0].lineno - node.lineno)
        old = _name_to_rename(node, piece.splitlines(keepends=True), begun)
        new = next((n for n in _NEW_NAMES if not _uses(n, piece)), None)
        if old is None or new is None:
            continue
        renamed = re.sub(rf"\b{old}\b", new, piece).splitlines(keepends=True)
        indent = " " * node.col_offset
        head = "".join(renamed[:begun]).rstrip()
        yield f"{piece}\n{indent}# {old} renamed to {new}\n{head}"


def _name_to_rename(node: _Function, lines: list[str], begun: int) -> str | None:
    """The function's own name that is used most behind the first lines and stands in them, too.

    Used at least twice there, and nowhere as another thing's name: an
    attribute, a keyword, a word of a string or a comment.
    """
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    parameters = [n.arg for n in ast.walk(node) if isinstance(n, ast.arg)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}.union(parameters)
    every = [n.id for n in names] + parameters
    head, rest = "".join(lines[:begun]), "".join(lines[begun:])
    fit = [
        name
        for name in sorted(own - {"self", "cls"})
        if _uses(name, head) and _uses(name, head + rest) == every.count(name)
    ]
    best = max(fit, key=lambda name: _uses(name, rest), default=None)
    return best if best is not None and _uses(best, rest) >= 2 else None


def _uses(name: str, text: str) -> int:
    return len(re.findall(rf"\b{name}\b", text))


def _tables(text: str) -> Iterator[str]:
    """Ten functions of a file by name, parameters and number of lines, and the next row's begin."""
    nodes = _functions(text)
    for first in range(0, len(nodes) - _ROWS, _ROWS):
        rows = [_row(node) for node in nodes[first : first + _ROWS]]
        table = "\n".join(["FUNCTIONS = [", *rows, "    ("])
        if len(table) <= _TABLE:
            yield table


def _row(node: _Function) -> str:
    assert node.end_lineno is not None
    parameters = ", ".join(a.arg for a in node.args.args)
    return f"    {(node.name, parameters, node.end_lineno - node.lineno + 1)},"


def _cuts(text: str) -> Iterator[str]:
    """Text up to a line within a body, a literal or a comment, three times in the file's middle."""
    lines = text.rstrip().split("\n")
    if len(lines) < _FEWEST_LINES:
        return
    for fifth in (2, 3, 4):
        cut = next((i for i in range(len(lines) * fifth // 5, len(lines)) if _open(lines, i)), None)
        if cut is None:
            continue
        window = "\n".join(lines[:cut])[-_WINDOW[1] :].split("\n", 1)[-1].rstrip()
        if len(window) >= _WINDOW[0] and _varied(window):
            yield window


def _open(lines: list[str], i: int) -> bool:
    """Whether text can be cut before this line: nothing begins or ends there."""
    return all(line.strip() and not _HEADER.match(line) for line in lines[i - 1 : i + 1])


def _varied(text: str) -> bool:
    """Whether hardly any line is there twice."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return len(set(lines)) >= 0.9 * len(lines)
