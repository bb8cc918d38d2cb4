"""Stop strings in a stream: nothing is shown that may still turn out to be cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Releases text as soon as no stop string can begin in it any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text, get what may be shown; `found` is set once a stop string is complete."""
        if not self._stops:
            return text
        self._held += text
        hits = [(self._held.find(s), s) for s in self._stops if s in self._held]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._open_suffix()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def flush(self) -> str:
        """The text still held, at the end."""
        shown, self._held = self._held, ""
        return shown

    def _open_suffix(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            if any(s.startswith(self._held[-n:]) for s in self._stops):
                return n
        return 0
