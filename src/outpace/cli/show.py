"""Tokens on a terminal: coloured by provenance, with a line of statistics below."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..types import Provenance, TokenEvent

STYLES: dict[Provenance, str] = {
    "draft": "green",
    "correction": "red",
    "bonus": "cyan",
    "plain": "",
}


def legend() -> Text:
    """What the colours mean."""
    text = Text("draft accepted", style=STYLES["draft"])
    text.append(" · ").append("correction", style=STYLES["correction"])
    return text.append(" · ").append("bonus", style=STYLES["bonus"])


_KINDS = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, line and paragraph separators
_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # of writing direction


def harmless(text: str) -> str:
    """The text without characters by which a model could command the terminal."""
    return "".join(
        "\ufffd" if c not in "\n\t" and (unicodedata.category(c) in _KINDS or c in _TURNS) else c
        for c in text
    )


class TokenView:
    """Prints whole lines for good and keeps the open line and the statistics moving."""

    def __init__(self, console: Console, status: Callable[[], str], prompt: str) -> None:
        self._console = console
        self._status = status
        self._line = Text()
        self._append(prompt, "dim")
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def __enter__(self) -> TokenView:
        self._live.__enter__()
        self._flush()
        return self

    def add(self, event: TokenEvent) -> None:
        self._append(event.text, STYLES[event.provenance])
        self._flush()

    def __exit__(self, *details: object) -> None:
        self._live.update(Text())
        self._live.__exit__(None, None, None)
        self._console.print(self._line, soft_wrap=True)

    def _append(self, text: str, style: str) -> None:
        self._line.append(harmless(text), style=style)

    def _flush(self) -> None:
        *whole, self._line = self._line.split("\n", allow_blank=True)
        for line in whole:
            self._console.print(line, soft_wrap=True)
        status = Text(self._status(), style="dim")
        self._live.update(Group(self._line, Text("· ").append(legend()), status))
