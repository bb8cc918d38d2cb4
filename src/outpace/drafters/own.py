"""Drafting with the target's own layers, on the target's own cache.

Such a drafter needs no prefill and never falls behind: what the target has
committed lies in its cache. What it drafts it writes behind that, as any pass
does, and the target's pass over the draft writes the same rows anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import IncompatibleError
from ..models.base import Layered
from ..models.cache import SlotCache
from ..models.loading import Source
from ..sampling import DraftNoise, Warp
from ..types import Draft
from .base import Commit, Context
from .model import ModelDrafter

OTHERS = "'ngram', 'suffix' and 'recycling' draft for any model"


class OwnDrafter(ModelDrafter):
    """Drafts with what `start` makes of the target, as `self.model`."""

    reads = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._drafted = {}
        self._grown = {}
        self._model_taps = ()
        self._states = []

    def _share(self, target: Layered, cache: SlotCache, cost: float) -> None:
        """Called at the end of `start`.

        Args:
            cost: what it reads of weights, of what the target reads.
        """
        self._vocab_size = target.vocab_size
        self._cache = cache
        self._rolls_out = hasattr(self.model, "rollout")
        self.cost = cost

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        pass

    def observe(self, commits: Sequence[Commit]) -> None:
        pass

    def close(self, slot: int) -> None:
        pass

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        held = [self._cache.lengths[c.slot] for c in contexts]
        try:
            return super().draft(contexts, budgets, warp, noise)
        finally:
            for context, length in zip(contexts, held, strict=True):
                self._cache.truncate(context.slot, length)


def check_layers(layers: Sequence[int], count: int, what: str) -> None:
    """Whether a model of `count` layers has these.

    Raises:
        IncompatibleError: it has not.
    """
    wrong = [i for i in layers if not 0 <= i < count]
    if wrong:
        raise IncompatibleError(
            f"{what} needs layer {wrong[0]}, and the target has {count}, from 0 to {count - 1}"
        )


def check_layered(source: Source, what: str) -> int:
    """How many layers a target has that can run alone.

    Raises:
        IncompatibleError: it is not run layer by layer.
    """
    if source.lean is None:
        raise IncompatibleError(
            f"{what} runs single layers, which is for the Llama family, and {source.name} is not "
            f"of it ({source.reason}): {OTHERS}"
        )
    return source.lean.layers


def layered(target: object, what: str) -> Layered:
    """The target, if its layers can run alone.

    Raises:
        IncompatibleError: they cannot.
    """
    if not isinstance(target, Layered):
        raise IncompatibleError(
            f"{what} runs single layers, and {type(target).__name__} runs whole models: {OTHERS}"
        )
    return target
