"""What may draft for a target on this machine, as far as can be told before weights are read.

That is what `drafter="auto"` chooses among. Each drafter that is looked at gets one line: why it is
among them, or why not. Figures that these lines lean on are in `benchmarks/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..errors import OutpaceError, UnsupportedModelError, first_line
from ..models.loading import check_runner, choose_dtype, memory_of
from ..models.quantize import QUANTIZATIONS
from .blueprint import Blueprint, Checkpoint, Setting
from .cascade import Cascade
from .early_exit import EarlyExitDrafter, trained_exit
from .ngram import NgramDrafter
from .quantized import int4
from .recycling import RecyclingDrafter
from .siblings import Sibling, known_drafts, siblings
from .suffix import SuffixDrafter

_SMALL = 100_000_000
"""Parameters of a target below which a look-up's time counts: it takes a tenth of a millisecond or
two, and a pass of 4 million parameters 2."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that was looked at.

    Attributes:
        name: as `parse` takes it, if it fits.
        why: why it is among them, or why not: one line.
        make: makes it; None if it does not fit.
    """

    name: str
    why: str
    make: Callable[[], Blueprint] | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether it can draft, and is worth a try."""
        return self.make is not None


def candidates(setting: Setting, cache: Path | None = None) -> list[Candidate]:
    """What may draft for a target, those that fit first: the order is that of a cascade.

    Args:
        cache: a Hugging Face cache; by default the user's.
    """
    reason = _refusal(setting)
    if reason:
        names = ("suffix", "recycling", "int4", "early-exit", "draft model")
        return [Candidate(name, reason) for name in names]
    models = list(_models(setting, cache))
    best = [model for model in models if model.fits]
    own = [_quantized(setting, best), _exit(setting)]
    others = [model for model in models if not model.fits]
    return sorted(
        [*_lookups(setting), _recycling(setting), *best, *own, *others], key=lambda c: not c.fits
    )


def blueprint(found: Sequence[Candidate]) -> Blueprint | None:
    """Those that fit as one drafter: none, one, or a cascade."""
    made = [candidate.make() for candidate in found if candidate.make is not None]
    if len(made) < 2:
        return made[0] if made else None
    return Cascade(made)


def _refusal(setting: Setting) -> str:
    """Why nothing can draft: the target's cache cannot roll back."""
    if setting.source.lean is not None:
        return ""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from ..models.adapter import refuse_unfit

    config = setting.source.config
    try:
        refuse_unfit(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    except UnsupportedModelError as error:
        return f"drafts cannot be taken back from {setting.source.name}: {error}"
    return ""


def _lookups(setting: Setting) -> list[Candidate]:
    """The one that suits such a target, and the other."""
    small = setting.source.weights.parameters < _SMALL
    why = "costs next to nothing, and pays where text repeats itself"
    if not small:
        return [Candidate("suffix", why, SuffixDrafter)]
    other = (
        "a pass of so small a model takes little longer than its look-ups: 'ngram' has faster ones"
    )
    return [Candidate("ngram", why, NgramDrafter), Candidate("suffix", other)]


def _recycling(setting: Setting) -> Candidate:
    if setting.device.type == "cpu":
        why = "its trees cost rows of a pass, which take time on a CPU: look-ups do better there"
        return Candidate("recycling", why)
    why = f"drafts for any text, by trees whose rows cost little on {setting.device.type}"
    return Candidate("recycling", why, RecyclingDrafter)


def _models(setting: Setting, cache: Path | None) -> Iterator[Candidate]:
    """The best sibling, and what else was looked at."""
    search = siblings(setting.source, setting.tokenizer, cache, most=2)
    if not search.found:
        known = known_drafts(setting.source)
        hint = f"; known to draft for it are {', '.join(known[:2])}" if known else ""
        why = f"there is no smaller model with its vocabulary on this disk{hint}"
        yield Candidate("draft model", why)
    best = None
    for sibling in search.found:
        reason = _obstacle(sibling, setting)
        if not reason and best is not None:
            reason = f"{best} is preferred"
        if reason:
            yield Candidate(sibling.name, reason)
            continue
        best = sibling.name
        why = f"{sibling.why}, the same vocabulary, {sibling.ratio:.1%} of the target's parameters"
        yield Candidate(sibling.name, why, partial(Checkpoint, sibling.folder, sibling.name))
    for name, reason in search.left_out:
        yield Candidate(name, reason)


def _obstacle(sibling: Sibling, setting: Setting) -> str:
    """Why it cannot run beside the target, if so."""
    try:
        check_runner(sibling.source, setting.device, setting.compile, None)
    except OutpaceError as error:
        return first_line(error)
    return _lack(sibling.ratio * _itemsize(setting), setting)


def _quantized(setting: Setting, models: Sequence[Candidate]) -> Candidate:
    if models:
        why = f"it is one more model to build and to keep, and {models[0].name} is there"
        return Candidate("int4", why)
    try:
        int4().check(setting)
        reason = _lack(QUANTIZATIONS["int4"].bytes, setting)
    except OutpaceError as error:
        reason = first_line(error)
    if reason:
        return Candidate("int4", reason)
    return Candidate("int4", "there is no draft model, and it is nearly always accepted", int4)


def _exit(setting: Setting) -> Candidate:
    try:
        found = trained_exit(setting.source)
        if found is None:
            why = "nothing says that it was trained for an exit: 'outpace layers' measures them"
            return Candidate("early-exit", why)
        EarlyExitDrafter(found.layers).check(setting)
    except OutpaceError as error:
        return Candidate("early-exit", first_line(error))
    where = None if found.adapter is None else str(found.adapter)
    name = f"early-exit:{found.layers}" + ("" if where is None else f",{where}")
    return Candidate(name, found.says, partial(EarlyExitDrafter, found.layers, where))


def _itemsize(setting: Setting) -> int:
    """Bytes per parameter of models that are not kept in fewer bits."""
    config = setting.source.config
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return choose_dtype(setting.dtype, stored, setting.device).itemsize


def _lack(added: float, setting: Setting) -> str:
    """Why there is not enough memory for more bytes per parameter of the target, if so."""
    _, free = memory_of(setting.device)
    count = setting.source.weights.parameters
    own = _itemsize(setting) if setting.quantize is None else QUANTIZATIONS[setting.quantize].bytes
    needed = (own + added) * count
    if free is None or needed <= free:
        return ""
    return (
        f"with the target it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free "
        f"on {setting.device}"
    )
