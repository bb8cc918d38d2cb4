"""From a path or hub id to a model that runs: checked first, loaded then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import (
    CheckpointError,
    OptionError,
    OutpaceError,
    UnsupportedModelError,
    first_line,
)
from .base import LanguageModel
from .checkpoint import Weights, read_json
from .config import LeanConfig, context_length
from .lean import LeanDecoder, check_weights
from .linear import prepacking_available
from .tokenizer import Tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
DEMO_TARGET, DEMO_DRAFT = "demo", "demo-draft"

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while weights are read."""

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was found and whose files belong together; no weights yet."""

    name: str
    folder: Path
    raw: dict[str, Any]
    config: Any
    weights: Weights
    lean: LeanConfig | None
    reason: str  # why not the lean decoder

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        return context_length(self.config)


def locate(name: str | Path) -> Path:
    """The folder of a checkpoint: the shipped pair, a path, or a hub id.

    Raises:
        CheckpointError: there is no such thing, here or on the hub.
    """
    text = str(name)
    if text in (DEMO_TARGET, DEMO_DRAFT):
        return ASSETS / ("target" if text == DEMO_TARGET else "draft")
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{text} is a file: give the checkpoint's folder")
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{text} does not exist: give a checkpoint folder, a hub id (owner/name) or 'demo'"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(text, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(
            f"{text} is neither a folder here nor to be had from the hub "
            f"({first_line(error)}): check the name and the network"
        ) from error


def inspect_checkpoint(name: str | Path) -> Source:
    """Read and check everything but the weights, of which only names and shapes are read.

    Raises:
        CheckpointError: missing or unreadable files.
        UnsupportedModelError: not a causal language model.
    """
    from transformers import AutoConfig

    folder = locate(name)
    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} has a configuration that transformers cannot read ({first_line(error)}): "
            "check model_type in config.json, or upgrade transformers"
        ) from error
    _check_causal(str(name), raw)
    weights = Weights(folder)
    lean, reason = None, ""
    try:
        lean = LeanConfig.read(config.to_dict())
        check_weights(lean, weights)
    except UnsupportedModelError as error:
        lean, reason = None, str(error)
    return Source(str(name), folder, raw, config, weights, lean, reason)


def _check_causal(name: str, raw: dict[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = raw.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    classes = {known} if isinstance(known, str) else set(known or ())
    named = raw.get("architectures") or classes
    architectures = {named} if isinstance(named, str) else set(named)
    if not classes & architectures:
        what = ", ".join(sorted(architectures)) or f"model_type {kind!r}"
        raise UnsupportedModelError(
            f"{name} is not a causal language model ({what}): give a decoder-only text model"
        )


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device as given; by default CUDA, else MPS, else the CPU.

    Raises:
        OptionError: unknown, or not on this machine.
    """
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"unknown device {device!r}: use cpu, cuda, cuda:N or mps") from error
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (chosen.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(chosen.type, False):
        raise OptionError(f"device {str(device)!r} is not available on this machine: use cpu")
    return chosen


def choose_dtype(
    dtype: str | torch.dtype | None, stored: str | torch.dtype | None, device: torch.device
) -> torch.dtype:
    """The dtype as given; by default the checkpoint's, or fp32 where that is not fast.

    bf16 needs a CPU with bf16 instructions or a GPU that has them; fp16 needs a GPU.

    Raises:
        OptionError: not fp32, bf16 or fp16.
    """
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise OptionError(f"unknown dtype {dtype!r}: use {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if dtype is not None:
        if dtype not in set(_DTYPES.values()):
            raise OptionError(f"dtype {dtype} is not supported: use float32, bfloat16 or float16")
        return dtype
    wanted = _DTYPES.get(str(stored).removeprefix("torch."), torch.float32)
    if device.type == "cpu":
        fast = prepacking_available(device, torch.bfloat16)
        return torch.bfloat16 if wanted != torch.float32 and fast else torch.float32
    if device.type == "cuda" and wanted == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        return torch.float16
    return wanted


def load_model(
    source: Source,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Progress = lambda what, done, total: None,
) -> LanguageModel:
    """Load the weights into the lean decoder, or into the adapter where that cannot run them.

    Raises:
        CheckpointError: missing, truncated or contradictory weights.
        UnsupportedModelError: neither runner can run the model exactly.
    """
    place = choose_device(device)
    stored = getattr(source.config, "dtype", None) or getattr(source.config, "torch_dtype", None)
    kind = choose_dtype(dtype, stored, place)
    if source.lean is None:
        return _adapted(source, kind, place, source.reason)
    done, total = 0, source.lean.layers

    def advance() -> None:
        nonlocal done
        done += 1
        progress(source.name, done, total)

    return LeanDecoder(source.lean, lambda n: source.weights.load(n, kind, place), advance)


def _adapted(
    source: Source, dtype: torch.dtype, device: torch.device, reason: str
) -> LanguageModel:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from .adapter import TransformersAdapter, refuse_unfit

    try:
        refuse_unfit(MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)], source.config)
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, output_loading_info=True
        )
        _check_complete(source.name, report)
        return TransformersAdapter(model.to(device))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{source.name} ({source.config.model_type}) cannot be run exactly: {error}; the lean "
            f"decoder does not take it because {reason}. Use a model whose cache holds keys and "
            "values only"
        ) from error
    except OutpaceError:
        raise
    except ImportError as error:
        raise CheckpointError(
            f"{source.name} needs a package that is not here ({first_line(error)}): install it"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{source.name} cannot be loaded by transformers ({first_line(error)}): "
            "download the checkpoint again"
        ) from error


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Neither random weights for missing tensors nor tensors that are ignored.

    Raises:
        CheckpointError: there would be.
    """
    for kind, what in (
        ("missing_keys", "lacks {} tensors that its architecture needs"),
        ("unexpected_keys", "has {} tensors that its architecture does not use"),
    ):
        keys = sorted(report.get(kind) or ())
        if keys:
            raise CheckpointError(
                f"{name} {what.format(len(keys))}, e.g. {keys[0]!r}: config.json and the weights "
                "do not belong together"
            )


def load_tokenizer(source: Source) -> Tokenizer:
    """The checkpoint's tokenizer (see `Tokenizer.load`)."""
    return Tokenizer.load(source.folder)


def eos_token_ids(source: Source, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a text: `generation_config.json`, else the model's, else the tokenizer's."""
    path = source.folder / "generation_config.json"
    for holder in (read_json(path) if path.is_file() else {}, source.raw):
        eos = holder.get("eos_token_id")
        if eos is not None:
            return tuple(int(i) for i in (eos if isinstance(eos, list) else [eos]))
    return tokenizer.eos_token_ids
