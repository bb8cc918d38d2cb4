"""Every kind of drafter on a small target whose law is known."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from checkpoints import build
from outpace.drafters import (
    CascadeDrafter,
    Drafter,
    EarlyExitDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    QuantizedDrafter,
    RecyclingDrafter,
    SkipDrafter,
    SLEMDrafter,
    SuffixDrafter,
    TLIDrafter,
)
from outpace.drafters.translation import Common, Words
from outpace.models import MarkovModel
from outpace.models.base import Adapter
from outpace.models.compiled import CompiledDecoder
from outpace.models.config import LeanConfig
from outpace.models.lean import LeanDecoder
from outpace.training.exits import write_adapter
from outpace.trees import Builder, DynamicBuilder, StaticBuilder, k_ary, paths_tree
from tokenizers_of import letters

V = 4
MARKOV = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.6 * MARKOV.table + 0.4 * MarkovModel.random(V, 2, 1).table)
PROMPT = [1, 0, 2, 3, 1, 0, 2, 1, 0, 2]
OURS, THEIRS = Words(letters("abcd"), "target"), Words(letters("dxbay"), "draft")


@cache
def layered(compiled: bool):
    """A random decoder of four tokens, whose layers can run alone."""
    shape = {"vocab_size": V, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = build("Llama", shape)
    config, weights = LeanConfig.read(model.config.to_dict()), dict(model.state_dict())
    return (CompiledDecoder if compiled else LeanDecoder)(config, lambda name: weights[name])


def compiled():
    return layered(True)


def lean():
    return layered(False)


def markov():
    return MARKOV


def foreign_model():
    return MarkovModel.random(5, 2, 4)


@cache
def adapter_folder() -> Path:
    """An adapter that changes what the first layers say."""
    hidden = compiled().hidden_size
    noise = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(0))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    write_adapter(Adapter(torch.ones(hidden), 0.2 * noise), folder)
    return folder


def tli():
    return TLIDrafter(foreign_model(), Common(OURS, THEIRS), "tli")


def growing(drafter: Drafter, builder: Builder | None = None) -> Drafter:
    """A drafter that drafts trees, by default two children of every node, two levels deep."""
    drafter.branch(builder or StaticBuilder(k_ary([2, 2])))
    return drafter


def paths():
    return StaticBuilder(paths_tree(2, 2), "with")


DRAFTERS = {
    "draft model": (markov, lambda: ModelDrafter(NEAR)),
    "narrow draft model": (markov, lambda: ModelDrafter(MarkovModel.random(V - 1, 1, 2))),
    "wide draft model": (markov, lambda: ModelDrafter(MarkovModel.random(V + 2, 3, 3))),
    "n-gram": (markov, lambda: NgramDrafter(2, 1)),
    "n-gram trees": (markov, lambda: NgramDrafter(3, 3)),
    "suffix": (markov, lambda: SuffixDrafter(capacity=2000, branching=False)),
    "suffix trees": (markov, lambda: SuffixDrafter(capacity=2000, least=0.05, branching=True)),
    "recycling": (markov, lambda: RecyclingDrafter(5)),
    "lookahead": (markov, lambda: LookaheadDrafter(3, 3, 2)),
    "tli": (markov, tli),
    "slem": (markov, lambda: SLEMDrafter(foreign_model(), OURS, THEIRS, "slem")),
    "cascade": (markov, lambda: CascadeDrafter([NgramDrafter(1, 2), ModelDrafter(NEAR)])),
    "early exit": (compiled, lambda: EarlyExitDrafter(1)),
    "early exit, lean": (lean, lambda: EarlyExitDrafter(1)),
    "skipped layers": (compiled, lambda: SkipDrafter("1-2")),
    "adapter": (compiled, lambda: EarlyExitDrafter(2, str(adapter_folder()))),
    "int4": (compiled, lambda: QuantizedDrafter("int4")),
    "int8": (compiled, lambda: QuantizedDrafter("int8")),
    "cascade of own layers": (
        compiled,
        lambda: CascadeDrafter([NgramDrafter(2, 1), EarlyExitDrafter(3), SkipDrafter("1")]),
    ),
    "draft trees": (markov, lambda: growing(ModelDrafter(NEAR))),
    "draft paths": (markov, lambda: growing(ModelDrafter(NEAR), paths())),
    "dynamic trees": (markov, lambda: growing(ModelDrafter(NEAR), DynamicBuilder(5, 3, 2, 3))),
    "tli trees": (markov, lambda: growing(tli())),
    "early exit trees": (compiled, lambda: growing(EarlyExitDrafter(1))),
    "int4 trees": (compiled, lambda: growing(QuantizedDrafter("int4"))),
}
