"""Slow, readable twins of looking up what stood before, in plain lists; and how engines are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from outpace import SamplingParams
from outpace.drafters.base import Context, Drafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.sampling import Warp
from outpace.types import Tree
from outpace.verifiers import TokenVerifier

SEP = -1
Tokens = list[int]
Requests = list[tuple[Tokens, SamplingParams]]

V = 12
TARGET = MarkovModel.random(V, 2, 0, sharpness=2.0)


def ends(text: Sequence[int], run: Sequence[int], first: int = 0) -> Tokens:
    """Where a run ends in what a text holds from `first` on, the newest first."""
    n, wanted = len(run), list(run)
    starts = range(len(text) - n, first - 1, -1)
    return [i + n - 1 for i in starts if list(text[i : i + n]) == wanted]


def matched(text: Sequence[int], at: int, tail: Sequence[int], most: int) -> int:
    """How many tokens up to a position are the last ones of `tail`."""
    n = 0
    while n < min(most, len(tail), at + 1) and text[at - n] == tail[-1 - n]:
        n += 1
    return n


def followed(text: Sequence[int], at: int, most: int) -> Tokens:
    """What stands behind a position, up to a separator; what grows goes on to repeat itself."""
    found: Tokens = []
    period = len(text) - 1 - at
    for i in range(most if period else 0):
        token = text[at + 1 + i % period]
        if token == SEP:
            break
        found.append(token)
    return found


def paths(tokens: Sequence[int], tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node."""
    assert len(tokens) == len(tree)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def begins(runs: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """All beginnings of these runs: the nodes of a tree that has them as paths."""
    return {tuple(run[: i + 1]) for run in runs for i in range(len(run))}


# --- drafters without an engine -------------------------------------------------------------


def started(drafter: Drafter, vocab_size: int = V, max_len: int = 512) -> Drafter:
    """A drafter that an engine would have started."""
    target = MarkovModel(torch.full((vocab_size, vocab_size), 1 / vocab_size))
    drafter.start(target, target.new_cache(8, max_len))
    return drafter


def proposed(drafter: Drafter, context: Context, budget: int) -> tuple[Tokens, Tree]:
    """Tokens and shape of a draft for one context."""
    warp = Warp([SamplingParams()], V, torch.device("cpu"))
    draft = drafter.draft([context], [budget], warp, None)
    (tree,) = draft.trees
    assert draft.tokens.shape == (1, len(tree))
    assert tree.depth <= budget
    assert tree.shape <= drafter.proposes
    return draft.tokens[0].tolist(), tree


# --- drafters in an engine ------------------------------------------------------------------


def texts(engine: Engine, requests: Requests) -> list[Tokens]:
    """What each request emits."""
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    return [request.emitted for request in submitted]


def ragged(temperature: float, vocab_size: int = V) -> Requests:
    """Eight prompts and texts, all of different lengths."""
    return [
        (
            [(i * j + j // 3) % vocab_size for j in range(1 + 4 * i)],
            SamplingParams(
                temperature=temperature, seed=i, max_new_tokens=20 + 7 * (i % 5), eos_token_ids=()
            ),
        )
        for i in range(8)
    ]


@cache
def plain(target: MarkovModel, temperature: float) -> list[Tokens]:
    """The ragged texts, one after the other, by no drafter at all."""
    return texts(Engine(target, max_batch=1), ragged(temperature, target.vocab_size))


def assert_as_plain(
    make: Callable[[], Drafter], temperature: float, target: MarkovModel = TARGET, **options
) -> None:
    """Eight ragged requests at once, or three, with few and many tokens drafted: the texts are
    those of plain decoding, and drafts were both accepted and rejected."""
    requests = ragged(temperature, target.vocab_size)
    for k, max_batch in ((None, 8), (2, 3)):
        engine = Engine(target, make(), k, max_batch=max_batch, **options)
        assert texts(engine, requests) == plain(target, temperature)
        assert 0 < engine.stats.accepted < engine.stats.proposed


def assert_as_plain_can_fail(make: Callable[[], Drafter]) -> None:
    """Negative control: token verification has the target's law, too, but other draws."""

    class Pretending(TokenVerifier):
        invariant = True

    with pytest.raises(AssertionError):
        assert_as_plain(make, 1.0, verifier=Pretending())


class Doubtful(MarkovModel):
    """Finds many tokens nearly tied: greedy rounds are cut short, and plain ones follow."""

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        return 0.1


CYCLE = MarkovModel(
    torch.tensor(
        [[(0.98 if j == (i + 5) % V else 0) + 0.02 / V for j in range(V)] for i in range(V)]
    )
)
"""Goes round all tokens."""

DOUBTFUL = Doubtful(MarkovModel.random(V, 2, 0).table)


class Fragile(MarkovModel):
    """Its first pass fails."""

    broken = False

    def forward(self, *args, **options):
        if not self.broken:
            self.broken = True
            raise RuntimeError("out of memory")
        return super().forward(*args, **options)


def assert_survives_a_failed_prefill(make: Callable[[], Drafter]) -> None:
    """The error is the one that happened, the slot comes back, and the next text is sound."""
    engine = Engine(Fragile(TARGET.table), make(), max_batch=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        texts(engine, ragged(0.0)[1:2])
    assert engine.free_slots == 2
    assert texts(engine, ragged(0.0)) == plain(TARGET, 0.0)
