"""Attention masks over slots: what each row of a block may look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    lengths: Sequence[int], rows: int, length: int, block: Tensor | None, device: torch.device
) -> Tensor:
    """`[B, T, length]` bool: the committed positions, then the block's causal or tree part.

    Args:
        lengths: committed positions of each slot; the block lies behind them.
        block: `[B, T, T]` bool ancestor masks; None is causal.
    """
    at = torch.arange(length, device=device)
    base = torch.tensor(lengths, device=device).view(-1, 1, 1)
    if block is None:
        return at <= base + torch.arange(rows, device=device).view(1, -1, 1)
    seen = (at < base).repeat(1, rows, 1)
    for b, n in enumerate(lengths):
        seen[b, :, n : n + rows] = block[b]
    return seen


def within(window: int, lengths: Sequence[int], positions: Tensor, length: int) -> Tensor:
    """`[B, T, length]` bool: keys less than `window` positions before the row.

    A committed key's position is its index; a block key's is in `positions`
    `[B, T]` (in a tree several rows stand at one position).
    """
    rows = positions.shape[1]
    at = torch.arange(length, device=positions.device).repeat(len(lengths), 1)
    for b, n in enumerate(lengths):
        at[b, n : n + rows] = positions[b]
    return positions.unsqueeze(2) - at.unsqueeze(1) < window


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, 1, T, length]`: 0 where seen, -inf elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)


def causal(
    lengths: Sequence[int],
    rows: int,
    length: int,
    repeats: int,
    padding: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """`additive(visible(...))` for a causal block, in half the operations.

    The rows are repeated (for query heads that share keys), and rows that see
    everything are put behind them: `[B, 1, repeats * T + padding, length]`.
    """
    last = [[*range(n, n + rows)] * repeats + [length] * padding for n in lengths]
    limit = torch.tensor(last, device=device).view(len(lengths), 1, -1, 1)
    mask = torch.zeros(*limit.shape[:3], length, dtype=dtype, device=device)
    return mask.masked_fill_(torch.arange(length, device=device) > limit, -torch.inf)
