"""Sequoia's trees for a target and a drafter, as both are and on the machine they are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine import Engine, Stats
from ..errors import OptionError
from ..models.loading import Progress
from ..models.tokenizer import Tokenizer
from ..trees import (
    Builder,
    Choice,
    Costs,
    SequoiaBuilder,
    StaticBuilder,
    choose,
    expected_tokens,
)
from ..types import SamplingParams, Tree
from .acceptance import Acceptance, measure_acceptance, model_drafter
from .costs import measure_costs

_AGAIN = 4
"""Times that rates are taken of rounds of a tree."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A tree for a temperature, and what it was chosen by.

    Attributes:
        choice: the tree; its tokens per round and its speedup over plain decoding by the
            rates. Where nothing beats plain decoding the tree is empty, unless a size was
            asked for.
        rates: `[depth][rank]` that it was chosen by.
        replayed: tokens per round of the same tree, replayed on the texts that were measured.
    """

    temperature: float
    choice: Choice
    rates: Sequence[Sequence[float]]
    costs: Costs
    acceptance: Acceptance
    replayed: float


def fit_tree(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    builder: SequoiaBuilder | None = None,
    temperatures: Sequence[float] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[Fit]:
    """Measure, and set the trees of the drafter's `SequoiaBuilder`.

    Args:
        engine: an idle one, whose drafter runs a model.
        prompts: token ids, of what will be generated or like it.
        tokens: of the texts that the target goes on with.
        builder: whose trees are wanted, by default the drafter's.
        temperatures: to measure at, by default 0 and the builder's own; the first and the
            last of them give its trees.

    Returns:
        One for each temperature.

    Raises:
        OptionError: the engine is busy, its drafter runs no model, or there is no prompt.
        IncompatibleError: the drafter takes no trees.
    """
    builder = builder or _sequoia(model_drafter(engine).builder)
    found = []
    for temperature in temperatures or (0.0, builder.temperature):
        given = engine, prompts, builder, temperature
        seen, costs = _measured(*given, tokens=tokens, tokenizer=tokenizer, progress=progress)
        found.append(fit(temperature, seen, costs, builder.nodes, builder.depth, builder.size))
    builder.trees = (found[0].choice.tree, found[-1].choice.tree)
    return found


def promise(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    builder: StaticBuilder,
    temperature: float,
    *,
    tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Fit:
    """What a given tree promises, by the same measurements.

    Raises:
        OptionError: the engine is busy, its drafter takes no trees, or there is no prompt.
    """
    given = engine, prompts, builder, temperature
    seen, costs = _measured(*given, tokens=tokens, tokenizer=tokenizer, progress=progress)
    tree, rates = builder.tree, seen.rates(builder.depth, builder.tree)
    expected = expected_tokens(tree, rates)
    speedup = expected * costs.target_seconds(1) / costs.round_seconds(tree)
    choice = Choice(tree, expected, speedup)
    return Fit(temperature, choice, rates, costs, seen, seen.expected_tokens(tree))


def _measured(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    builder: Builder,
    temperature: float,
    *,
    tokens: int,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> tuple[Acceptance, Costs]:
    how: dict[str, Any] = {"draw": builder.draw, "progress": progress}
    # Where no request samples, what sampling would cost does not matter.
    timed = temperature if engine.verifier.takes_sampling else 0.0
    stats, engine.stats = engine.stats, Stats()
    try:
        seen = measure_acceptance(
            engine, prompts, temperature=temperature, tokens=tokens, tokenizer=tokenizer, **how
        )
        longest = max(prompts, key=len)
        costs = measure_costs(engine, longest, temperature=timed, most_nodes=builder.nodes, **how)
    finally:
        engine.stats = stats
    return seen, costs


@torch.inference_mode()
def one_round(
    engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], Tree, list[int]]:
    """The first draft behind a prompt: its tokens, its tree, and the nodes that are accepted.

    Raises:
        OptionError: the engine is busy, or its drafter takes no trees.
    """
    model_drafter(engine)
    request = engine.submit(prompt, params)
    try:
        engine.admit()
        with engine.fixed(engine.k):  # else it may choose not to draft
            draft = engine.draft(engine.running)
            scores = engine.score(engine.running, draft)
            (emission,) = engine.verify(engine.running, draft, scores)
    finally:
        engine.cancel(request)
    tree = draft.trees[0]
    return draft.tokens[0, : len(tree)].tolist(), tree, emission.path


def fit(
    temperature: float,
    seen: Acceptance,
    costs: Costs,
    most_nodes: int,
    depth: int,
    nodes: int | None = None,
) -> Fit:
    """Choose a tree by what was measured.

    Rates depend on where rounds begin and what they have accepted, and that on the tree:
    they are taken of any position first, then of rounds of the tree that follows, again and
    again until that stays the same.

    Args:
        nodes: of the tree, None for as many as pay.
    """
    rates = seen.rates(depth)
    choice = choose(rates, costs, most_nodes, depth, nodes)
    for _ in range(_AGAIN):
        before = choice.tree
        rates = seen.rates(depth, before)
        choice = choose(rates, costs, most_nodes, depth, nodes)
        if choice.tree == before:
            break
    return Fit(temperature, choice, rates, costs, seen, seen.expected_tokens(choice.tree))


def _sequoia(builder: object) -> SequoiaBuilder:
    if not isinstance(builder, SequoiaBuilder):
        raise OptionError("the drafter has no Sequoia tree to fit: load it with tree='sequoia'")
    return builder
