"""Objectives: functions of (model, tokens) that return a scalar loss in nats per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Objective = Callable[[nn.Module, Tensor], Tensor]


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token logits `[B, T-1, V]` in fp32 for tokens `[B, T]`."""
    output: Any = model(input_ids=tokens[:, :-1], use_cache=False)
    logits: Tensor = output.logits
    return logits.float()


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token, tokens `[B, T]`."""
    return F.cross_entropy(_logits(model, tokens).flatten(0, 1), tokens[:, 1:].flatten())


def forward_kl(teacher: nn.Module, data_weight: float = 0.1) -> Objective:
    """Distillation: KL(p ‖ q) per position, plus a share of the data's own cross entropy.

    p is the teacher's (the target's) distribution at temperature 1, q the
    student's. DistillSpec (Zhou et al., ICLR 2024) compares divergences; the
    forward KL is its most robust choice for sampling at temperature near 1.
    """

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            p = torch.softmax(_logits(teacher, tokens), dim=-1)  # [B, T-1, V]
        log_q = torch.log_softmax(_logits(model, tokens), dim=-1)
        kl = (torch.xlogy(p, p) - p * log_q).sum(-1).mean()
        data = F.nll_loss(log_q.flatten(0, 1), tokens[:, 1:].flatten())
        return kl + data_weight * data

    return loss
