"""The cache: fixed slots written in place, each with a length of its own.

A forward pass writes its rows behind a slot's committed length and leaves the
length alone; `commit` says which of them stay. That and `truncate` are the
only ways a length changes, so whatever a round rejects is never seen again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ContextLengthError

BUCKET = 64
"""Attention reads a slot up to a multiple of this many positions."""

BLOCK = 16
"""Causal blocks of up to this many rows are split where a bucket ends, so that a row reads equally
far whatever it is computed with."""

_FIRST_CAPACITY = 256

_VIEWS_KEPT = 64
"""Combinations of slots and length whose views are kept."""


class SlotCache:
    """Storage `[slots, capacity, ...]` per tensor, shared by all runners.

    Memory is for the slots and lengths in use: both grow by doubling.

    Args:
        slots: sequences held at once, at most.
        max_len: positions a slot may ever commit.
        make: allocates the storage tensors for a number of slots and a capacity.
    """

    def __init__(self, slots: int, max_len: int, make: Callable[[int, int], list[Tensor]]) -> None:
        self.max_len = max_len
        self.lengths = [0] * slots
        self.ends = [0] * slots  # of what is committed, or written behind it by the last pass
        self._prompts: dict[int, list[int]] = {}  # what a slot's first positions were read from
        self._make = make
        self.capacity = min(_FIRST_CAPACITY, round_up(max_len, BUCKET))
        self.storage = make(1, self.capacity)

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def reserve(self, slots: Sequence[int], rows: int) -> None:
        """Make room for `rows` more rows in these slots, committed or not.

        What the last pass over a slot has written behind its length stays there.
        """
        self.make_room(max(slots) + 1, extent(max(self.lengths[s] for s in slots), rows))
        for slot in slots:
            self.ends[slot] = self.lengths[slot] + rows

    def make_room(self, slots: int, needed: int) -> None:
        """Memory for the first slots, and for so many positions of each."""
        held = self.storage[0].shape[0]
        if needed <= self.capacity and slots <= held:
            return
        capacity = self.capacity
        if needed > capacity:
            wanted = max(needed, min(2 * capacity, self.max_len))
            capacity = round_up(wanted, BUCKET)
        count = held if slots <= held else min(self.slots, max(slots, 2 * held))
        with torch.inference_mode(False):  # what is made here is written elsewhere, too
            grown = self._make(count, capacity)
        for old, new in zip(self.storage, grown, strict=True):
            for slot, end in enumerate(self.ends[:held]):
                self._copy(old[slot], new[slot], min(end, self.capacity))
        self.storage, self.capacity = grown, capacity

    def row_indices(self, slots: Sequence[int], rows: int, computed: int = 0) -> Tensor:
        """Flat indices `[B * rows]` into `[slots * capacity]` of the rows a pass writes.

        Args:
            computed: rows of the block in front of them.
        """
        starts = [s * self.capacity + self.lengths[s] + computed for s in slots]
        if len(starts) == 1:
            return torch.arange(starts[0], starts[0] + rows)
        return (torch.tensor(starts).unsqueeze(1) + torch.arange(rows)).flatten()

    def commit(self, slot: int, kept: Sequence[int]) -> None:
        """Keep these rows (ascending, relative to the length) of the last block, drop the rest.

        Raises:
            ContextLengthError: the slot would hold more than `max_len` positions.
        """
        base, n = self.lengths[slot], len(kept)
        if base + n > self.max_len:
            raise ContextLengthError(
                f"a slot of {self.max_len} positions is full: end the sequence or raise max_len"
            )
        if list(kept) != list(range(n)):
            self._gather(slot, [base + row for row in kept], base)
        self.lengths[slot] = base + n

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from `length` on (0 empties the slot)."""
        self.lengths[slot] = min(length, self.lengths[slot])
        if length < len(self._prompts.get(slot, ())):
            del self._prompts[slot]

    def remember(self, slot: int, prompt: Sequence[int]) -> None:
        """Note that a slot holds this prompt and nothing else, for `share` to find."""
        self._prompts[slot] = list(prompt)

    def share(self, slot: int, prompt: Sequence[int]) -> bool:
        """Fill an empty slot from another that has read the very same prompt, if there is one."""
        wanted = list(prompt)
        source = next((s for s, read in self._prompts.items() if read == wanted), None)
        if source is None:
            return False
        self.reserve([slot], len(wanted))
        for tensor in self.storage:
            self._copy(tensor[source], tensor[slot], len(wanted))
        self.lengths[slot] = len(wanted)
        self.remember(slot, wanted)
        return True

    def _copy(self, old: Tensor, new: Tensor, length: int) -> None:
        """The first positions of a slot into another."""
        new[:length].copy_(old[:length])

    def _gather(self, slot: int, source: Sequence[int], base: int) -> None:
        """Positions of a slot, ascending, to where `base` and what follows is."""
        index = torch.tensor(source).to(self.storage[0].device)
        for tensor in self.storage:
            tensor[slot, base : base + len(source)] = tensor[slot, index]


