"""From a target, drafters and prompts to a plan: everything is run, one drafter after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..drafters import Blueprint, Drafter, ModelDrafter
from ..engine import Engine
from ..engine.checks import check_compatible
from ..errors import ContextLengthError, IncompatibleError, OptionError
from ..models.base import LanguageModel
from ..models.loading import Progress
from ..models.tokenizer import Tokenizer
from ..trees import StaticBuilder
from ..types import Rows, Shape, check_whole_number
from ..verifiers import make_verifier
from .acceptance import measure_acceptance, swapped
from .costs import measure_costs
from .drafting import DRAFT_KS, measure_drafting
from .machine import SECONDS, Machine, measure_machine
from .plan import MARGIN, Plan, best_option, plan
from .rounds import REPEATS, TOKENS, read_seconds
from .survey import LONGEST, Survey, Text, run_texts
from .trees import fit

SLOTS = 8
"""Prompts that are run at once."""

_AGAIN = 3
"""Times that a K which promises most is run, until it is one that was."""

_NODES, _DEPTH = 32, 8
"""Of a tree, at most."""

ROOM = 320
"""Positions behind a prompt that timing takes, where the model has them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured.

    Attributes:
        prompts: token ids.
        temperatures, batches: for which there is to be a plan.
        tokens: that each prompt is continued by.
        trees: whether drafters that run a model are tried with trees, too.
        seconds: roughly, for timing passes, and for timing each drafter.
        repeats: rounds of each kind that are timed.
    """

    prompts: Sequence[Sequence[int]]
    temperatures: Sequence[float] = (0.0, 0.8)
    batches: Sequence[int] = (1,)
    tokens: int = TOKENS
    trees: bool = True
    seconds: float = SECONDS
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise OptionError("there is no prompt to measure on: give one at least")
        if not self.temperatures or not self.batches:
            raise OptionError("give a temperature and a batch to plan for")
        check_whole_number("tokens", self.tokens, 8, "tokens behind each prompt")

    @property
    def typical(self) -> Sequence[int]:
        """The prompt of middle length."""
        return sorted(self.prompts, key=len)[len(self.prompts) // 2]

    def max_len(self, target: LanguageModel) -> int:
        """Positions that are needed per sequence."""
        room = max(ROOM, self.tokens + LONGEST + 2)
        return min(target.context_length, max(map(len, self.prompts)) + room)


def measure(
    target: LanguageModel,
    drafters: Mapping[str, Blueprint],
    wanted: Wanted,
    *,
    tokenizer: Tokenizer | None = None,
    machine: Machine | None = None,
    margin: float = MARGIN,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Measure the machine and every drafter on the prompts, and plan.

    Args:
        drafters: checked for this target, by name; each is built, run and dropped in turn.
        machine: as it was measured before, with these temperatures and batches.

    Raises:
        OutpaceError: a drafter cannot be built, or nothing fits the context.
    """
    if not drafters:
        raise OptionError("there is no drafter to measure: give one at least")
    max_len = wanted.max_len(target)
    if machine is None:
        machine = measure_machine(
            target,
            wanted.typical,
            temperatures=wanted.temperatures,
            asked=wanted.batches,
            max_len=max_len,
            tokens=wanted.tokens,
            tokenizer=tokenizer,
            repeats=wanted.repeats,
            seconds=wanted.seconds,
            progress=progress,
        )
    surveys: list[Survey] = []
    slots = max(SLOTS, *wanted.batches)
    for name, blueprint in drafters.items():
        drafter = blueprint.build(target, progress)
        engine = Engine(target, drafter, None, None, slots, max_len)
        surveys += Surveying(name, engine, machine, wanted, tokenizer, progress).all()
        del drafter, engine  # its weights, before the next one's are read
    return plan(machine, surveys, wanted.batches, margin=margin)


