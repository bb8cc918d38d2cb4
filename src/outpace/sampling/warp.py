"""Logits to probabilities: transforms, then temperature, top-k, top-p and min-p, in this order.

`Warp` is built once for the sequences of a batch and applied alike to target
and draft rows, to every verified position with its own prefix, and to plain
decoding. What is switched off costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..types import SamplingParams
from .draws import argmax
from .transforms import Pipeline, Stuck

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond these are taken as these: the law is argmax or uniform already, and fp32
can hold them."""

_COLD = 1e-6
"""No logits are so large that they overflow when they are divided by more than this."""


def top_k_mask(logits: Tensor, k: Tensor, largest: int) -> Tensor:
    """-inf below the k-th largest logit of each row; ties with it stay.

    Args:
        logits: `[B, T, V]`.
        k: `[B, 1, 1]` int64, each in [1, V].
        largest: the largest of them, known without asking the device.
    """
    ranked = logits.topk(largest, dim=-1).values  # [B, T, k_max]
    threshold = ranked.gather(-1, (k - 1).expand(*logits.shape[:-1], 1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def top_p_filter(p: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's smallest set of most likely tokens with mass >= top_p, renormalised.

    Args:
        p: `[B, T, V]`, rows sum to 1.
        top_p: `[B, 1, 1]` in (0, 1]; rows with 1 pass unchanged.
    """
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    outside = (before >= top_p) & (top_p < 1)
    outside[..., 0] = False  # the most likely token stays, however small top_p is
    ranked = ranked.masked_fill(outside, 0)
    kept = torch.zeros_like(p).scatter_(-1, order, ranked)
    return torch.where(top_p < 1, kept / kept.sum(-1, keepdim=True), p)


def min_p_filter(p: Tensor, min_p: Tensor) -> Tensor:
    """Drop what is less than `min_p` times as likely as the likeliest (Nguyen et al., 2024).

    Args:
        p: `[B, T, V]`.
        min_p: `[B, 1, 1]` in [0, 1]; rows with 0 pass unchanged.
    """
    kept = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0)
    return torch.where(min_p > 0, kept / kept.sum(-1, keepdim=True), p)


@dataclass(frozen=True, slots=True)
class Shaped:
    """Logits behind the transforms.

    Attributes:
        logits: `[B, T, V]`.
        stuck: per sequence, rows for which no token is left, or which a
            transform failed on. Their logits mean nothing.
    """

    logits: Tensor
    stuck: tuple[Stuck, ...]


def one_hot_argmax(logits: Tensor) -> Tensor:
    """The law of greedy decoding: all mass on the first largest logit, `[..., V]`."""
    best = argmax(logits).unsqueeze(-1)
    return torch.zeros_like(logits).scatter_(-1, best, 1.0)


class Warp:
    """The sampling parameters of B sequences as one function `[B, T, V]` -> `[B, T, V]`.

    Args:
        pipelines: each sequence's transforms; None has none.
        library: the kernels, where they shall compute laws.

    Attributes:
        all_greedy: whether every sequence is at temperature 0.
        temperatures: `[B]` float32 on the CPU, 0 for greedy sequences.
        filters: as the kernels take them, where any is on.
    """

    __slots__ = (
        "_cold",
        "_device",
        "_greedy",
        "_library",
        "_min_p",
        "_params",
        "_pipelines",
        "_temperature",
        "_top_k",
        "_top_p",
        "_vocab_size",
        "all_greedy",
        "filters",
        "temperatures",
    )

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device,
        library: CDLL | None = None,
        pipelines: Sequence[Pipeline | None] = (),
    ) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device).view(-1, 1, 1)

        self._params, self._vocab_size, self._device = params, vocab_size, device
        self._library, self._pipelines = library, pipelines
        self.all_greedy = all(s.greedy for s in params)
        self._greedy = column([s.greedy for s in params]) if any(s.greedy for s in params) else None
        temperatures = [
            1.0 if s.greedy else float(min(max(s.temperature, _COLDEST), _HOTTEST)) for s in params
        ]
        self.temperatures = torch.tensor(
            [0.0 if s.greedy else t for s, t in zip(params, temperatures, strict=True)],
            dtype=torch.float32,
            device="cpu",
        )
        self._cold = min(temperatures) < _COLD
        self._temperature = column(temperatures) if any(t != 1 for t in temperatures) else None
        kept = [min(s.top_k or vocab_size, vocab_size) for s in params]
        self._top_k = (column(kept), max(kept)) if min(kept) < vocab_size else None
        self._top_p = (
            column([s.top_p for s in params]) if any(s.top_p < 1 for s in params) else None
        )
        self._min_p = column([s.min_p for s in params]) if any(s.min_p for s in params) else None
        self.filters: kernels.Filters | None = None
        if any(f is not None for f in (self._top_k, self._top_p, self._min_p)):
            top_p, min_p = [s.top_p for s in params], [s.min_p for s in params]
            self.filters = torch.tensor(kept), torch.tensor(top_p), torch.tensor(min_p)

    @property
    def device(self) -> torch.device:
        """Where it takes logits."""
        return self._device

    @property
    def shapes(self) -> bool:
        """Whether any sequence has transforms, so that rows depend on their prefixes."""
        return any(pipeline is not None for pipeline in self._pipelines)

    @property
    def by_kernels(self) -> bool:
        """Whether a law follows from logits, `temperatures` and `filters` by the kernels alone."""
        return self._library is not None and not self.shapes

    def select(self, rows: Sequence[int]) -> Warp:
        """The same for some of the sequences."""
        params = [self._params[i] for i in rows]
        pipelines = [self._pipelines[i] for i in rows] if self._pipelines else ()
        return Warp(params, self._vocab_size, self._device, self._library, pipelines)

    def shape(self, logits: Tensor, paths: Sequence[Sequence[Sequence[int]]]) -> Shaped:
        """Apply each sequence's transforms to its rows.

        Args:
            logits: `[B, T, V]`.
            paths: for each sequence and row, the drafted tokens between what is
                committed and the row; rows behind the last path are padding.
        """
        stuck: tuple[Stuck, ...] = tuple({} for _ in paths)
        if not self.shapes:
            return Shaped(logits, stuck)
        given = logits if logits.dtype == torch.float64 else logits.float()
        if len(paths) == 1 and len(paths[0]) == given.shape[1] and self._pipelines[0] is not None:
            rows, why = self._pipelines[0](given[0], paths[0])
            return Shaped(rows.unsqueeze(0), (why,))
        shaped = given.clone()
        for b, pipeline in enumerate(self._pipelines):
            if pipeline is not None:
                shaped[b, : len(paths[b])], why = pipeline(given[b, : len(paths[b])], paths[b])
                stuck[b].update(why)
        return Shaped(shaped, stuck)

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities of logits behind the transforms, in fp32 (fp64 stays); rows sum to 1."""
        x = logits if logits.dtype == torch.float64 else logits.float()
        if self.all_greedy:
            return one_hot_argmax(x)
        if self._library is not None and x.dtype == torch.float32 and x.device.type == "cpu":
            return kernels.warp(self._library, x, self.temperatures, self.filters)
        if self._top_k is not None:
            x = top_k_mask(x, *self._top_k)  # the same tokens at any temperature
        p = self._soften(x)
        if self._top_p is not None:
            p = top_p_filter(p, self._top_p)
        return p if self._min_p is None else min_p_filter(p, self._min_p)

    def _soften(self, x: Tensor) -> Tensor:
        """Softmax over temperature, the law of greedy decoding where that is 0."""
        divided = x
        if self._temperature is not None:
            if self._cold:  # relative to the row's maximum, no temperature can overflow
                divided = x - x.amax(-1, keepdim=True)
            divided = divided / self._temperature
        p = torch.softmax(divided, dim=-1)
        return p if self._greedy is None else torch.where(self._greedy, one_hot_argmax(x), p)
