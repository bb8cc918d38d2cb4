"""A toy model whose law is known exactly: a Markov chain of any order.

For tests and teaching, on the CPU. Its cache holds tokens, and a row's context is read
from the cache and through the mask, so a wrong length, mask or commit shows as
a wrong law.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OptionError
from .base import ForwardOutput
from .cache import SlotCache


class MarkovModel:
    """p(next | last `order` tokens) = table[tokens...]; token 0 stands before the start.

    Args:
        table: `[V] * order + [V]`, rows sum to 1; zeros are allowed.
    """

    def __init__(self, table: Tensor, context_length: int = 4096) -> None:
        self.order = table.ndim - 1
        self.vocab_size = table.shape[-1]
        if self.order < 1 or set(table.shape) != {self.vocab_size}:
            raise OptionError(f"a Markov table is [V] * order + [V], not {list(table.shape)}")
        if not torch.allclose(table.sum(-1), torch.ones_like(table[..., 0])) or (table < 0).any():
            raise OptionError("every row of a Markov table must be a distribution")
        self.table = table
        self.context_length = context_length
        self._log = table.log()

    @classmethod
    def random(
        cls, vocab_size: int, order: int, seed: int, sharpness: float = 1.0, **options: int
    ) -> MarkovModel:
        """A random chain in float64; a larger `sharpness` makes more certain rows."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn([vocab_size] * (order + 1), generator=generator, dtype=torch.float64)
        return cls(torch.softmax(sharpness * logits, -1), **options)

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        return 0.0

    def new_cache(self, slots: int, max_len: int) -> SlotCache:
        return SlotCache(
            slots, max_len, lambda s, c: [torch.zeros(s, c, dtype=torch.int64, device=self.device)]
        )

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
        batch, rows = tokens.shape
        cache.reserve(slots, rows)
        held = cache.storage[0]
        written = cache.row_indices(slots, rows - computed, computed)
        held.view(-1)[written] = tokens[:, computed:].flatten()
        if mask is None:
            mask = torch.ones(rows, rows, dtype=torch.bool).tril().expand(batch, rows, rows)
        # The row before row i is the last one it may look at, besides itself.
        earlier = mask & torch.ones(rows, rows, dtype=torch.bool).tril(-1)
        before = torch.where(earlier, torch.arange(rows), -1).amax(-1)  # [B, T], -1: the cache
        lengths = torch.tensor([cache.lengths[s] for s in slots]).unsqueeze(1)
        slot = torch.tensor(list(slots)).unsqueeze(1)
        at = lengths + torch.arange(computed, rows)  # where each row's token lies
        context = []
        for _ in range(self.order):
            context.append(torch.where(at >= 0, held[slot, at.clamp_min(0)], 0))
            inside = at >= lengths
            step = before.gather(1, (at - lengths).clamp_min(0))
            jumped = torch.where(step >= 0, lengths + step, lengths - 1)
            at = torch.where(inside, jumped, at - 1)
        return ForwardOutput(self._log[tuple(reversed(context))])
