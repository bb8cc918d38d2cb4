"""The C++ kernels: compiled on the machine they run on, once, and kept.

A library is named by a digest of everything it was made from: the sources, the
compiler and its version, its options, and the processor. So neither a changed
source nor a home directory that several machines share leads to a wrong one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from ..errors import CompilerError, first_line

SOURCES = Path(__file__).parent / "cpp"

_OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-ffp-contract=off",
    "-fvisibility=hidden",
)
_NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""For this processor, as compilers spell it; without it, for any."""


def cache_folder() -> Path:
    """Where libraries are kept: `OUTPACE_CACHE`, else `outpace` in the user's cache folder."""
    if given := os.environ.get("OUTPACE_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outpace"


_loaded: list[ctypes.CDLL] = []


def loaded_library() -> ctypes.CDLL | None:
    """The kernels, if this process has loaded them."""
    return _loaded[0] if _loaded else None


def load_library(
    sources: Path = SOURCES, waiting: Callable[[], None] = lambda: None
) -> ctypes.CDLL:
    """The compiled kernels; compiled now if they never were.

    Args:
        sources: a folder with `step.cpp` and what it includes.
        waiting: called before the compiler runs, which takes some ten seconds.

    Raises:
        CompilerError: there is no compiler, or it cannot compile them.
    """
    if sys.platform == "win32":
        raise CompilerError("the kernels are not made for Windows: use compile=False")
    compiler = _find_compiler()
    path = cache_folder() / f"kernels-{_digest(sources, compiler)}.so"
    library = None
    if path.is_file():
        with suppress(OSError):  # it was damaged, or made for a library that is gone
            library = _open(str(path))
    library = library or _compile(compiler, sources / "step.cpp", path, waiting)
    if sources == SOURCES:
        _loaded[:] = [library]
    return library


def _find_compiler() -> str:
    """`CXX`, else the first of c++, g++ and clang++ there is."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise CompilerError(
        f"there is no C++ compiler ({', '.join(names)}): install one, name it in CXX, or use "
        "compile=False"
    )


def _options() -> list[str]:
    """Ours, and behind them the user's `CXXFLAGS`."""
    return [*_OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def _digest(sources: Path, compiler: str) -> str:
    parts = [_version(compiler), _processor(), torch.__version__, *_options()]
    parts += [p.name + "\n" + p.read_text("utf-8") for p in sorted(sources.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(
            f"{compiler} does not run ({first_line(error)}): name another compiler in CXX, or "
            "use compile=False"
        ) from error
    return compiler + "\n" + done.stdout


@cache
def _processor() -> str:
    """What decides which instructions there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(platform.uname())
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@cache
def _open(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def _compile(compiler: str, source: Path, path: Path, waiting: Callable[[], None]) -> ctypes.CDLL:
    """Compile into the cache; who comes second waits and finds it there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        alone = FileLock(path.with_suffix(".lock"))
        with alone, tempfile.TemporaryDirectory(dir=path.parent) as at:
            if path.is_file():
                try:
                    return _open(str(path))
                except OSError:
                    path.unlink()
            waiting()
            made, said = Path(at) / path.name, ""
            for native in _NATIVE:
                options = [*native, *_options()]
                command = [compiler, *options, str(source), *_openmp(), "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode == 0:
                    os.replace(made, path)
                    return _open(str(path))
                said = said or done.stderr
    except OSError as error:
        raise CompilerError(
            f"the kernels cannot be compiled into {path.parent} ({first_line(error)}): name "
            "another folder in OUTPACE_CACHE, or use compile=False"
        ) from error
    errors = [line for line in said.splitlines() if "error" in line] or [said]
    raise CompilerError(
        f"{compiler} cannot compile the kernels ({errors[0].strip()}): install a compiler with "
        "C++20 and OpenMP, name it in CXX, or use compile=False"
    )


def _openmp() -> list[str]:
    """The OpenMP runtime that PyTorch brings: a second one would compete for its cores."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    return [str(path) for path in sorted(found)[:1]]
