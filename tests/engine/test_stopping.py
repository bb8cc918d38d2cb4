"""Stop strings: cut where they begin, nothing shown that may be cut, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.engine.stopping import StopScanner

letters = st.text(alphabet="ab\n", max_size=12)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The slow twin: read character by character, cut at the first complete stop string."""
    for end in range(len(text) + 1):
        hits = [(text[:end].find(s), -len(s), s) for s in stops if s in text[:end]]
        if hits:
            at, _, found = min(hits)
            return text[:at], found
    return text, None


@given(st.lists(letters, max_size=8), st.lists(letters.filter(bool), max_size=3).map(tuple))
def test_any_pieces_of_text_equal_the_twin(pieces, stops):
    for parts in (pieces, list("".join(pieces))):
        scanner = StopScanner(stops)
        shown = ""
        for part in parts:
            shown += scanner.push(part)
            if scanner.found is not None:
                break
        else:
            shown += scanner.flush()
        if parts is not pieces:  # one character at a time, the first complete stop decides
            assert (shown, scanner.found) == cut("".join(pieces), stops)
        if scanner.found is None:
            assert shown == "".join(pieces)
        else:
            assert scanner.found in stops
            assert not any(s in shown for s in stops)


def test_text_that_may_become_a_stop_is_held_back():
    scanner = StopScanner(["\n\ndef"])
    assert scanner.push("x\n") == "x"
    assert scanner.push("\nd") == ""
    assert scanner.push("o") == "\n\ndo"
    assert scanner.push("\n\nde") == ""
    assert scanner.push("f y") == ""
    assert scanner.found == "\n\ndef"
