"""Attention masks over slots: what each row of a block may look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import BLOCK, BUCKET, round_up

_COLUMNS = 8192
"""Positions for which masks are kept."""


def visible(starts: Tensor, rows: int, length: int, block: Tensor | None) -> Tensor:
    """`[B, T, length]` bool: the committed positions, then the block's causal or tree part.

    Args:
        starts: `[B]` int64, committed positions of each slot; the block lies behind them.
        rows: T, of a causal block.
        block: `[B, T, N]` bool ancestor masks of the last T of a block's N rows; None is causal.
    """
    at = torch.arange(length, device=starts.device)
    base = starts.view(-1, 1, 1)
    if block is None:
        return at <= base + torch.arange(rows, device=starts.device).view(1, -1, 1)
    row, inside = _block_rows(starts, block.shape[2], at)
    seen = block.gather(2, row.unsqueeze(1).expand(-1, block.shape[1], -1))
    return (at < base) | (seen & inside.unsqueeze(1))


def within(window: int, starts: Tensor, positions: Tensor, length: int, rows: int) -> Tensor:
    """`[B, rows, length]` bool: keys less than `window` positions before each of the last rows.

    A committed key's position is its index; a block key's is in `positions`
    `[B, N]` (in a tree several rows stand at one position).
    """
    at = torch.arange(length, device=positions.device)
    row, inside = _block_rows(starts, positions.shape[1], at)
    key = torch.where(inside, positions.gather(1, row), at)
    return positions[:, -rows:].unsqueeze(2) - key.unsqueeze(1) < window


def _block_rows(starts: Tensor, rows: int, at: Tensor) -> tuple[Tensor, Tensor]:
    """The block's row at each index `[B, length]`, and whether there is one."""
    row = at - starts.unsqueeze(1)
    return row.clamp(0, rows - 1), (row >= 0) & (row < rows)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, 1, T, length]`: 0 where seen, -inf elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)


class CausalTable:
    """Additive masks of short causal blocks, as views of one table.

    Seen from the end of what attention reads, every sequence looks the same: a
    block's rows begin within the last `BUCKET + BLOCK` positions, and each row
    sees one position more than the row before.

    Args:
        repeats: rows per position (query heads that share keys and values).
    """

    def __init__(self, repeats: int, dtype: torch.dtype, device: torch.device) -> None:
        self._repeats, self._dtype, self._device = repeats, dtype, device
        self._table = torch.empty(0, 0)

    @staticmethod
    def serves(rows: int, length: int) -> bool:
        """Whether the table has masks of such blocks: longer ones do not fit, and long texts would
        make it large."""
        return rows <= BLOCK and length <= _COLUMNS

    def __call__(self, lengths: Sequence[int], rows: int, length: int, padding: int) -> Tensor:
        """`additive(visible(...))` `[B, 1, rows * repeats + padding, length]`.

        Args:
            lengths: committed positions of each slot.
            length: positions read, `extent(n, rows)` of each of the lengths.
            padding: rows behind the block's own; each sees at least what the last row sees.
        """
        if self._table.shape[1] < length or len(self._table) < self._needed(padding):
            self._grow(length, padding)
        span, width = BUCKET + BLOCK, self._table.shape[1]
        count = rows * self._repeats + padding
        columns = self._table.narrow(1, width - length, length)
        views = [columns.narrow(0, (n + span - length) * self._repeats, count) for n in lengths]
        mask = views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)
        return mask.unsqueeze(1)

    def _needed(self, padding: int) -> int:
        return (BUCKET + BLOCK) * self._repeats + padding

    def _grow(self, length: int, padding: int) -> None:
        height = max(self._needed(padding), len(self._table))
        width = max(round_up(length, 4 * BUCKET), self._table.shape[1])
        last = torch.arange(height, device=self._device) // self._repeats
        last = (last + width - BUCKET - BLOCK).unsqueeze(1)
        at = torch.arange(width, device=self._device)
        self._table = additive((at <= last).unsqueeze(0), self._dtype)[0, 0]
