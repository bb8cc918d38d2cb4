"""Which drafter, how far, in what shape and by which rule: from measured times and texts.

The speedup over plain decoding is tokens per round ÷ price (see `formulas` and `prices`), while a
batch is full and without the reading of prompts. Tokens are of the texts as they were run with
that K, or replayed from a longer one (`survey`); times are the rounds' own (`machine`). What is
recommended is what promises most, and plain decoding where nothing promises `MARGIN` more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..types import check_whole_number
from .alphas import alpha_for
from .intervals import interval
from .machine import Machine
from .promises import break_even_of, ceiling, speedup_of, tokens_of
from .survey import Survey, drafted_share

MARGIN = 0.05
"""By which drafting must promise to beat plain decoding."""


@dataclass(frozen=True, slots=True)
class Option:
    """A drafter by one rule with one K, for a batch.

    Attributes:
        tokens: per round.
        price: of a round, in plain rounds.
        cost: c, a draft step ÷ a plain pass.
        alpha: the chance at which every token alike would give as many.
        drafted: share of rounds in which something was proposed.
        speedup: tokens ÷ price, over plain decoding.
        low, high: the 95 % interval for prompts like these; None of a single prompt.
        counted: whether this K was run, and not replayed.
    """

    drafter: str
    rule: str
    temperature: float
    batch: int
    k: int
    tree: str | None
    tokens: float
    price: float
    cost: float
    alpha: float
    drafted: float
    speedup: float
    low: float | None
    high: float | None
    counted: bool

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "drafter": self.drafter,
            "k": self.k,
            "tree": self.tree,
            "verifier": self.rule,
            "speedup": self.speedup,
            "low": self.low,
            "high": self.high,
            "tokens_per_round": self.tokens,
            "price": self.price,
            "c": self.cost,
            "alpha": self.alpha,
            "rounds_with_a_draft": self.drafted,
            "measured": self.counted,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do at a temperature with so many sequences at once.

    Attributes:
        best: None is plain decoding.
        options: every survey's best K, the most promising first.
        break_even: for each of them a K and the α from which on it would pay, each token
            alike; None where no α would do.
    """

    temperature: float
    batch: int
    best: Option | None
    options: tuple[Option, ...]
    break_even: tuple[tuple[int, float] | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        pays = [None if at is None else {"k": at[0], "alpha": at[1]} for at in self.break_even]
        each = zip(self.options, pays, strict=True)
        return {
            "temperature": self.temperature,
            "batch": self.batch,
            "speculate": self.best is not None,
            "best": None if self.best is None else self.best.to_dict(),
            "options": [option.to_dict() | {"break_even": at} for option, at in each],
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What was measured, and what to do.

    Attributes:
        advices: by temperature, then by batch.
        ceilings: by temperature and batch: what the most that was accepted here would give if
            drafting took no time.
        margin: by which drafting must promise to beat plain decoding.
    """

    machine: Machine
    surveys: tuple[Survey, ...]
    advices: tuple[Advice, ...]
    ceilings: Mapping[float, Mapping[int, float]]
    margin: float = MARGIN

    def survey_of(self, option: Option) -> Survey:
        """What an option is taken from."""
        return next(survey for survey in self.surveys if _fits(survey, option))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "machine": self.machine.to_dict(),
            "surveys": [survey.to_dict() for survey in self.surveys],
            "plans": [advice.to_dict() for advice in self.advices],
            "ceilings": [
                {"temperature": temperature, "batch": batch, "speedup": value}
                for temperature, by_batch in self.ceilings.items()
                for batch, value in by_batch.items()
            ],
        }


def plan(
    machine: Machine,
    surveys: Sequence[Survey],
    batches: Sequence[int] = (1,),
    *,
    margin: float = MARGIN,
    level: float = 0.95,
) -> Plan:
    """The best for each temperature that was surveyed, and each batch.

    Args:
        margin: by which drafting must promise to beat plain decoding.
        level: of the intervals.

    Raises:
        OptionError: nothing was surveyed, or a batch cannot be.
    """
    if not surveys:
        raise OptionError("nothing was surveyed: give a drafter that can draft for this target")
    for batch in batches:
        check_whole_number("batch", batch, 1, "sequences in it")
    temperatures = list(dict.fromkeys(survey.temperature for survey in surveys))
    advices = []
    ceilings: dict[float, dict[int, float]] = {}
    for temperature in temperatures:
        mine = [survey for survey in surveys if survey.temperature == temperature]
        for batch in batches:
            found = [(best_option(machine, s, batch, level), s) for s in mine]
            found.sort(key=lambda pair: -pair[0].speedup)
            options = tuple(option for option, _ in found)
            best = options[0] if options[0].speedup >= 1 + margin else None
            pays = tuple(break_even_of(machine, survey, batch) for _, survey in found)
            advices.append(Advice(temperature, batch, best, options, pays))
        ceilings[temperature] = {b: ceiling(machine, mine, b) for b in machine.batches}
    return Plan(machine, tuple(surveys), tuple(advices), ceilings, margin)


def best_option(machine: Machine, survey: Survey, batch: int, level: float = 0.95) -> Option:
    """Of the K from 1 on the one that promises most; of equals the shortest."""
    k = max(survey.ks, key=lambda k: speedup_of(machine, survey, k, batch)(survey.texts(k)))
    return option_of(machine, survey, k, batch, level)


def option_of(machine: Machine, survey: Survey, k: int, batch: int, level: float = 0.95) -> Option:
    """What a K promises.

    Raises:
        OptionError: nothing is known of it.
    """
    texts, figure = survey.texts(k), speedup_of(machine, survey, k, batch)
    value, low, high = figure(texts), None, None
    if len(texts) > 1:
        _, low, high = interval(texts, figure, level=level)
        low = max(low, 0.0)
    tokens = tokens_of(texts)
    return Option(
        drafter=survey.drafter,
        rule=survey.rule,
        temperature=survey.temperature,
        batch=batch,
        k=k,
        tree=survey.tree_name,
        tokens=tokens,
        price=tokens / value,
        cost=survey.added.step(batch) / machine.passes(1, batch),
        alpha=alpha_for(min(max(tokens, 1.0), k + 1.0), k),
        drafted=drafted_share(texts),
        speedup=value,
        low=low,
        high=high,
        counted=k in survey.counted,
    )


def _fits(survey: Survey, option: Option) -> bool:
    return (survey.drafter, survey.rule, survey.temperature, survey.tree_name) == (
        option.drafter,
        option.rule,
        option.temperature,
        option.tree,
    )
