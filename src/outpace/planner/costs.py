"""What the passes of a round cost on this machine, by rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ..drafters.base import Commit
from ..engine import Engine, nothing
from ..engine.clock import Clock
from ..models.loading import Progress
from ..sampling import law_device
from ..trees import Costs, StaticBuilder, chain, from_ranks, paths_tree
from ..types import Draft, Draw, SamplingParams
from .acceptance import model_drafter, swapped

_REPEATS = 7
_STEPS = 4
"""Of the chain that is timed."""

DRAFT_ROWS = (1, 2, 4, 8, 16)
TARGET_ROWS = (2, 3, 5, 9, 17, 33, 65)


@torch.inference_mode()
def measure_costs(
    engine: Engine,
    prompt: Sequence[int],
    *,
    temperature: float,
    draw: Draw,
    most_nodes: int = 64,
    repeats: int = _REPEATS,
    progress: Progress = lambda what, done, total: None,
) -> Costs:
    """Time the levels of a draft and the target's pass, for one sequence behind a prompt.

    A level's time has in it what is drawn behind its rows, and the target's the verdict.
    Both are medians.

    Args:
        engine: an idle one, whose drafter runs a model.
        most_nodes: of a draft, that will be asked for.

    Raises:
        OptionError: the engine is busy, or its drafter takes no trees.
    """
    drafter = model_drafter(engine)
    draft_rows = [rows for rows in DRAFT_ROWS if rows == 1 or 2 * rows <= most_nodes]
    target_rows = [rows for rows in TARGET_ROWS if rows == 2 or rows <= most_nodes + 1]
    trees = {(rows, depth): paths_tree(rows, depth) for rows in draft_rows for depth in (1, 2)}
    trees[1, 1], trees[1, 2] = paths_tree(2, 1), from_ranks([[0, 0], [1]])  # a chain has no levels
    trees |= {(rows, 0): paths_tree(rows - 1, 1) for rows in target_rows}
    trees[0, _STEPS] = chain(_STEPS)
    drafting: dict[tuple[int, int], float] = {}
    target: dict[int, float] = {}
    params = SamplingParams(temperature=temperature, seed=0, max_new_tokens=8, eos_token_ids=())
    for number, (shape, tree) in enumerate(trees.items()):
        with swapped(engine, drafter, StaticBuilder(tree, draw)), running(engine, prompt, params):
            drafting[shape] = _median(engine, partial(_propose, engine), repeats)
            if len(tree) + 1 in target_rows:
                judge = partial(_judge, engine, _propose(engine))
                target[len(tree) + 1] = _median(engine, judge, repeats)
        progress("measuring passes", number + 1, len(trees))
    with running(engine, prompt, params):
        judge = partial(_judge, engine, nothing(1, law_device(engine.target.device)))
        target[1] = _median(engine, judge, repeats)
    levels = {rows: drafting[rows, 2] - drafting[rows, 1] for rows in draft_rows}
    levels[1] = max(levels[1], drafting[1, 1])  # the first level catches up with the text, too
    draft = {rows: max(seconds, 0.0) for rows, seconds in levels.items()}
    return Costs(draft, dict(sorted(target.items())), drafting[0, _STEPS] / _STEPS)


@contextmanager
def running(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Iterator[None]:
    """A request that has been admitted; then it is cancelled."""
    request = engine.submit(prompt, params)
    try:
        engine.admit()
        yield
    finally:
        engine.cancel(request)


def _propose(engine: Engine) -> Draft:
    """A draft, which is dropped again."""
    draft = engine.draft(engine.running)
    assert engine.drafter is not None
    engine.drafter.observe([Commit(r.place, ()) for r in engine.running])
    return draft


def _judge(engine: Engine, draft: Draft) -> None:
    engine.verify(engine.running, draft, engine.score(engine.running, draft))


def _median(engine: Engine, run: Callable[[], object], repeats: int) -> float:
    def finished() -> None:
        run()
        if engine.target.device.type == "cuda":
            torch.cuda.synchronize(engine.target.device)

    finished()
    times = []
    for _ in range(repeats):
        clock = Clock(engine.target.device)
        finished()
        times.append(clock.whole())
    return statistics.median(times)
