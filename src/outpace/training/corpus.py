"""The corpus of the shipped pair: the source of the Python standard library.

The files are those of the interpreter that runs (licence: PSF). Whether a file
is held out depends on a hash of its relative path alone, so it is the same on
every machine. Python versions move files: the pair's card lists the paths that
were held out of its own training.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError

HELD_OUT_MODULUS = 25
"""One file in this many is held out (4 %)."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "data", "tokenizedata"}
_SKIPPED_PREFIXES = ("encodings/", "pydoc_data/", "lib2to3/tests/")
_MAX_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus: its path relative to the library and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Whether the file at this relative POSIX path is never trained on."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


def is_test(path: str) -> bool:
    """Whether the file belongs to a test suite (its prompts make dull demos)."""
    parts = path.split("/")
    return any(p in {"test", "tests", "idle_test"} for p in parts) or parts[-1].startswith("test_")


def standard_library(
    root: Path | None = None, held_out: bool | None = None
) -> Iterator[SourceFile]:
    """The standard library's Python files in sorted order.

    Args:
        held_out: True for the held-out files alone, False for the others, None for all.

    Left out: installed packages, character tables, generated documentation,
    files that are not valid UTF-8 or not valid Python of this interpreter.

    Raises:
        OptionError: the folder has no Python source (a stripped installation).
    """
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    found = False
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if _SKIPPED_FOLDERS & set(path.split("/")) or path.startswith(_SKIPPED_PREFIXES):
            continue
        if held_out is not None and is_held_out(path) is not held_out:
            continue
        if not 0 < file.stat().st_size <= _MAX_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in test files
                ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        found = True
        yield SourceFile(path, text)
    if not found:
        raise OptionError(
            f"no Python source found under {folder}: install the standard library's sources"
        )
