"""An adapter for an early exit: a small layer that makes the target's first layers draft better.

The target stays as it is. What its first layers give, h, becomes h + W norm(h) before
its own final norm and head, and W, which begins at 0, is trained towards the
target's law at the same position (forward KL at temperature 1, as in `objectives`).
Zhang et al., "Kangaroo: lossless self-speculative decoding via double early
exiting", NeurIPS 2024, train an adapter of attention for the same purpose; this
one has no attention, so it needs no cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafters.early_exit import ADAPTER
from ..errors import IncompatibleError, OptionError
from ..models.base import Adapter, LanguageModel, Layered
from ..models.lean import EMBEDDING, HEAD
from ..models.loading import Source
from .loop import visits


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What a run needs to know. A step reads `rows` windows of `length` tokens."""

    layer: int
    steps: int = 300
    rows: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layer", "steps", "rows", "length"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")

    def windows_of(self, tokens: int, context_length: int) -> int:
        """Windows in so many tokens.

        Raises:
            OptionError: fewer than a step needs, or longer than a context.
        """
        if self.length > context_length:
            raise OptionError(
                f"windows of {self.length} tokens are longer than the target's context of "
                f"{context_length}: make them shorter"
            )
        count = (tokens - 1) // self.length
        if count < self.rows:
            raise OptionError(
                f"{tokens} tokens are too few for {self.rows} windows of {self.length}: give more "
                "text"
            )
        return count


class _Exit(nn.Module):
    """h + W norm(h), then the target's own norm and head, which are not trained."""

    def __init__(self, final_norm: Tensor, head: Tensor, eps: float) -> None:
        super().__init__()
        hidden = len(final_norm)
        self.norm = nn.Parameter(torch.ones(hidden, device=head.device))
        self.weight = nn.Parameter(torch.zeros(hidden, hidden, device=head.device))
        self._final_norm, self._head, self._eps = final_norm, head, eps

    def forward(self, h: Tensor) -> Tensor:
        h = h + F.rms_norm(h, h.shape[-1:], self.norm, self._eps) @ self.weight.T
        return F.rms_norm(h, h.shape[-1:], self._final_norm, self._eps) @ self._head.T


def train_adapter(
    target: LanguageModel,
    source: Source,
    tokens: np.ndarray,
    config: AdapterConfig,
    report: Callable[[dict[str, float]], None] = lambda row: None,
) -> Adapter:
    """Train an adapter for the exit behind `config.layer` layers.

    Args:
        source: the target's checkpoint.
        tokens: a stream of token ids, 1-D.
        report: called after each step with its number, loss (nats per token) and
            the acceptance rate at temperature 1, of the step's own windows.

    Raises:
        IncompatibleError: the target is not run layer by layer, or has too few layers.
        OptionError: too few tokens.
    """
    if not isinstance(target, Layered) or source.lean is None:
        raise IncompatibleError("adapters are for the Llama family, whose layers can run alone")
    if config.layer >= target.layers:
        raise IncompatibleError(
            f"an exit behind {config.layer} layers needs a target of more, this one has "
            f"{target.layers}"
        )
    count = config.windows_of(len(tokens), target.context_length)
    place, lean = target.device, source.lean

    def load(name: str) -> Tensor:
        return source.weights.load(name, torch.float32, place)

    head = load(EMBEDDING if lean.tied else HEAD)
    exit_ = _Exit(load("model.norm.weight"), head, lean.norm_eps)
    optim = torch.optim.AdamW(exit_.parameters(), lr=config.learning_rate, weight_decay=0.0)
    for step in range(config.steps):
        for group in optim.param_groups:
            group["lr"] = config.learning_rate * min(1.0, 2 * (1 - step / config.steps))
        picked = visits((config.seed,), count, step * config.rows, config.rows)
        windows = [tokens[i * config.length : (i + 1) * config.length] for _, i in picked]
        h, p = _seen(target, [w.tolist() for w in windows], config.layer)
        log_q = exit_(h).log_softmax(-1)
        loss = F.kl_div(log_q, p, reduction="batchmean")
        optim.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        alpha = float(torch.minimum(log_q.detach().exp(), p).sum(-1).mean())
        report({"step": step + 1, "train_loss": loss.item(), "alpha": alpha})
    return Adapter(exit_.norm.detach().cpu(), exit_.weight.detach().cpu())


@torch.no_grad()
def _seen(target: LanguageModel, windows: Sequence[list[int]], layer: int) -> tuple[Tensor, Tensor]:
    """States behind a layer `[N, H]` and the target's law `[N, V]`, of all tokens of windows."""
    states, laws = [], []
    cache = target.new_cache(1, len(windows[0]))
    positions = torch.arange(len(windows[0])).unsqueeze(0)
    for window in windows:
        out = target.forward(torch.tensor([window]), positions, cache, [0], taps=[layer - 1])
        assert out.logits is not None
        states.append(out.taps[0][0].float().clone())
        laws.append(out.logits[0].float().softmax(-1))
    return torch.cat(states), torch.cat(laws)


def write_adapter(adapter: Adapter, folder: Path, layers: int | None = None) -> None:
    """Save it where `early-exit:LAYERS,FOLDER` finds it.

    Args:
        layers: the exit that it is for, to be written into it.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"norm.weight": adapter.norm, "proj.weight": adapter.weight}
    said = None if layers is None else {"layers": str(layers)}
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / ADAPTER, said)
