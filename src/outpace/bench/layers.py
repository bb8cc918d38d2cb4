"""Which of a target's layers can draft: exits after every layer, and a search for layers to skip.

A part of the target reads texts, and its law of every token is held against the whole
model's: the mean of Σ min(p, q) is the acceptance rate that its drafts will have
(Leviathan et al., 2023, corollary 3.6). With the measured time of its steps that
gives the speedup (theorem 3.8) for the best K. Layers to skip are searched for as
in Draft & Verify (Zhang et al., 2024), there by Bayesian optimisation, here greedily:
again and again the layer goes whose loss costs least acceptance.

The part reads each text on its own, while a drafter reads the target's keys and
values: what is found here is a little less than what a drafter will reach.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import IncompatibleError, OptionError
from ..models.base import LanguageModel, Layered
from ..models.loading import Progress
from ..types import Resume

LONGEST = 8
"""K, at most."""

_LEAST = 0.3
"""Acceptance below which no further layer is left out."""

_MOST_NUMBERS = 2**28
"""Of the target's laws, which are held while parts are tried: a gibibyte."""

_REPEATS, _STEPS = 9, 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A part of the target as its drafter.

    Attributes:
        drafter: by name.
        layers: how many run.
        alpha: the mean acceptance of its tokens.
        cost: c, its step's time over the target pass's.
        k: the draft length of the highest speedup.
        speedup: what α, c and K give; below 1 it is no use.
    """

    drafter: str
    layers: int
    alpha: float
    cost: float
    k: int
    speedup: float


def choices(
    target: LanguageModel,
    texts: Sequence[Sequence[int]],
    temperature: float = 0.0,
    progress: Progress = lambda what, done, total: None,
) -> list[Choice]:
    """Every exit, and for every number of layers to skip the best set found.

    Args:
        texts: token ids to measure acceptance on.

    Raises:
        IncompatibleError: the target's layers cannot run alone.
        OptionError: there is no text.
    """
    if not isinstance(target, Layered):
        raise IncompatibleError(
            f"{type(target).__name__} runs whole models only: this is for the Llama family"
        )
    texts = [text[: target.context_length] for text in texts if len(text) > 1]
    if not texts:
        raise OptionError("there is no text to measure acceptance on: give a longer prompt")
    size = sum(map(len, texts)) * target.vocab_size
    every = max(1, math.ceil(size / _MOST_NUMBERS)) if temperature else 1
    laws = [_law(target, text, temperature, every) for text in texts]
    costs = _Costs(target)

    def judge(layers: Sequence[int]) -> float:
        part = target.part(layers)
        rates = [
            _overlap(p, _law(part, text, temperature, every))
            for p, text in zip(laws, texts, strict=True)
        ]
        return float(torch.cat(rates).mean())

    count, found = target.layers, list[Choice]()
    total = count - 1 + sum(range(2, count + 1))
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("measuring layers", done, total)

    for exit_ in range(1, count):
        part = target.part(range(exit_))
        cost = costs.step(part)
        # The last drafted token is fed, too, where the target's pass can go on behind it.
        rest, extra = (costs.rest(exit_), 1) if target.resumes else (1.0, 0)
        k, speedup = _best(alpha := judge(range(exit_)), cost, rest, extra)
        found.append(Choice(f"early-exit:{exit_}", exit_, alpha, cost, k, speedup))
        advance()
    kept = list(range(count))
    while len(kept) > 1:
        tried = {}
        for layer in kept:
            tried[layer] = judge([i for i in kept if i != layer])
            advance()
        gone = max(tried, key=lambda layer: tried[layer])
        if tried[gone] < _LEAST:
            break
        kept.remove(gone)
        cost = costs.step(target.part(kept))
        k, speedup = _best(tried[gone], cost, 1.0, 0)
        skipped = ".".join(str(i) for i in range(count) if i not in kept)
        found.append(Choice(f"skip:{skipped}", len(kept), tried[gone], cost, k, speedup))
    progress("measuring layers", total, total)
    return found


def _best(alpha: float, cost: float, rest: float, extra: int) -> tuple[int, float]:
    """The best K, and its speedup.

    Args:
        rest: the target's pass over the draft, over a whole pass.
        extra: steps beyond one for each token.
    """
    speeds = {
        k: sum(alpha**i for i in range(k + 1)) / ((k + extra) * cost + rest)
        for k in range(1, LONGEST + 1)
    }
    k = max(speeds, key=lambda k: speeds[k])
    return k, speeds[k]


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    """Acceptance rates `[T]` of tokens drawn from one law and judged by the other."""
    return (p == q).float() if p.dim() == 1 else torch.minimum(p, q).sum(-1)


@torch.inference_mode()
def _law(model: LanguageModel, text: Sequence[int], temperature: float, every: int) -> Tensor:
    """Rows `[T, V]` fp32 behind every n-th token of a text; the likeliest tokens `[T]` at 0."""
    cache = model.new_cache(1, len(text))
    positions = torch.arange(len(text)).unsqueeze(0)
    logits = model.forward(torch.tensor([list(text)]), positions, cache, [0]).logits
    assert logits is not None
    if temperature == 0:
        return logits[0].argmax(-1)
    return (logits[0, ::every].float() / temperature).softmax(-1)


class _Costs:
    """Times of passes over one row, over that of a whole pass.

    Passes take turns with whole ones, as they do in rounds, so that no part's weights
    lie in the processor's caches more often than they will.
    """

    def __init__(self, target: Layered) -> None:
        self._target = target
        self._cache = target.new_cache(1, 64)
        self._zero = torch.zeros(1, 1, dtype=torch.int64)
        self._whole = self._seconds(lambda: self._pass(target), 1)

    def step(self, part: LanguageModel) -> float:
        """Of a part, as the mean of some in a row."""
        return self._seconds(lambda: self._pass(part), _STEPS) / self._whole

    def rest(self, layer: int) -> float:
        """Of the layers behind the first ones."""
        device = self._target.device
        states = torch.zeros(1, 1, self._target.hidden_size, device=device)
        resume = Resume(layer, states)

        def run() -> None:
            zero = self._zero
            self._target.forward(zero, zero, self._cache, [0], resume=resume)

        return self._seconds(run, 1) / self._whole

    def _pass(self, model: LanguageModel) -> None:
        model.forward(self._zero, self._zero, self._cache, [0])

    @torch.inference_mode()
    def _seconds(self, run: Callable[[], None], steps: int) -> float:
        device, times = self._target.device, []
        for _ in range(_REPEATS + 2):
            self._pass(self._target)
            self._wait(device)
            began = time.perf_counter()
            for _ in range(steps):
                run()
            self._wait(device)
            times.append((time.perf_counter() - began) / steps)
        return statistics.median(times[2:])

    @staticmethod
    def _wait(device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
