"""Early exit: the target's first layers and its head draft, the others verify.

Elhoushi et al., "LayerSkip: enabling early exit inference and self-speculative
decoding", 2024, section 4.3. Drafting leaves the first layers' keys and values in the
target's cache and keeps their states, so the target's pass over the draft begins
behind them, and no layer runs twice for a token. (Recorded CUDA passes are whole, and so is
the pass over a tree, of which not every node was read: there the layers that draft cost
what those of any drafter do.)

How much is accepted depends on whether the target was trained to exit early.
Where it was not, an adapter may help: a small layer behind the exit, in a folder
with `adapter.safetensors` that holds `norm.weight` [H] and `proj.weight` [H, H]; what
it gives, W norm(h), is added to the states before the target's final norm.

What a checkpoint was trained for it may say itself: see `trained_exit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, IncompatibleError, OptionError, first_line
from ..models.base import Adapter, LanguageModel
from ..models.cache import SlotCache
from ..models.checkpoint import read_json
from ..models.loading import Source
from ..sampling import DraftNoise, Warp
from ..trees import chain
from ..types import Draft, Resume, check_whole_number
from .base import Context
from .blueprint import Setting, path_of
from .own import OwnDrafter, check_layered, layered

ADAPTER = "adapter.safetensors"

LAYERSKIP = {
    "layerskip-llama2-7b": 4,
    "layerskip-llama2-70b": 10,
    "layerskip-llama3-8b": 4,
    "layerskip-llama3.2-1b": 4,
}
"""Checkpoints of LayerSkip's authors, and the exits that they measured them with
(https://huggingface.co/blog/layerskip). The checkpoints themselves do not say so."""


class EarlyExitDrafter(OwnDrafter):
    """Drafts with the target's first layers and its head; the others verify what these began.

    Args:
        layers: how many draft.
        adapter: folder of one, trained for this target and exit.
    """

    requires = "Llama family"
    k = 2

    def __init__(self, layers: int, adapter: str | None = None) -> None:
        check_whole_number("layers", layers, 1, "that draft")
        super().__init__(f"early exit behind layer {layers}")
        self._exit = layers
        self._folder = None if adapter is None else path_of(adapter)
        self._adapter = None if self._folder is None else read_adapter(self._folder)

    def check(self, setting: Setting) -> Sequence[str]:
        count = check_layered(setting.source, self.name)
        assert setting.source.lean is not None
        self._check(count, setting.source.lean.hidden_size)
        return ()

    def _check(self, count: int, hidden: int) -> None:
        if self._exit >= count:
            raise IncompatibleError(
                f"an exit behind {self._exit} layers leaves nothing to verify with, as the target "
                f"has {count}: exit earlier, e.g. 'early-exit:{max(1, count // 4)}'"
            )
        if self._adapter is not None and self._adapter.norm.shape[0] != hidden:
            raise IncompatibleError(
                f"the adapter in {self._folder} is for states of {self._adapter.norm.shape[0]} "
                f"numbers, the target's have {hidden}: give one that was trained for this target"
            )

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        whole = layered(target, self.name)
        self._check(whole.layers, whole.hidden_size)
        self.model = whole.part(range(self._exit), self._adapter)
        if whole.resumes and self.builder is None:
            self.keeps_states, self.begun = True, self._exit / whole.layers
            self._model_taps = (self._exit - 1,)
        self._share(whole, cache, self._exit / whole.layers)

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        if not self.keeps_states or self.builder is not None:
            draft = super().draft(contexts, budgets, warp, noise)
            self._states = []
            return draft
        # Who drafts nothing runs along, so that its pass has begun, too.
        some = [max(1, budget) for budget in budgets]
        draft = super().draft(contexts, some, warp, noise)
        states, self._states = self._states, []
        trees = zip(draft.trees, budgets, strict=True)
        draft = replace(draft, trees=tuple(t if b else chain(0) for t, b in trees))
        if not states or len(states[0]) < len(contexts):
            return draft
        return replace(draft, resume=Resume(self._exit, torch.cat(states, 1)))


def read_adapter(folder: Path) -> Adapter:
    """An adapter as it was written.

    Raises:
        CheckpointError: there is none, or it is not one.
    """
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / ADAPTER)
        adapter = Adapter(tensors["norm.weight"], tensors["proj.weight"])
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no adapter that can be read ({first_line(error)}): give a folder with "
            "adapter.safetensors, of norm.weight and proj.weight"
        ) from error
    if adapter.weight.shape != (len(adapter.norm), len(adapter.norm)):
        raise CheckpointError(
            f"the adapter in {folder} has proj.weight {list(adapter.weight.shape)} beside "
            f"norm.weight {list(adapter.norm.shape)}: they must be [H, H] and [H]"
        )
    return adapter


@dataclass(frozen=True, slots=True)
class TrainedExit:
    """An exit that a checkpoint was trained for.

    Attributes:
        layers: how many draft.
        adapter: the folder of its adapter, if it has one.
        says: what tells so, in a few words.
    """

    layers: int
    adapter: Path | None
    says: str


def trained_exit(source: Source) -> TrainedExit | None:
    """The exit that a checkpoint was trained for, if anything tells of one.

    That is an adapter in its folder which names its exit, as `outpace train exit` writes it, else
    `assistant_early_exit` in `generation_config.json`, else the name of a checkpoint that is known.
    No weights are read.

    Raises:
        CheckpointError: there is an adapter that cannot be read, or a configuration.
        OptionError: what it names is no number of layers.
    """
    if (source.folder / ADAPTER).is_file():
        layers = _exit_of_adapter(source)
        return TrainedExit(layers, source.folder, "an adapter lies in its folder")
    path = source.folder / "generation_config.json"
    named: Any = read_json(path).get("assistant_early_exit") if path.is_file() else None
    if named is not None:
        layers = check_whole_number("assistant_early_exit", named, 1, "that draft")
        return TrainedExit(layers, None, "its generation_config.json names this exit")
    parts = (source.name, *source.folder.absolute().parts[-3:])
    for part in parts:
        layers = LAYERSKIP.get(part.replace("--", "/").rpartition("/")[2].lower(), 0)
        if layers:
            return TrainedExit(layers, None, "LayerSkip's authors measured it with this exit")
    return None


def _exit_of_adapter(source: Source) -> int:
    from safetensors import safe_open

    path = source.folder / ADAPTER
    try:
        with safe_open(path, framework="pt") as handle:
            said = (handle.metadata() or {}).get("layers", "")
            shape = handle.get_slice("norm.weight").get_shape()
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): write it again"
        ) from error
    if not said.isdecimal():
        raise OptionError(
            f"{path} does not say which exit it is for: draft with "
            f"'early-exit:LAYERS,{source.folder}'"
        )
    if source.lean is not None and shape != [source.lean.hidden_size]:
        raise CheckpointError(
            f"{path} is for states of {shape[0]} numbers, the target's have "
            f"{source.lean.hidden_size}: give one that was trained for this target"
        )
    return int(said)
