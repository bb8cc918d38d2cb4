"""Verifiers, one file each, and the names they go by."""

from __future__ import annotations

import difflib

from ..errors import OptionError
from .base import Noise, Verdict, Verifier
from .follow import follow
from .greedy import GreedyVerifier
from .match import MatchVerifier
from .token import TokenVerifier

VERIFIERS: dict[str, type[Verifier]] = {
    "token": TokenVerifier,
    "match": MatchVerifier,
    "greedy": GreedyVerifier,
}


def make_verifier(name: str) -> Verifier:
    """The verifier of this name.

    Raises:
        OptionError: no verifier goes by it.
    """
    if name not in list(VERIFIERS):
        near = difflib.get_close_matches(str(name), VERIFIERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(VERIFIERS)}"
        raise OptionError(f"unknown verifier {name!r}: {hint}")
    return VERIFIERS[name]()


__all__ = [
    "VERIFIERS",
    "GreedyVerifier",
    "MatchVerifier",
    "Noise",
    "TokenVerifier",
    "Verdict",
    "Verifier",
    "follow",
    "make_verifier",
]
