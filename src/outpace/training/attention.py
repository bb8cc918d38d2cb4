"""Causal attention for training on a CPU.

PyTorch's fused attention has a slow bf16 backward on CPUs; two matrix products
and a softmax over short rows take about half its time. Registered with
transformers under `NAME`; positions are causal, rows are full, nothing is
padded, so no mask is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "outpace_training"


def causal_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output `[B, T, heads, D]` in transformers' calling convention."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    length = query.shape[2]
    scores = (query * scaling) @ key.transpose(-1, -2)
    future = torch.full((length, length), float("-inf"), dtype=scores.dtype, device=scores.device)
    weights = torch.softmax(scores + future.triu(1), dim=-1, dtype=scores.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, causal_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
