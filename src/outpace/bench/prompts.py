"""Prompts that the shipped pair was never trained on: functions from held-out files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from ..errors import OptionError
from ..training.corpus import is_test, standard_library

_MOST_CHARACTERS = 700


def held_out_prompts(count: int) -> list[str]:
    """Up to four functions of each held-out file, library files first: text up to the body.

    A prompt begins at a line some hundred characters before the function's
    `def` and ends behind its docstring (or its signature), where the body
    would begin.
    """
    found = spread(_prompts)
    if len(found) < count:
        raise OptionError(f"the held-out files have {len(found)} prompts, {count} were asked for")
    return found[:count]


def spread(prompts_of: Callable[[str], Iterable[str]]) -> list[str]:
    """Up to four prompts of each held-out file's text, library files first: the first of every
    file, then the second, and so on."""
    files = list(standard_library(held_out=True))
    files.sort(key=lambda f: (is_test(f.path), f.path))
    rounds: list[list[str]] = [[], [], [], []]
    for file in files:
        for of_round, prompt in zip(rounds, prompts_of(file.text), strict=False):
            of_round.append(prompt)
    return [p for r in rounds for p in r]


def _prompts(text: str) -> list[str]:
    """Prompts of one file, spread over it."""
    lines = [line + "\n" for line in text.split("\n")]  # as ast counts them
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        if node.end_lineno - node.lineno < 5 or node.lineno < 12:
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body:
            continue
        head = "".join(lines[: body[0].lineno - 1])
        signature = len(head) - len("".join(lines[: node.lineno - 1]))
        if signature > _MOST_CHARACTERS // 2:
            continue
        start = max(0, len(head) - _MOST_CHARACTERS)
        start = head.find("\n", start) + 1 if start else 0
        # Behind a newline the next token would begin with it; leave it to the model.
        found.append(head[start:].rstrip())
    step = max(1, len(found) // 4)
    return [p for p in found[::step] if p]
