"""Prompt lookup: what followed the last tokens where they stood before in the same text.

Saxena, "Prompt lookup decoding", 2023. The longest run of last tokens that
stands somewhere earlier decides, and its most recent place comes first.
Beyond that one continuation, others become branches of a tree. On a miss
nothing is proposed, and the round is a plain one.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import OptionError
from ..trees import merged
from ..types import Shape, Tree, check_whole_number
from .base import CertainDrafter, Context
from .occurrences import Occurrences

_PLACES = 32
"""Earlier places of a run that are looked at."""


class NgramDrafter(CertainDrafter):
    """Looks up what followed the last tokens earlier in the text.

    Args:
        longest: tokens of the run that is looked up first; then one less, and so on.
        branches: continuations, at most; 1 proposes chains.
    """

    name = "ngram"
    k = 5

    def __init__(self, longest: int = 3, branches: int = 1) -> None:
        check_whole_number("longest", longest, 1, "tokens of a run")
        check_whole_number("branches", branches, 1, "1 proposes chains")
        for name, value, most in (("longest", longest, 16), ("branches", branches, _PLACES)):
            if value > most:
                raise OptionError(f"{name} must be at most {most}, not {value}")
        self.proposes = Shape.TREE if branches > 1 else Shape.CHAIN
        self._lengths, self._branches = range(longest, 0, -1), branches
        self._texts: dict[int, Occurrences] = {}

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        self._texts[context.slot] = text = Occurrences(self._lengths)
        text.extend(context.tokens)

    def close(self, slot: int) -> None:
        del self._texts[slot]

    def propose(self, context: Context, budget: int) -> tuple[list[int], Tree]:
        text = self._texts[context.slot]
        text.extend(context.tokens[text.count :])
        found: list[list[int]] = []
        for length in self._lengths if budget else ():
            for at in text.behind(length, _PLACES):
                if text.matched(at, context.tokens, length) < length:
                    continue
                tokens = text.continuation(at, budget)
                if not any(tokens == other[: len(tokens)] for other in found):
                    found.append(tokens)
                if len(found) == self._branches:
                    return merged(found)
            if found:
                break
        return merged(found)
