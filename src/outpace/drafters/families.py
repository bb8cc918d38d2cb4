"""Which models are known to draft for which.

What is known of a pair is that others use it, or that its makers publish one tokenizer for all
sizes: hub ids, sizes and rows of embeddings were looked up in model cards and configurations, which
`docs/choosing.md` names. A pair is a hint: whether the vocabularies agree is checked whenever one
is found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Family:
    """Targets and what is known to draft for them.

    Attributes:
        targets: a pattern, found in the last part of a target's name, in lower case.
        drafts: hub ids, the preferred one first, which is the smallest.
    """

    targets: str
    drafts: tuple[str, ...]


def _both(name: str, first: bool) -> tuple[str, ...]:
    """A draft as chat model and as base model."""
    return (f"{name}-Instruct", name) if first else (name, f"{name}-Instruct")


def _sizes(names: Sequence[str], chat: bool) -> tuple[str, ...]:
    return tuple(draft for name in names for draft in _both(name, chat))


_QWEN25 = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B")
_CODER = tuple(name.replace("2.5-", "2.5-Coder-") for name in _QWEN25)
_LLAMA32 = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B")
_SMOLLM2 = ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M")
_PYTHIA = ("70m", "160m", "410m")
_R1 = ("alamios/DeepSeek-R1-DRAFT-Qwen2.5-0.5B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")

FAMILIES = (
    Family(r"^qwen3-\S*base", ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-0.6B")),
    Family(r"^qwen3-\d", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B")),
    Family(r"qwen2\.5-coder.*instruct", _sizes(_CODER, True)),
    Family(r"qwen2\.5-coder", _sizes(_CODER, False)),
    Family(r"qwen2\.5-\d.*instruct", _sizes(_QWEN25, True)),
    Family(r"qwen2\.5-\d", _sizes(_QWEN25, False)),
    Family(r"deepseek-r1-distill-qwen-", _R1),
    Family(r"mistral-small-(24b|3\.)|devstral-small-", ("alamios/Mistral-Small-3.1-DRAFT-0.5B",)),
    Family(r"falcon3-\S*instruct", ("tiiuae/Falcon3-1B-Instruct",)),
    Family(r"falcon3-", ("tiiuae/Falcon3-1B-Base",)),
    Family(r"llama-3\.[123]-.*instruct", _sizes(_LLAMA32, True)),
    Family(r"llama-3\.[123]-", _sizes(_LLAMA32, False)),
    Family(r"smollm2-.*instruct", _sizes(_SMOLLM2, True)),
    Family(r"smollm2-", _sizes(_SMOLLM2, False)),
    Family(r"pythia-.*deduped", tuple(f"EleutherAI/pythia-{size}-deduped" for size in _PYTHIA)),
    Family(r"pythia-", tuple(f"EleutherAI/pythia-{size}" for size in _PYTHIA)),
    Family(
        r"llama-2-",
        ("JackFram/llama-68m", "TinyLlama/TinyLlama_v1.1", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ),
    Family(r"gemma-3-.*-it", ("google/gemma-3-270m-it", "google/gemma-3-1b-it")),
    Family(r"gemma-2-.*-it", ("google/gemma-2-2b-it",)),
    Family(r"gemma-2-", ("google/gemma-2-2b",)),
)


def drafts_for(base: str) -> tuple[str, ...]:
    """Hub ids of drafts for a target, by the last part of its name in lower case.

    A target that is a draft itself has those before it.
    """
    drafts = next((f.drafts for f in FAMILIES if re.search(f.targets, base)), ())
    return tuple(takewhile(lambda draft: not draft.lower().endswith(f"/{base}"), drafts))
