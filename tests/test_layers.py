"""Imports point one way: types → sampling, trees → models → drafters, verifiers → engine → ..."""

from __future__ import annotations

import ast
from pathlib import Path

import outpace

ROOT = Path(outpace.__file__).parent
LAYERS = [
    {"errors"},
    {"types", "kernels", "named", "pictures"},
    {"sampling", "trees"},
    {"models"},
    {"drafters", "verifiers"},
    {"engine"},
    {"planner"},
    {"generator"},
    {"assembly"},
    {"training"},
    {"bench"},
    {"audit"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> list[tuple[str, str]]:
    """(importing part, imported part) of every relative import that runs, lazy ones included."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    found = []
    typing_only: set[ast.AST] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing_only.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in typing_only:
            package = parts[: len(parts) - node.level]
            target = (*package, *(node.module or "").split(".")) if node.module else package
            names = [target[0]] if target and target[0] else [a.name for a in node.names]
            found += [(parts[0], name) for name in names]
    return found


def _wrong(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in pairs if a != b and a in RANK and b in RANK and RANK[a] <= RANK[b]]


def test_imports_point_one_way():
    files = [p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem in RANK]
    assert len(files) > 30
    pairs = [pair for path in files for pair in _imports(path)]
    assert len(pairs) > 60
    assert _wrong(pairs) == []


def test_every_part_has_a_layer():
    parts = {p.relative_to(ROOT).with_suffix("").parts[0] for p in ROOT.rglob("*.py")}
    assert parts - {"__init__", "__main__"} <= set(RANK)


def test_a_wrong_import_is_found():
    assert _wrong([("models", "engine"), ("engine", "models"), ("drafters", "verifiers")]) == [
        ("models", "engine"),
        ("drafters", "verifiers"),
    ]
