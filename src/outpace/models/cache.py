"""The cache: fixed slots written in place, each with a length of its own.

A forward pass writes its rows behind a slot's committed length and leaves the
length alone; `commit` says which of them stay. That and `truncate` are the
only ways a length changes, so whatever a round rejects is never seen again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ContextLengthError

BUCKET = 64
"""Attention reads a slot up to a multiple of this many positions."""

_FIRST_CAPACITY = 256


class SlotCache:
    """Storage `[slots, capacity, ...]` per tensor, shared by all runners.

    Args:
        slots: sequences held at once.
        max_len: positions a slot may ever commit.
        make: allocates one storage tensor set of `[slots, capacity, ...]`;
            memory grows by doubling up to what `max_len` needs.
    """

    def __init__(self, slots: int, max_len: int, make: Callable[[int, int], list[Tensor]]) -> None:
        self.max_len = max_len
        self.lengths = [0] * slots
        self._make = make
        self.capacity = min(_FIRST_CAPACITY, round_up(max_len, BUCKET))
        self.storage = make(slots, self.capacity)

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def reserve(self, slots: Sequence[int], rows: int) -> None:
        """Make room for `rows` more rows in these slots, committed or not."""
        needed = max(self.lengths[s] for s in slots) + rows
        if needed > self.capacity:
            capacity = max(round_up(needed, BUCKET), min(2 * self.capacity, self.max_len))
            grown = self._make(self.slots, round_up(capacity, BUCKET))
            for old, new in zip(self.storage, grown, strict=True):
                new[:, : self.capacity].copy_(old)
            self.storage, self.capacity = grown, grown[0].shape[1]

    def row_indices(self, slots: Sequence[int], rows: int) -> Tensor:
        """Flat indices `[B * rows]` into `[slots * capacity]` of the rows a pass writes."""
        starts = [s * self.capacity + self.lengths[s] for s in slots]
        if len(starts) == 1:
            return torch.arange(starts[0], starts[0] + rows)
        return (torch.tensor(starts).unsqueeze(1) + torch.arange(rows)).flatten()

    def commit(self, slot: int, kept: Sequence[int]) -> None:
        """Keep these rows (ascending, relative to the length) of the last pass, drop the rest.

        Raises:
            ContextLengthError: the slot would hold more than `max_len` positions.
        """
        base, n = self.lengths[slot], len(kept)
        if base + n > self.max_len:
            raise ContextLengthError(
                f"a slot of {self.max_len} positions is full: end the sequence or raise max_len"
            )
        if list(kept) != list(range(n)):
            source = torch.tensor(kept) + base
            for tensor in self.storage:
                tensor[slot, base : base + n] = tensor[slot, source.to(tensor.device)]
        self.lengths[slot] = base + n

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on (0 empties the slot)."""
        self.lengths[slot] = min(length, self.lengths[slot])


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
