"""The contract of a language model: one forward pass over slots of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels import Filters
from ..sampling import DraftNoise, argmax
from ..types import Resume
from .cache import SlotCache


@dataclass(frozen=True, slots=True)
class Top:
    """The first of each row's likeliest tokens `[B, T]` int64, and its log-probability `[B, T]`."""

    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Top:
        """Of logits `[B, T, V]`."""
        tokens = argmax(logits)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return cls(tokens, logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1))


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Logits `[B, T, V]` (None when not asked for) and tapped hidden states `[B, T, H]`.

    `top` is there where the runner found it on the way; else it follows from the logits.
    """

    logits: Tensor | None
    taps: tuple[Tensor, ...] = ()
    top: Top | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """What was drawn.

    Attributes:
        tokens: `[B, N]`.
        law: `[B, N, V]` that each was drawn from, if any.
        states: `[B, N + 1, H]` behind the last layer, of the row that drew first and of
            every token, if they were wanted.
    """

    tokens: Tensor
    law: Tensor | None = None
    states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to an early layer's states before the final norm: W norm(h).

    Attributes:
        norm: `[H]`, of an RMS norm.
        weight: `[H, H]`.
    """

    norm: Tensor
    weight: Tensor


class LanguageModel(Protocol):
    """What the engine and the drafters need of a model.

    Attributes:
        vocab_size: V, the width of the logits, padding rows included.
        context_length: positions the model was made for.
    """

    vocab_size: int
    context_length: int

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self, slots: int, max_len: int) -> SlotCache: ...

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        """How near a row's two best logits may be for its company to decide between them.

        Relative to the larger of them; 0 where a row of such a pass has the same
        bits as in a pass of its own.

        Args:
            batch, rows: B and T of the pass.
            branched: whether its blocks are trees.
        """
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        slots: Sequence[int],
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
        computed: int = 0,
    ) -> ForwardOutput:
        """Run B sequences over T rows each, behind what their slots hold.

        Every row sees all committed positions of its slot. Within the block it
        sees itself and what came before it, or, with `mask`, its ancestors.
        The rows' keys and values are written behind the slot's length; nothing
        is committed.

        A block may be computed in several passes, as a tree that grows level by
        level: each is given the block from its first row on, and how many of its rows
        passes before have computed. Their keys and values lie where those left them,
        for nothing was committed in between; the rest run.

        Tokens, positions and mask may be on the host or on the device; a runner
        takes them over without waiting for the device.

        Args:
            tokens: `[B, T]` int64. Rows behind a sequence's own end are padding.
            positions: `[B, T]` int64, absolute.
            slots: B distinct slots of `cache`.
            mask: `[B, T, T]` bool, `mask[b, i, j]`: row i may look at row j.
            taps: layers whose output (before any final norm) is wanted, in this
                order; 0 is the first layer.
            logits: False skips the head (prefill).
            computed: rows that passes before have computed, fewer than T. Logits, taps and
                top are of the others alone, `[B, T - computed, ...]`.
        """
        ...


@runtime_checkable
class RollsOut(Protocol):
    """A model that generates several tokens in one call, on the CPU."""

    def rollout(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        slots: Sequence[int],
        ends: Sequence[int],
        budgets: Sequence[int],
        temperatures: Tensor | None = None,
        filters: Filters | None = None,
        noise: DraftNoise | None = None,
        states: bool = False,
    ) -> Rollout:
        """A pass over a block, and further ones over what each sequence draws.

        As many tokens are drawn as the largest budget; a sequence past its own
        is fed its last token again. Committed are its rows up to its end, and what it drew within
        its budget except for the last token.

        Args:
            tokens, positions: `[B, T]` int64, as in `forward`.
            ends: the row of each sequence that draws first; what lies behind it is padding.
            budgets: tokens to draw for each sequence, at least 1.
            temperatures: `[B]` float32, 0 for the likeliest token; None where all are 0.
            filters: top-k, top-p and min-p of each, where any is on.
            noise: what they are drawn with, where some are.
            states: whether those behind the last layer are wanted; then the last
                token drawn is fed, too.
        """
        ...


@runtime_checkable
class Layered(LanguageModel, Protocol):
    """A model of which some layers can run alone, on the same cache."""

    @property
    def layers(self) -> int:
        """How many there are."""
        ...

    @property
    def hidden_size(self) -> int:
        """Numbers of a row's state between them."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether short passes can go on behind layers that have run."""
        ...

    def part(self, layers: Sequence[int], adapter: Adapter | None = None) -> LanguageModel:
        """The model with these of its layers alone, ascending, and an adapter behind them.

        It shares the weights. A pass of it on the whole model's cache reads and writes
        those layers' keys and values.
        """
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        slots: Sequence[int],
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
        computed: int = 0,
        resume: Resume | None = None,
    ) -> ForwardOutput:
        """As of any model, or of a block's first pass without the layers that have run."""
        ...


def rounding_doubt(dtype: torch.dtype) -> float:
    """`doubt` of passes that round by their shape: somewhat more than was seen in small models."""
    return torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for what the device is doing."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


PREFILL_CHUNK = 512
"""Rows of a pass of prefill, at most."""

PREFILL_WORK = 2**23
"""Rows times positions of such a pass, at most: what masks and scores take memory for."""


def prefill(
    model: LanguageModel,
    cache: SlotCache,
    slot: int,
    tokens: Sequence[int],
    taps: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Append tokens to a slot in chunks and commit them; tapped states `[1, T, H]`, if any.

    Of many requests with the same prompt the first reads it, and the others copy its slot.
    """
    first = not cache.lengths[slot]
    if first and not taps and len(tokens) and cache.share(slot, tokens):
        return ()
    parts: list[tuple[Tensor, ...]] = []
    start = 0
    while start < len(tokens):
        base = cache.lengths[slot]
        room = max(1, PREFILL_WORK // (base + PREFILL_CHUNK))
        chunk = tokens[start : start + min(PREFILL_CHUNK, room)]
        start += len(chunk)
        out = model.forward(
            torch.tensor([chunk]),
            torch.arange(base, base + len(chunk)).unsqueeze(0),
            cache,
            [slot],
            taps=taps,
            logits=False,
        )
        cache.commit(slot, range(len(chunk)))
        parts.append(out.taps)
    if first:
        cache.remember(slot, tokens)
    return tuple(torch.cat(states, dim=1) for states in zip(*parts, strict=True))
