"""Past outputs that later requests may draw on: shared, bounded, and kept on disk if asked.

On disk they are a header and the tokens one after the other, 4 bytes each, with a
separator behind every text. Each text is appended when it is complete, so that a
crash loses what runs at that moment and nothing else; a text that a torn write left
is cut off when the file is opened. At twice its capacity the file is written anew.
A file that cannot be written any more is given up with a warning. Processes that
keep theirs in one file take turns by a lock beside it, FILE.lock; each reads what
the others wrote when it starts.
"""

from __future__ import annotations

import os
import struct
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from ..errors import OptionError
from ..types import check_whole_number
from .occurrences import SEPARATOR, Occurrences

LENGTHS = (12, 6, 3, 1)
"""Of the runs that are indexed."""

_PATIENCE = 10
"""Seconds that another process may use the file for."""

_MOST = 2**30
"""Positions are numbers of 32 bits, and so many tokens take 36 GiB."""

_MAGIC = b"outpace-outputs1"
_HEADER = struct.Struct("<16sI")  # and the vocabulary that its tokens are of


class Memory:
    """The last outputs, and where runs of tokens stand in them.

    One memory may serve several engines in several threads: look at it within `reading`.

    Args:
        capacity: tokens; the oldest are forgotten.
        file: where they are kept, if anywhere.

    Attributes:
        past: the index of what is remembered.

    Raises:
        OptionError: no such capacity, or a file that is something else or cannot be used.
    """

    def __init__(self, capacity: int = 2**20, file: Path | None = None) -> None:
        check_whole_number("capacity", capacity, 1, "tokens of past outputs")
        if capacity > _MOST:
            raise OptionError(f"capacity must be at most 2^30 tokens, not {capacity}")
        self.past = Occurrences(LENGTHS, capacity)
        self._lock = threading.RLock()
        self._held = False
        self._new: deque[list[int]] = deque()  # that wait for the lock
        self._file = file = None if file is None else file.absolute()
        self._vocab_size: int | None = None
        if file is not None:
            self._check_file(file)

    def serve(self, vocab_size: int) -> None:
        """Called by every engine that will use it; the first reads the file.

        Raises:
            OptionError: it holds outputs of another vocabulary.
        """
        with self.reading():
            if self._vocab_size is None and self._file is not None:
                self._open(self._file, vocab_size)
            else:
                self.fits(vocab_size)
            self._vocab_size = vocab_size

    def add(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Remember the output of a request, and the end of the prompt that it answers."""
        if len(tokens) == prompt_length:
            return
        self._new.append([*tokens[max(0, prompt_length - LENGTHS[0]) :], SEPARATOR])
        with self._lock:
            if not self._held:  # else a garbage collector called while this thread holds it
                self._take_in()

    @contextmanager
    def reading(self) -> Iterator[Occurrences]:
        """The index of what is remembered, which nobody else reads or changes meanwhile."""
        with self._lock:
            self._held = True
            try:
                yield self.past
            finally:
                self._held = False
            self._take_in()

    def _take_in(self) -> None:
        """Add what waits, this thread holding the lock."""
        self._held = True
        try:
            while self._new:
                text = self._new.popleft()
                self.past.extend(text)
                self._keep(text)
        finally:
            self._held = False

    def _keep(self, text: Sequence[int]) -> None:
        if self._file is None or self._vocab_size is None:
            return
        try:
            with _turn(self._file):
                self._append(self._file, self._vocab_size, text)
        except OSError as error:
            warnings.warn(
                f"past outputs are no longer kept in {self._file} ({_why(error)})",
                RuntimeWarning,
                stacklevel=2,
            )
            self._file = None

    def forget(self) -> None:
        """Forget all that is held; a file keeps it."""
        with self.reading():
            self.past = Occurrences(LENGTHS, self.past.capacity)

    # --- on disk ----------------------------------------------------------------

    def fits(self, vocab_size: int) -> None:
        """Whether outputs of a vocabulary can be kept in it.

        Raises:
            OptionError: it holds outputs of another, or its file does.
        """
        if self._vocab_size not in (None, vocab_size):
            raise OptionError(
                f"this memory holds outputs of a vocabulary of {self._vocab_size} tokens, the "
                f"target has {vocab_size}: give every vocabulary a memory of its own"
            )
        held = None if self._file is None else self._check_file(self._file)
        if held is not None and held != vocab_size:
            raise OptionError(
                f"{self._file} holds outputs of a vocabulary of {held} tokens, the target has "
                f"{vocab_size}: give every target a file of its own"
            )

    def _check_file(self, file: Path) -> int | None:
        """The vocabulary of a file; None if there is none yet, and one can be made."""
        try:
            header = _begin(file) if file.exists() else b""
            for path in (file, Path(_lock_of(file))):
                place = next(p for p in (path, *path.parents) if p.exists())
                if not os.access(place, os.W_OK) or (place != path and not place.is_dir()):
                    raise OptionError(
                        f"past outputs cannot be kept in {file} ({place} is not to be written "
                        "to): check the path"
                    )
        except OSError as error:
            raise _useless(file, error) from error
        if not header:
            return None
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise OptionError(f"{file} is no file of past outputs: give another name")
        return int(_HEADER.unpack(header)[1])

    def _open(self, file: Path, vocab_size: int) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _turn(file):
                self.fits(vocab_size)  # only now does nobody else begin it
                self._read(file, vocab_size)
        except Timeout as error:
            raise OptionError(
                f"another process has used {file} for {_PATIENCE} s: let it finish, or give "
                "another name"
            ) from error
        except OSError as error:
            raise _useless(file, error) from error

    def _read(self, file: Path, vocab_size: int) -> None:
        if not file.exists() or not file.stat().st_size:
            file.write_bytes(_HEADER.pack(_MAGIC, vocab_size))
            return
        count = (file.stat().st_size - _HEADER.size) // 4
        tokens = np.fromfile(file, "<i4", count, offset=_HEADER.size)
        ends = np.flatnonzero(tokens == SEPARATOR)
        whole = tokens[: ends[-1] + 1 if len(ends) else 0]
        os.truncate(file, _HEADER.size + 4 * len(whole))
        kept = whole[-self.past.capacity :]
        self.past.extend(kept[(kept >= SEPARATOR) & (kept < vocab_size)].tolist())

    def _append(self, file: Path, vocab_size: int, text: Sequence[int]) -> None:
        with file.open("ab") as f:
            if f.tell() == 0:  # it has been removed
                f.write(_HEADER.pack(_MAGIC, vocab_size))
            f.write(np.asarray(text, "<i4").tobytes())
            size = f.tell()
        if size <= _HEADER.size + 8 * self.past.capacity:
            return
        aside = file.with_name(file.name + ".new")
        kept = np.fromfile(file, "<i4", offset=size - 4 * self.past.capacity)
        aside.write_bytes(_HEADER.pack(_MAGIC, vocab_size) + kept.tobytes())
        aside.replace(file)


def _turn(file: Path) -> FileLock:
    """While it is held, no other process reads the file or writes to it."""
    return FileLock(_lock_of(file), timeout=_PATIENCE)


def _lock_of(file: Path) -> str:
    return f"{file}.lock"


def _useless(file: Path, error: OSError) -> OptionError:
    return OptionError(f"past outputs cannot be kept in {file} ({_why(error)}): check the path")


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _begin(file: Path) -> bytes:
    with file.open("rb") as f:
        return f.read(_HEADER.size)
