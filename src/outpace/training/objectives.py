"""Objectives: functions of (model, *batch) that return a scalar loss in nats per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Objective = Callable[..., Tensor]


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token logits `[B, T, V]` in fp32 at tokens `[B, T]`."""
    output: Any = model(input_ids=tokens, use_cache=False)
    logits: Tensor = output.logits
    return logits.float()


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next token, tokens `[B, T + 1]`."""
    logits = logits_of(model, tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def forward_kl(data_weight: float = 0.1) -> Objective:
    """Distillation: KL(p ‖ q) per position, plus a share of the text's own cross entropy.

    The objective takes tokens `[B, T + 1]` and, of the target's law p at
    temperature 1, the most probable tokens `[B, T, N]` with their log
    probabilities; what is left of p and q is compared as one further outcome,
    so the value is a lower bound of the divergence and equal to it at N = V.
    DistillSpec (Zhou et al., ICLR 2024) compares divergences; the forward KL
    is its most robust choice for sampling at temperature near 1.
    """

    def loss(model: nn.Module, tokens: Tensor, top: Tensor, log_p: Tensor) -> Tensor:
        log_q = torch.log_softmax(logits_of(model, tokens[:, :-1]), dim=-1)
        log_p = _with_the_rest(log_p.float())
        kl = (log_p.exp() * (log_p - _with_the_rest(log_q.gather(-1, top)))).sum(-1).mean()
        data = F.nll_loss(log_q.flatten(0, 1), tokens[:, 1:].flatten())
        return kl + data_weight * data

    return loss


def _with_the_rest(log_p: Tensor) -> Tensor:
    """Log probabilities `[..., N]` with that of all other tokens behind, `[..., N + 1]`."""
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(1e-6)
    return torch.cat([log_p, rest.log()], dim=-1)
