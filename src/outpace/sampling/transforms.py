"""Logits to probabilities: temperature, top-k, top-p, in this order.

`Warp` is built once for the sequences of a batch and applied alike to target
and draft rows, to every verified position with its own prefix, and to plain
decoding. What is switched off costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from .. import kernels
from ..types import SamplingParams
from .draws import argmax

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


def one_hot_argmax(logits: Tensor) -> Tensor:
    """The law of greedy decoding: all mass on the first largest logit, `[..., V]`."""
    best = argmax(logits).unsqueeze(-1)
    return torch.zeros_like(logits).scatter_(-1, best, 1.0)


class Warp:
    """The sampling parameters of B sequences as one function `[B, T, V]` -> `[B, T, V]`.

    Args:
        library: the kernels, where they shall compute softmaxes.
    """

    __slots__ = (
        "_cold",
        "_device",
        "_greedy",
        "_library",
        "_params",
        "_temperature",
        "_top_k",
        "_top_p",
        "_vocab_size",
        "all_greedy",
        "temperatures",
    )

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device,
        library: CDLL | None = None,
    ) -> None:
        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device).view(-1, 1, 1)

        self._params, self._vocab_size, self._device = params, vocab_size, device
        self._library = library
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

    @property
    def device(self) -> torch.device:
        """Where it takes logits."""
        return self._device

    @property
    def only_temperature(self) -> bool:
        """Whether it is a softmax by the kernels over `temperatures` `[B]`, 0 being argmax."""
        return self._library is not None and self._top_k is None and self._top_p is None

    def select(self, rows: Sequence[int]) -> Warp:
        """The same for some of the sequences."""
        params = [self._params[i] for i in rows]
        return Warp(params, self._vocab_size, self._device, self._library)

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities in fp32 (fp64 stays fp64), rows summing to 1."""
        x = logits if logits.dtype == torch.float64 else logits.float()
        if self.all_greedy:
            return one_hot_argmax(x)
        if self._top_k is not None:
            x = top_k_mask(x, *self._top_k)  # the same tokens at any temperature
        p = self._soften(x)
        return p if self._top_p is None else top_p_filter(p, self._top_p)

    def _soften(self, x: Tensor) -> Tensor:
        """Softmax over temperature, the law of greedy decoding where that is 0."""
        if self._library is not None and x.dtype == torch.float32 and x.device.type == "cpu":
            return kernels.softmax(self._library, x, self.temperatures)
        divided = x
        if self._temperature is not None:
            if self._cold:  # relative to the row's maximum, no temperature can overflow
                divided = x - x.amax(-1, keepdim=True)
            divided = divided / self._temperature
        p = torch.softmax(divided, dim=-1)
        return p if self._greedy is None else torch.where(self._greedy, one_hot_argmax(x), p)
