"""Skipped layers: the target without some of its layers drafts.

Zhang et al., "Draft & Verify: lossless large language model acceleration via
self-speculative decoding", 2024. Which layers can be left out is found by a search
(`outpace layers`); the layers that run read the target's own keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import IncompatibleError, OptionError
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from .blueprint import Setting
from .own import OwnDrafter, check_layered, check_layers, layered

_MOST = 10_000
"""Layers in a range."""


class SkipDrafter(OwnDrafter):
    """Drafts with the target without some of its layers; 'outpace layers' finds which.

    Args:
        layers: those that are left out, the first is 0: numbers or ranges, as in "3-5.8".
    """

    requires = "Llama family"
    k = 2

    def __init__(self, layers: str) -> None:
        self._skipped = _numbers(layers)
        super().__init__(f"without layers {layers}")

    def check(self, setting: Setting) -> Sequence[str]:
        self._check(check_layered(setting.source, self.name))
        return ()

    def _check(self, count: int) -> None:
        check_layers(self._skipped, count, f"leaving out {len(self._skipped)} layers")
        if len(self._skipped) == count:
            raise IncompatibleError(f"all {count} layers are left out: keep at least one")

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        whole = layered(target, self.name)
        self._check(whole.layers)
        layers = [i for i in range(whole.layers) if i not in self._skipped]
        self.model = whole.part(layers)
        self._share(whole, cache, len(layers) / whole.layers)


def _numbers(text: str) -> list[int]:
    """Of "3-5.8": 3, 4, 5 and 8."""
    found: set[int] = set()
    for part in str(text).split("."):
        first, dash, last = part.partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
            if len(numbers) > _MOST:
                raise ValueError
            found.update(numbers)
        except ValueError:
            raise OptionError(
                f"layers to leave out are numbers and ranges like '3-5.8', not {text!r}"
            ) from None
    if not found:
        raise OptionError(f"no layer is left out by {text!r}: give one at least")
    return sorted(found)
