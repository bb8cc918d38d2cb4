"""One training loop for every model that outpace trains.

Muon (Jordan et al., 2024) moves the hidden matrices, AdamW everything else.
The learning rate is warmed up, stays constant, then falls linearly to zero
over the rest of the run (warmup-stable-decay), so a run can be made
longer after the fact as long as it has not begun to decay. Everything that
decides a step (data order included) is a function of the step number: a run
that was stopped and resumed sees exactly the data an uninterrupted one sees.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CheckpointError, OptionError, first_line
from ..models.linear import multiplies_bf16
from .muon import Muon
from .objectives import Objective, next_token

_TOKENS_AT_ONCE = 2100  # what a pass works on stays near the caches of a CPU core
LOG_FIELDS = ("step", "tokens", "train_loss", "held_out_loss", "learning_rate", "tokens_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What a run needs to know. Lengths are in tokens, `batch_tokens` per step.

    `long_length` replaces `length` in the last `long_fraction` of the steps:
    short rows are cheap, and the end of a run is enough to learn long contexts.
    """

    steps: int
    batch_tokens: int = 8192
    length: int = 256
    long_length: int = 512
    long_fraction: float = 0.25
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 60
    decay_fraction: float = 0.6
    seed: int = 0
    evaluate_every: int = 50
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_tokens < max(self.length, self.long_length):
            raise OptionError("a run needs at least one step and one row of tokens per step")

    @property
    def decay_start(self) -> int:
        return int(self.steps * (1 - self.decay_fraction))

    def learning_rate_factor(self, step: int) -> float:
        """Multiplier of both learning rates at `step`, in [0, 1]."""
        warm = min(1.0, (step + 1) / self.warmup)
        left = (self.steps - step) / max(1, self.steps - self.decay_start)
        return min(warm, left, 1.0)

    def row_length(self, step: int) -> int:
        long = step >= int(self.steps * (1 - self.long_fraction))
        return self.long_length if long else self.length


Batches = Callable[[int], tuple[Tensor, ...]]
"""The tensors of one step, rows first: what the objective takes behind the model.
A function of the step's number alone, so that a resumed run sees the same."""


def windows(tokens: np.ndarray, config: TrainConfig) -> Batches:
    """Windows `[B, length + 1]` of a stream of token ids, 1-D.

    The stream is cut at an offset that changes every epoch, and the windows
    are visited in a fresh order each epoch.
    """

    def batch(step: int) -> tuple[Tensor, ...]:
        length = config.row_length(step)
        rows = config.batch_tokens // length
        count = (len(tokens) - 1) // length - 1
        if count < rows:
            raise OptionError(f"the corpus has {len(tokens)} tokens, too few for one batch")
        picked = []
        for epoch, index in visits((config.seed, length), count, step * rows, rows):
            offset = np.random.default_rng((config.seed, length, epoch)).integers(length)
            start = int(offset) + index * length
            picked.append(tokens[start : start + length + 1])
        return (torch.from_numpy(np.stack(picked).astype(np.int64)),)

    return batch


def visits(key: tuple[int, ...], count: int, first: int, number: int) -> Iterator[tuple[int, int]]:
    """(epoch, item) of `number` visits from the `first`: all items once an epoch, in new order."""
    for visit in range(first, first + number):
        epoch, within = divmod(visit, count)
        yield epoch, int(_order((*key, epoch, 1), count)[within])


