"""Sequoia's trees for a target and a drafter, as both are and on the machine they are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine import Engine
from ..errors import OptionError
from ..models.tokenizer import Tokenizer
from ..trees import Choice, Costs, SequoiaBuilder, choose
from .acceptance import Acceptance, Progress, measure_acceptance, model_drafter
from .costs import measure_costs


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
    progress: Progress = lambda what, done, total: None,
) -> tuple[Fit, Fit]:
    """Measure, and set the trees of the drafter's `SequoiaBuilder`.

    Args:
        engine: an idle one, whose drafter runs a model.
        prompts: token ids, of what will be generated or like it.
        tokens: of the texts that the target goes on with.
        builder: whose trees are wanted, by default the drafter's.

    Returns:
        At temperature 0, and above.

    Raises:
        OptionError: the engine is busy, its drafter takes no trees, or there is no prompt.
    """
    drafter = model_drafter(engine)
    builder = builder or _sequoia(drafter.builder)
    found = []
    for temperature in (0.0, builder.temperature):
        seen = measure_acceptance(
            engine,
            prompts,
            temperature,
            builder.draw,
            tokens=tokens,
            tokenizer=tokenizer,
            progress=progress,
        )
        longest = max(prompts, key=len)
        costs = measure_costs(
            engine,
            longest,
            builder.draw,
            temperature=temperature,
            most_nodes=builder.nodes,
            progress=progress,
        )
        found.append(fit(temperature, seen, costs, builder.nodes, builder.depth, builder.size))
    builder.trees = (found[0].choice.tree, found[1].choice.tree)
    return found[0], found[1]


def fit(
    temperature: float,
    seen: Acceptance,
    costs: Costs,
    most_nodes: int,
    depth: int,
    nodes: int | None = None,
) -> Fit:
    """Choose a tree by what was measured.

    Rates depend on where rounds begin, and that on the tree: they are taken of any
    position first, then of where rounds of the tree that follows begin.

    Args:
        nodes: of the tree, None for as many as pay.
    """
    rates = seen.rates(depth)
    choice = choose(rates, costs, most_nodes, depth, nodes)
    rates = seen.rates(depth, choice.tree)
    choice = choose(rates, costs, most_nodes, depth, nodes)
    return Fit(temperature, choice, rates, costs, seen, seen.expected_tokens(choice.tree))


def _sequoia(builder: object) -> SequoiaBuilder:
    if not isinstance(builder, SequoiaBuilder):
        raise OptionError("the drafter has no Sequoia tree to fit: load it with tree='sequoia'")
    return builder
