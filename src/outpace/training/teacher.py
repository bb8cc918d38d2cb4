"""What a draft is distilled from: rows of text, and the target's law at every position.

A draft proposes behind what the target wrote, so part of the rows are the
target's own continuations of real text (DistillSpec, Zhou et al., ICLR 2024,
compares sources of such data). Text and laws are computed once and kept on
disk; distillation then costs what training the draft costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..errors import CheckpointError, OptionError
from ..generator import Generator
from ..models.checkpoint import read_json
from ..types import SamplingParams
from .loop import Batches, TrainConfig, precision, visits
from .objectives import logits_of

_FILES = {"tokens": np.uint16, "top": np.uint16, "log_p": np.float16}
_SCORED_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachConfig:
    """How much is taught. Lengths are in tokens.

    `copied` rows are corpus text; `generated` rows begin with `prompt` tokens
    of it and are continued by the target, its temperatures taken in turn.
    `top` is the number of most probable tokens kept of each law.
    """

    copied: int = 9728
    generated: int = 6144
    length: int = 512
    prompt: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8)
    top: int = 32
    seed: int = 3

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 < self.prompt <= self.length or self.top < 1:
            raise OptionError("teaching needs rows, a prompt within their length, and a top")

    @property
    def rows(self) -> int:
        return self.copied + self.generated

    @property
    def steps(self) -> int:
        """Rows to write and rows to score."""
        return 2 * self.rows


class Lessons:
    """The rows on disk: tokens `[N, L + 1]`, top `[N, L, n]`, log_p `[N, L, n]`."""

    def __init__(self, folder: Path, config: TeachConfig) -> None:
        self._state = folder / "teach.json"
        mine = json.loads(json.dumps(asdict(config)))
        self.written = self.scored = 0
        if self._state.exists():
            state = read_json(self._state)
            if state["config"] != mine:
                raise CheckpointError(f"{folder} was taught otherwise: use another folder")
            self.written, self.scored = state["written"], state["scored"]
        self._config = mine
        folder.mkdir(parents=True, exist_ok=True)
        n, length = config.rows, config.length
        shapes = {
            "tokens": (n, length + 1),
            "top": (n, length, config.top),
            "log_p": (n, length, config.top),
        }
        arrays = {
            name: np.lib.format.open_memmap(
                folder / f"{name}.npy",
                mode="r+" if self._state.exists() else "w+",
                dtype=kind,
                shape=shapes[name],
            )
            for name, kind in _FILES.items()
        }
        self.tokens, self.top, self.log_p = arrays["tokens"], arrays["top"], arrays["log_p"]
        self.save()

    @property
    def steps(self) -> int:
        return self.written + self.scored

    def save(self) -> None:
        for array in (self.tokens, self.top, self.log_p):
            array.flush()
        part = self._state.with_suffix(".part")
        state = {"config": self._config, "written": self.written, "scored": self.scored}
        part.write_text(json.dumps(state))
        part.replace(self._state)


def teach(
    target: Generator,
    model: nn.Module,
    stream: np.ndarray,
    config: TeachConfig,
    folder: Path,
    *,
    report: Callable[[dict[str, float]], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Write the rows, then score them; resumes what `folder` holds. True when all is done.

    Args:
        target: generates the continuations.
        model: the same target as it is trained, maps tokens to logits.
        stream: corpus token ids, 1-D.
    """
    lessons = Lessons(folder, config)
    model.eval()
    while lessons.steps < config.steps:
        if lessons.written < config.rows:
            _write(lessons, target, stream, config)
        else:
            _score(lessons, model, config)
        lessons.save()
        report({"step": lessons.steps})
        if should_stop():
            break
    return lessons.steps == config.steps


def _write(lessons: Lessons, target: Generator, stream: np.ndarray, config: TeachConfig) -> None:
    """The next rows: all of the corpus's at once, the target's by batches."""
    first = lessons.written
    starts = np.random.default_rng(config.seed).permutation(len(stream) // config.length - 1)
    if len(starts) < config.rows:
        raise OptionError(
            f"the corpus has {len(starts)} rows of {config.length} tokens, {config.rows} are asked"
        )
    starts = starts[: config.rows] * config.length
    if first < config.copied:
        for row in range(config.copied):
            lessons.tokens[row] = stream[starts[row] : starts[row] + config.length + 1]
        lessons.written = config.copied
        return
    last = min(config.rows, first + target.engine.free_slots)
    prompts = [stream[s : s + config.prompt].tolist() for s in starts[first:last]]
    params = [
        SamplingParams(
            temperature=config.temperatures[row % len(config.temperatures)],
            seed=row,
            max_new_tokens=config.length + 1 - config.prompt,
            eos_token_ids=(),
        )
        for row in range(first, last)
    ]
    for row, prompt, result in zip(
        range(first, last), prompts, target.generate(prompts, params=params), strict=True
    ):
        lessons.tokens[row] = [*prompt, *result.token_ids]
    lessons.written = last


@torch.no_grad()
def _score(lessons: Lessons, model: nn.Module, config: TeachConfig) -> None:
    first, last = lessons.scored, min(config.rows, lessons.scored + _SCORED_AT_ONCE)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(lessons.tokens[first:last, :-1].astype(np.int64)).to(device)
    with precision(device):
        log_p = torch.log_softmax(logits_of(model, tokens), dim=-1)
    log_p, top = log_p.topk(config.top, dim=-1)
    lessons.top[first:last] = top.cpu().numpy()
    lessons.log_p[first:last] = log_p.cpu().numpy()
    lessons.scored = last


def lessons_of(folder: Path, teaching: TeachConfig, config: TrainConfig) -> Batches:
    """Batches `(tokens, top, log_p)` for `objectives.forward_kl`, all rows once an epoch.

    Raises:
        OptionError: the folder does not hold all rows, scored.
    """
    if not (folder / "teach.json").exists():
        raise OptionError(f"{folder} is missing: run the stage 'teach' first")
    lessons = Lessons(folder, teaching)
    if lessons.steps < teaching.steps:
        raise OptionError(f"{folder} is not finished: run the stage 'teach' again")
    rows = config.batch_tokens // teaching.length

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        picked = [i for _, i in visits((config.seed,), teaching.rows, step * rows, rows)]
        return (
            torch.from_numpy(lessons.tokens[picked].astype(np.int64)),
            torch.from_numpy(lessons.top[picked].astype(np.int64)),
            torch.from_numpy(lessons.log_p[picked]),
        )

    return batch
