"""The target's own weights in fewer bits draft for it.

Zhao et al., "QSpec: speculative decoding with complementary quantization schemes",
2024; Tiwari et al., "QuantSpec: self-speculative decoding with hierarchical
quantized KV cache", 2025. Matrices are rounded as for a quantised target
(`models/quantize.py`); embedding, norms, and keys and values are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CompilerError, IncompatibleError, first_line
from ..kernels import load_library
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..models.compiled import CompiledDecoder
from ..models.loading import Progress
from ..models.quantize import QUANTIZATIONS
from .base import Drafter
from .blueprint import Setting
from .model import share_of
from .own import OTHERS, OwnDrafter, check_layered


class QuantizedDrafter(OwnDrafter):
    """Drafts with the target's own weights in fewer bits, on its own cache."""

    requires = "Llama family, CPU"

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self._how = QUANTIZATIONS[kind]
        self._target: LanguageModel | None = None  # what `model` was made of

    def check(self, setting: Setting) -> Sequence[str]:
        check_layered(setting.source, self.name)
        if setting.device.type != "cpu" or setting.compile is False:
            here = setting.device.type == "cpu"
            where = "without compiled kernels" if here else f"on {setting.device}"
            raise IncompatibleError(
                f"{self.name} is no faster than the target itself {where}: it needs the compiled "
                f"kernels of a CPU; {OTHERS}, 'early-exit' for any of this family"
            )
        try:
            load_library()
        except CompilerError as error:
            raise IncompatibleError(
                f"{self.name} needs the compiled kernels ({first_line(error)}): {OTHERS}"
            ) from error
        if setting.quantize is not None:
            bits = QUANTIZATIONS[setting.quantize].bits
            if bits <= self._how.bits:
                raise IncompatibleError(
                    f"the target itself is kept in {bits} bits, so {self.name} would cost as much: "
                    + ("draft with 'int4'" if bits > 4 else "keep it in more, or draft otherwise")
                )
        return ()

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        if not isinstance(target, CompiledDecoder):
            raise IncompatibleError(
                f"{self.name} needs the compiled kernels, and {type(target).__name__} has none: "
                f"{OTHERS}"
            )
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress(f"{self.name} weights", done, target.layers)

        self.model, self._target = target.quantized(self._how, advance), target
        return self

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        if target is not self._target:
            self.build(target, lambda what, done, total: None)
        assert isinstance(target, CompiledDecoder)
        self._share(target, cache, share_of(self.model, target))


def int8() -> QuantizedDrafter:
    """Drafts with the target's own weights in 8 bits, on its own cache."""
    return QuantizedDrafter("int8")


def int4() -> QuantizedDrafter:
    """Drafts with the target's own weights in 4 bits, on its own cache."""
    return QuantizedDrafter("int4")
