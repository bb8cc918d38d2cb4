"""The shipped pair and its ballasted twin, from `outpace.bench.ballast`."""

from __future__ import annotations

from pathlib import Path

from outpace import SamplingParams
from outpace.bench.ballast import add_ballast
from outpace.models.loading import locate

MLP = {"target": 7680, "draft": 7168}
"""Units per MLP of the ballasted pair: about 110M and 9M parameters."""


def sampling(temperature: float, tokens: int) -> SamplingParams:
    """Of a run that emits this many tokens, whatever they are."""
    return SamplingParams(temperature=temperature, seed=0, max_new_tokens=tokens, eos_token_ids=())


def pair_folders(name: str, scratch: Path) -> tuple[Path, Path]:
    """(target, draft) of "shipped" or "ballasted"."""
    shipped = {"target": locate("demo"), "draft": locate("demo-draft")}
    if name == "shipped":
        return shipped["target"], shipped["draft"]
    for role, folder in shipped.items():
        add_ballast(folder, scratch / role, MLP[role])
    return scratch / "target", scratch / "draft"