class KVCache(SlotCache):
    """Keys and values side by side: `[slots, capacity, 2 * kv_heads, D]` per layer."""

    def __init__(
        self,
        slots: int,
        max_len: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        row = (2 * kv_heads, head_dim)

        def make(slots: int, capacity: int) -> list[Tensor]:
            # Zeros, not empty: masked positions are multiplied by 0, and 0 * NaN is NaN.
            shape = (slots, capacity, *row)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

        super().__init__(slots, max_len, make)
        self._row = row
        self._viewed: list[Tensor] = []
        self._flat: list[Tensor] = []
        self._reads: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}

    def write(self, layer: int, at: Tensor, rows: Tensor) -> None:
        """Put keys and values `[N, 2 * kv_heads, D]` at flat indices, from `row_indices`."""
        self._refresh()
        self._flat[layer].index_copy_(0, at, rows)

    def read(self, start: int, end: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer keys and values `[end - start, kv_heads, length, D]` of these slots."""
        self._refresh()
        key = (start, end, length)
        if key not in self._reads:
            if len(self._reads) >= _VIEWS_KEPT:
                self._reads.clear()
            halves = [t[start:end, :length].transpose(1, 2).chunk(2, 1) for t in self.storage]
            self._reads[key] = [(keys, values) for keys, values in halves]
        return self._reads[key]

    def _refresh(self) -> None:
        """Views are made once, until the storage is another."""
        if self._viewed is not self.storage:
            self._viewed = self.storage
            self._flat = [t.view(-1, *self._row) for t in self.storage]
            self._reads = {}


class HeadCache(SlotCache):
    """Keys `[slots, kv_heads, capacity / 16, D, 16]` and values `[slots, kv_heads, capacity, D]`
    of each layer: what attention walks over lies in one piece, and keys of neighbouring positions
    lie side by side."""

    LANES = 16

    def __init__(
        self,
        slots: int,
        max_len: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        library: ctypes.CDLL,
    ) -> None:
        def make(slots: int, capacity: int) -> list[Tensor]:
            keys = (slots, kv_heads, capacity // self.LANES, head_dim, self.LANES)
            values = (slots, kv_heads, capacity, head_dim)
            return [torch.zeros(s, dtype=dtype) for _ in range(layers) for s in (keys, values)]

        super().__init__(slots, max_len, make)
        self._library = library
        self._seen: list[Tensor] = []
        self._addresses: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def addresses(self, layers: tuple[int, ...]) -> tuple[Any, Any]:
        """Where these layers' keys and values are, as arrays for C."""
        if self._seen is not self.storage:
            self._seen, self._addresses = self.storage, {}
        if layers not in self._addresses:
            array = ctypes.c_void_p * len(layers)
            keys, values = (
                array(*(self.storage[2 * n + i].data_ptr() for n in layers)) for i in (0, 1)
            )
            self._addresses[layers] = keys, values
        return self._addresses[layers]

    def _copy(self, old: Tensor, new: Tensor, length: int) -> None:
        some = -(-length // self.LANES) if old.dim() == 4 else length
        new[:, :some].copy_(old[:, :some])

    def _gather(self, slot: int, source: Sequence[int], base: int) -> None:
        values = self.storage[1]
        layers = len(self.storage) // 2
        sizes = (layers, values.shape[1], self.capacity, values.shape[-1], values.element_size())
        numbers = [ctypes.c_int64(n) for n in (*sizes, slot)]
        positions = (ctypes.c_int64 * len(source))(*source)
        rest = positions, ctypes.c_int64(len(source)), ctypes.c_int64(base)
        self._library.outpace_move(*self.addresses(tuple(range(layers))), *numbers, *rest)


def extent(length: int, rows: int) -> int:
    """How many positions attention reads for a block of `rows` behind `length`."""
    return round_up(length + max(rows, BLOCK), BUCKET)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
