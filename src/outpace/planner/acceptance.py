"""How often the first, second, ... child of a node is accepted, measured on the target's texts.

The target writes as plain decoding does, one token per round. At every position the
drafter proposes children of the context, and what rule by ratio (`TokenVerifier`) would
accept of them is computed, not drawn: of children x_1, x_2, ... with rows q_1, q_2, ...
the one of rank b is accepted with probability

    a_b Π_{j<b} (1 - a_j),   a_j = min(1, p_j(x_j) / q_j(x_j)),   p_{j+1} = norm((p_j - q_j)+)

What follows for any tree whose shape is fixed is then found without running it: a path
of ranks is accepted from a position with the product of these along the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters import ModelDrafter
from ..engine import Engine, Request
from ..errors import ContextLengthError, OptionError
from ..models.loading import Progress
from ..models.tokenizer import Tokenizer
from ..sampling import categorical, residual
from ..trees import Builder, StaticBuilder, k_ary, ranks
from ..types import Draft, Draw, SamplingParams, Tree
from ..verifiers import Noise, TokenVerifier, Verdict, Verifier
from ..verifiers.base import laws_of

Floats = NDArray[np.float64]

RANKS = 8
"""Children of which the acceptance is measured."""

_SEED = 0x6F7574_7061_0000
"""Of the first text. Noise of requests that follow must not be what the tree follows from."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured.

    Attributes:
        texts: of each text `[T, R]`: at position t the probability that of the children the
            one of rank b is accepted.
    """

    texts: Sequence[Floats]

    def rates(self, depth: int, tree: Tree | None = None) -> list[list[float]]:
        """Rates `[depth][R]` as `trees.best_tree` takes them.

        Those at depth d are means over what was accepted so far, weighted by how likely it was.

        Args:
            tree: whose rounds begin where they do and accept what they do; below its inner
                nodes there are no rates. By default rounds begin anywhere and accept any rank.
        """
        totals, weights = np.zeros((depth, self.texts[0].shape[1])), np.zeros(depth)
        for text in self.texts:
            starts = np.ones(len(text)) if tree is None else _starts(text, tree)
            reach = _through_any(text, depth) if tree is None else _through(text, tree, depth)
            for d in range(min(depth, len(text))):
                come = (starts * reach[d])[: len(text) - d]
                totals[d] += come @ text[d:]
                weights[d] += come.sum()
        known = next((d for d, weight in enumerate(weights) if not weight > 0), depth)
        return [(totals[d] / weights[d]).tolist() for d in range(known)]

    def expected_tokens(self, tree: Tree) -> float:
        """What a round with this tree emits on average, over rounds where they begin.

        Raises:
            OptionError: no text is as long as the tree is deep.
        """
        emitted = rounds = 0.0
        depth = tree.depth
        for text in self.texts:
            starts = _starts(text, tree)[: len(text) - depth + 1]  # the end cuts the others off
            accepted = _accepted(text, tree)[: len(starts)].sum(1)
            emitted += float(starts @ (1 + accepted))
            rounds += float(starts.sum())
        if not rounds:
            raise OptionError(f"no text was measured that is as long as the tree is deep, {depth}")
        return emitted / rounds


def _chances(text: Floats, tree: Tree) -> Floats:
    """`[N, T]`: the probability that a round from a position accepts a node; 0 past the end."""
    chances = np.zeros((len(tree), len(text)))
    for node, rank in enumerate(ranks(tree)):
        parent, depth = tree.parents[node], tree.depths[node]
        if rank < text.shape[1] and depth <= len(text):
            here = text[depth - 1 :, rank]
            chances[node, : len(here)] = here
            if parent >= 0:
                chances[node] *= chances[parent]
    return chances


def _accepted(text: Floats, tree: Tree) -> Floats:
    """`[T, D]`: the probability that a round from a position accepts so deep."""
    chances, depths = _chances(text, tree), np.array(tree.depths, dtype=np.int64)
    found = [chances[depths == depth].sum(0) for depth in range(1, tree.depth + 1)]
    return np.stack(found, 1) if found else np.zeros((len(text), 0))


def _through(text: Floats, tree: Tree, depth: int) -> Floats:
    """`[depth, T]`: the probability that a round accepts a node at a depth that has children."""
    chances, inner = _chances(text, tree), sorted({p for p in tree.parents if p >= 0})
    found = np.zeros((depth, len(text)))
    found[0] = 1
    for node in inner:
        if tree.depths[node] < depth:
            found[tree.depths[node]] += chances[node]
    return found


def _through_any(text: Floats, depth: int) -> Floats:
    """`[depth, T]`: the same of a tree with all ranks everywhere."""
    found = np.zeros((depth, len(text)))
    found[0] = 1
    for d in range(1, min(depth, len(text))):
        found[d, : len(text) - d] = found[d - 1, : len(text) - d] * text[d - 1 : -1].sum(1)
    return found


def _starts(text: Floats, tree: Tree) -> Floats:
    """`[T]`: the probability that a round begins at a position."""
    reached = _accepted(text, tree)
    starts = np.zeros(len(text))
    starts[0] = 1
    for t in range(len(text)):
        ends = np.concatenate([[1.0], reached[t]])  # accepted at least so many
        ends -= np.concatenate([reached[t], [0.0]])  # exactly so many
        to = min(len(text), t + 1 + len(ends))
        starts[t + 1 : to] += starts[t] * ends[: to - t - 1]
    return starts


class _Watcher(TokenVerifier):
    """Emits the target's own token, and keeps what would have been accepted of the children."""

    lossless: ClassVar[bool] = False  # so that it is asked at temperature 0, too

    def __init__(self) -> None:
        self.seen: list[Floats | None] = []
        """Of each sequence of the last round, if it was drafted for."""

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        by_rank = accepted_by_rank(p[:, 0], draft).cpu().numpy()
        both = zip(by_rank, draft.trees, strict=True)
        self.seen = [row if len(tree) else None for row, tree in both]
        token = categorical(p[:, 0], noise.target[:, 0])
        return Verdict.of([[] for _ in draft.trees], draft.tokens.shape[1], token)


