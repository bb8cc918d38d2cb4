"""Files that pictures are written to: whether they can be, and writing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import OptionError


def check_path(path: Path) -> None:
    """Whether a picture can be written there, as far as can be told before there is one.

    Raises:
        OptionError: matplotlib is missing or does not write such files, or there is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("a plot needs matplotlib: pip install 'outpace[audit]'") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise OptionError(
            f"cannot write {path.name}: a plot's suffix is one of {', '.join(formats)}"
        )
    if not path.absolute().parent.is_dir():
        raise OptionError(f"cannot write the plot to {path}: there is no such folder")


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; the suffix decides about the format.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise OptionError(f"cannot write the plot to {path} ({error}): check the path") from error
