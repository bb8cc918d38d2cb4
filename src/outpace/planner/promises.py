"""What texts that were run promise in time: their rounds, at measured costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .drafting import Added
from .machine import Machine
from .prices import Price, break_even, break_even_any
from .survey import Survey, Text


def tokens_of(texts: Sequence[Text]) -> float:
    """Per round. A round that stops at a near tie may emit none: they are counted, too."""
    return sum(text.emitted for text in texts) / sum(text.rounds for text in texts)


def speedup_of(
    machine: Machine, survey: Survey, k: int, batch: int
) -> Callable[[Sequence[Text]], float]:
    """From texts that were run with a K to their speedup in a full batch."""
    rest = machine.rounds(survey.temperature)
    plain = rest(1, batch)

    def figure(texts: Sequence[Text]) -> float:
        lengths = Counter(p.k for text in texts for p in text.played)
        nodes = Counter[int]()
        for text in texts:
            for p in text.played:
                nodes[p.k] += p.nodes
        seconds = 0.0
        for length, chance in longest_of(lengths, batch).items():
            rows = 1 + nodes[length] / lengths[length]
            seconds += chance * (rest(rows, batch) + survey.added(length, batch))
        return tokens_of(texts) * plain / seconds

    return figure


def longest_of(lengths: Mapping[int, int], batch: int) -> dict[int, float]:
    """The chance of each length to be the longest of so many drafts.

    Args:
        lengths: how often each occurred.
    """
    total, below, found = sum(lengths.values()), 0, dict[int, float]()
    for length in sorted(lengths):
        upto = below + lengths[length]
        found[length] = (upto / total) ** batch - (below / total) ** batch
        below = upto
    return found


def price_of(machine: Machine, survey: Survey, batch: int) -> Price:
    """From K to the price of a round with a draft of that length, in plain rounds."""
    rest = machine.rounds(survey.temperature)
    plain = rest(1, batch)
    wide = len(survey.tree) / survey.longest if survey.tree is not None else 1.0
    return lambda k: (rest(1 + wide * k, batch) + survey.added(k, batch)) / plain if k else 1.0


def break_even_of(machine: Machine, survey: Survey, batch: int) -> tuple[int, float] | None:
    """The K that pays from the smallest α on if all rounds draft, and that α."""
    price = price_of(machine, survey, batch)
    if survey.tree is None:
        return break_even_any(price, survey.longest)
    alpha = break_even(price, survey.longest)
    return None if alpha is None else (survey.longest, alpha)


def ceiling(machine: Machine, surveys: Sequence[Survey], batch: int) -> float:
    """The most that these texts would give if drafting took no time; 1 is plain decoding."""
    found = [1.0]
    for survey in surveys:
        free = replace(survey, added=Added({(0, 1): 0.0}))
        found += [speedup_of(machine, free, k, batch)(survey.texts(k)) for k in survey.ks]
    return max(found)