def accepted_by_rank(p: Tensor, draft: Draft) -> Tensor:
    """`[B, N]` of drafts that are children of the root: each one's probability to be accepted.

    Args:
        p: `[B, V]` the target's rows.
    """
    left, gone = p.double(), torch.ones(len(p), dtype=torch.float64, device=p.device)
    found = []
    for node, x in enumerate(draft.tokens.unbind(1)):
        q = laws_of(draft, torch.full_like(x, node), p.shape[-1])
        px, qx = (row.gather(1, x.unsqueeze(1)).squeeze(1) for row in (left, q))
        passes = torch.where(qx > 0, (px / qx).clamp_max(1), 0.0)
        found.append(gone * passes)
        gone = gone * (1 - passes)
        left = residual(left, q)
        left = left / left.sum(-1, keepdim=True)
    return torch.stack(found, 1) if found else left[:, :0]


def measure_acceptance(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    draw: Draw,
    tokens: int = 64,
    count: int = RANKS,
    seed: int = _SEED,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Acceptance:
    """Let the target go on with prompts, and see what of the drafter's children it accepts.

    Args:
        engine: an idle one, whose drafter runs a model.
        prompts: token ids.
        draw: how children come about.
        tokens: of each text.
        count: ranks R.

    Raises:
        OptionError: the engine is busy or its drafter takes no trees, or there is no prompt.
    """
    drafter = model_drafter(engine)
    if not prompts:
        raise OptionError("there is no prompt to measure on: give one at least")
    count = min(count, engine.target.vocab_size)
    watcher, texts = _Watcher(), list[list[Floats]]()
    last: dict[int, list[Floats]] = {}
    what = f"measuring acceptance at temperature {temperature:g}"
    with swapped(engine, drafter, StaticBuilder(k_ary([count]), draw), watcher):
        requests: list[Request] = []
        params = SamplingParams(
            temperature=temperature,
            max_new_tokens=tokens + 1,  # the last is not drafted for
            eos_token_ids=(),
        )
        try:
            for i, prompt in enumerate(prompts):
                own = params.with_seed(seed + i)
                requests.append(engine.submit(prompt, own, tokenizer=tokenizer))
            done = 0
            while engine.busy:
                ran = engine.step()
                for request, row in zip(ran, watcher.seen, strict=True):
                    if row is None:  # a plain round: what comes behind it is another text
                        last.pop(id(request), None)
                        continue
                    if id(request) not in last:
                        texts.append([])
                        last[id(request)] = texts[-1]
                    last[id(request)].append(row)
                done += len(ran)
                progress(what, done, len(prompts) * (tokens + 1))
        finally:
            for request in requests:
                engine.cancel(request)
        for request in requests:
            if request.failure is not None:
                raise request.failure
    if not texts:
        raise ContextLengthError("nothing was drafted for these prompts: give shorter ones")
    return Acceptance([np.stack(text) for text in texts])


def model_drafter(engine: Engine) -> ModelDrafter:
    """The engine's drafter, if it takes trees and nobody uses it.

    Raises:
        OptionError: the engine is busy, or it does not.
    """
    if engine.busy:
        raise OptionError("the engine is busy: measure when its requests have ended")
    if not isinstance(engine.drafter, ModelDrafter):
        raise OptionError("trees are measured with a drafter that runs a model: give one")
    return engine.drafter


@contextmanager
def swapped(
    engine: Engine, drafter: ModelDrafter, builder: Builder, rule: Verifier | None = None
) -> Iterator[None]:
    """The engine with another builder of trees, and another rule; then as it was."""
    names = ("builder", "proposes", "laws", "k", "most", "draws", "rule")
    held = {name: getattr(drafter, name) for name in names}
    try:
        drafter.branch(builder)
        with engine.fixed(builder.depth, rule):
            yield
    finally:
        for name, value in held.items():
            setattr(drafter, name, value)