@lru_cache(maxsize=2)
def _order(key: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.default_rng(key).permutation(count)


def precision(device: torch.device) -> torch.autocast:
    """The precision of training: bf16 products where they are fast, else fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bf16(device))


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for embeddings, head and norms."""
    hidden: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (hidden if matrix else other).append(parameter)
    return [
        Muon(
            hidden,
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            dtype=torch.bfloat16 if multiplies_bf16(hidden[0].device) else None,
        ),
        torch.optim.AdamW(other, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def held_out_loss(
    model: nn.Module, tokens: np.ndarray, length: int, rows: int = 64, device: str = "cpu"
) -> float:
    """Mean next-token loss (nats) over up to `rows` evenly spaced held-out windows."""
    model.eval()
    starts = np.linspace(0, len(tokens) - length - 1, rows).astype(int)
    losses = []
    for group in np.array_split(starts, max(1, rows // 16)):
        batch = np.stack([tokens[s : s + length + 1] for s in group]).astype(np.int64)
        with precision(torch.device(device)):
            losses.append(next_token(model, torch.from_numpy(batch).to(device)).item() * len(group))
    model.train()
    return sum(losses) / len(starts)


def train(
    model: nn.Module,
    batches: Batches,
    held_out: np.ndarray,
    config: TrainConfig,
    folder: Path,
    *,
    objective: Objective = next_token,
    device: str = "cpu",
    report: Callable[[dict[str, float]], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train `model` in place; resume from `folder` when it holds a checkpoint.

    Args:
        batches: the data of a step, for example `windows` of a stream.
        held_out: stream of token ids, 1-D, on which next-token loss is measured.
        folder: receives `checkpoint.pt` (atomically replaced) and `log.csv`.
        report: called after each step with the row of the log.
        should_stop: asked after each step; True saves and returns early.

    Returns:
        Whether the run reached its last step.

    Raises:
        CheckpointError: the checkpoint belongs to another configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.to(device).train()
    optims = optimizers(model, config)
    step = _resume(model, optims, config, folder)
    while step < config.steps:
        began = time.perf_counter()
        factor = config.learning_rate_factor(step)
        for optim, lr in zip(optims, (config.muon_lr, config.adamw_lr), strict=True):
            for group in optim.param_groups:
                group["lr"] = lr * factor
        batch = tuple(tensor.to(device) for tensor in batches(step))
        loss = _backward(model, batch, objective, device)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        if not math.isfinite(loss):
            raise CheckpointError(f"the loss is {loss} at step {step}: lower the learning rate")
        step += 1
        seconds = time.perf_counter() - began
        row = {
            "step": step,
            "tokens": step * config.batch_tokens,
            "train_loss": loss,
            "held_out_loss": math.nan,
            "learning_rate": config.muon_lr * factor,
            "tokens_per_s": config.batch_tokens / seconds,
        }
        last = step == config.steps or should_stop()
        if step % config.evaluate_every == 0 or last:
            row["held_out_loss"] = held_out_loss(model, held_out, config.length, device=device)
        _log(folder / "log.csv", row)
        report(row)
        if step % config.save_every == 0 or last:
            _save(model, optims, config, step, folder)
        if last:
            break
    return step >= config.steps


def _backward(
    model: nn.Module, batch: tuple[Tensor, ...], objective: Objective, device: str
) -> float:
    """Accumulate gradients over micro-batches; return the mean loss."""
    total = 0.0
    rows = max(1, _TOKENS_AT_ONCE // batch[0].shape[1])
    for part in zip(*(torch.split(tensor, rows) for tensor in batch), strict=True):
        with precision(torch.device(device)):
            loss = objective(model, *part)
        share = len(part[0]) / len(batch[0])
        (loss * share).backward()  # type: ignore[no-untyped-call]
        total += loss.item() * share
    return total


def _resume(
    model: nn.Module, optims: list[torch.optim.Optimizer], config: TrainConfig, folder: Path
) -> int:
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): delete it to begin again"
        ) from error
    mine, theirs = asdict(config), saved["config"]
    free = {
        "steps",
        "save_every",
        "evaluate_every",
        "decay_fraction",
        "long_length",
        "long_fraction",
    }
    changed = {k for k in mine if k not in free and mine[k] != theirs.get(k)}
    if changed:
        raise CheckpointError(
            f"{path} was made with another {', '.join(sorted(changed))}: "
            "use the same values or another folder"
        )
    before = TrainConfig(**{k: v for k, v in theirs.items() if k in mine})
    if saved["step"] > before.decay_start and config.decay_start != before.decay_start:
        raise CheckpointError(
            f"{path} has begun to decay its learning rate: keep {before.steps} steps and its decay"
        )
    model.load_state_dict(saved["model"])
    for optim, state in zip(optims, saved["optimizers"], strict=True):
        optim.load_state_dict(state)
    return int(saved["step"])


def _save(
    model: nn.Module,
    optims: list[torch.optim.Optimizer],
    config: TrainConfig,
    step: int,
    folder: Path,
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optims],
        "config": asdict(config),
        "step": step,
    }
    part = folder / "checkpoint.part"
    torch.save(state, part)
    part.replace(folder / "checkpoint.pt")


def _log(path: Path, row: dict[str, float]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as handle:
        writer = csv.writer(handle)
        if new:
            writer.writerow(LOG_FIELDS)
        writer.writerow([f"{row[k]:.6g}" for k in LOG_FIELDS])