class Surveying:
    """One drafter's surveys.

    Args:
        engine: an idle one with it, and slots for every batch.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        machine: Machine,
        wanted: Wanted,
        tokenizer: Tokenizer | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        assert engine.drafter is not None
        self._name, self._engine, self._machine = name, engine, machine
        self._wanted, self._tokenizer, self._progress = wanted, tokenizer, progress
        self._drafter: Drafter = engine.drafter

    def all(self) -> list[Survey]:
        """Of every temperature and rule, and a tree where it is one that beats the chain."""
        found = []
        for temperature in self._wanted.temperatures:
            chains = [self._of(temperature, rule) for rule in rules_for(self._drafter, temperature)]
            found += chains
            if self._wanted.trees and (tree := self._tree(temperature, chains)) is not None:
                found.append(tree)
        return found

    def _of(self, temperature: float, rule: str) -> Survey:
        """Chains, or what the drafter proposes by itself."""
        longest = max(1, min(self._drafter.most, LONGEST, self._wanted.tokens - 1))
        ks = [k for k in DRAFT_KS if k < longest] + [longest]
        survey = self.survey(temperature, rule, ks)
        for _ in range(_AGAIN):
            best = {best_option(self._machine, survey, b).k for b in self._wanted.batches}
            missing = best - survey.counted.keys()
            if not missing:
                break
            runs = {k: self.texts(k, temperature, rule) for k in missing}
            survey = replace(survey, counted={**survey.counted, **runs}, _replayed={})
        return survey

    def _tree(self, temperature: float, chains: Sequence[Survey]) -> Survey | None:
        """Sequoia's tree, run as chains are; None where it is none, or no better."""
        drafter = self._drafter
        if not isinstance(drafter, ModelDrafter) or drafter.builder is not None:
            return None
        most = self._best(chains)
        if most <= 1:
            return None
        try:
            builder = self._fitted(drafter, temperature)
        except (IncompatibleError, ContextLengthError):
            return None  # it takes none, or has no room for one
        if builder is None:
            return None
        rule = "traversal"
        with swapped(self._engine, drafter, builder, make_verifier(rule)):
            survey = self.survey(temperature, rule, [builder.depth])
        name = f"sequoia:{len(builder.tree)}"
        survey = replace(survey, tree=builder.tree, tree_name=name)
        return survey if self._best([survey]) > most else None

    def _best(self, surveys: Sequence[Survey]) -> float:
        """What they promise for one of the batches."""
        asked = self._wanted.batches
        return max(best_option(self._machine, s, b).speedup for s in surveys for b in asked)

    def _fitted(self, drafter: ModelDrafter, temperature: float) -> StaticBuilder | None:
        """The tree that measured rates and costs promise most of, if it is no chain."""
        engine, wanted = self._engine, self._wanted
        how: dict[str, Any] = {"temperature": temperature, "draw": "without"}
        how |= {"progress": self._progress}
        given: dict[str, Any] = {"tokens": wanted.tokens, "tokenizer": self._tokenizer}
        seen = measure_acceptance(engine, wanted.prompts, **given, **how)
        costs = measure_costs(engine, wanted.typical, most_nodes=_NODES, **how)
        tree = fit(temperature, seen, costs, _NODES, min(_DEPTH, drafter.most)).choice.tree
        return None if tree.is_chain else StaticBuilder(tree, "without")

    def survey(self, temperature: float, rule: str, ks: Sequence[int]) -> Survey:
        """With the longest K, and what all of them cost."""
        engine, wanted, timing = self._engine, self._wanted, f"timing {self._name}"
        self._progress(timing, 0, 1)
        added = measure_drafting(
            engine,
            self._machine,
            wanted.typical,
            ks,
            batches=wanted.batches,
            tokens=wanted.tokens,
            temperature=temperature,
            rule=make_verifier(rule),
            tokenizer=self._tokenizer,
            repeats=wanted.repeats,
            seconds=wanted.seconds,
        )
        self._progress(timing, 1, 1)
        return Survey(
            drafter=self._name,
            temperature=temperature,
            rule=rule,
            counted={ks[-1]: self.texts(ks[-1], temperature, rule)},
            added=added,
            reading=read_seconds(engine, wanted.typical),
        )

    def texts(self, k: int, temperature: float, rule: str) -> list[Text]:
        """The prompts, run with a K."""
        return run_texts(
            self._engine,
            self._wanted.prompts,
            k,
            temperature=temperature,
            rule=make_verifier(rule),
            tokens=self._wanted.tokens,
            what=f"{self._name}, T={temperature:g}, {rule}",
            progress=self._progress,
        )


def rules_for(drafter: Drafter, temperature: float) -> tuple[str, ...]:
    """Rules that are worth comparing; the drafter's own comes first.

    At temperature 0 all of them are the greedy one. Tokens that were not drawn pass as often by
    one rule as by any.
    """
    if not temperature or Rows not in drafter.laws or drafter.proposes > Shape.CHAIN:
        return (drafter.rule,)
    found = [drafter.rule]
    for rule in ("block", "coupled"):
        try:
            check_compatible(drafter, make_verifier(rule))
        except IncompatibleError:
            continue
        found += [rule] if rule not in found else []
    return tuple(found)
