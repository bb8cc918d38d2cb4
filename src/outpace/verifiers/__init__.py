"""Verifiers, one file each, and the names they go by."""

from __future__ import annotations

import difflib

from ..errors import OptionError
from .base import Noise, Verdict, Verifier
from .block import BlockVerifier
from .coupled import CoupledVerifier
from .follow import follow
from .greedy import GreedyVerifier
from .kseq import KSeqVerifier
from .match import MatchVerifier
from .multipath import MultiPathVerifier
from .token import TokenVerifier
from .traversal import TraversalVerifier
from .typical import TypicalVerifier

VERIFIERS: dict[str, type[Verifier]] = {
    "token": TokenVerifier,
    "block": BlockVerifier,
    "kseq": KSeqVerifier,
    "traversal": TraversalVerifier,
    "multipath": MultiPathVerifier,
    "match": MatchVerifier,
    "coupled": CoupledVerifier,
    "greedy": GreedyVerifier,
    "typical": TypicalVerifier,
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
    "BlockVerifier",
    "CoupledVerifier",
    "GreedyVerifier",
    "KSeqVerifier",
    "MatchVerifier",
    "MultiPathVerifier",
    "Noise",
    "TokenVerifier",
    "TraversalVerifier",
    "TypicalVerifier",
    "Verdict",
    "Verifier",
    "follow",
    "make_verifier",
]
