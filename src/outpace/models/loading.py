"""From a path or hub id to a model that runs: checked first, loaded then."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import (
    CheckpointError,
    CompilerError,
    OptionError,
    OutpaceError,
    UnsupportedModelError,
    first_line,
)
from ..kernels import load_library
from .base import LanguageModel
from .checkpoint import Weights, read_json
from .compiled import CompiledDecoder
from .config import LeanConfig, context_length
from .graphs import GraphedDecoder
from .lean import EMBEDDING, HEAD, LeanDecoder, check_weights
from .linear import multiplies_bf16
from .quantize import Quantization, choose_quantization
from .tokenizer import Tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
DEMO_TARGET, DEMO_DRAFT = "demo", "demo-draft"

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while weights are read."""

Compile = Literal["auto"] | bool
"""Whether a pass is one call of compiled C++, or a CUDA graph: `True`, `False`, or "auto", where it
can be."""

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


_SMALL_FILES = ["*.json", "tokenizer.model", "*.txt", "*.jinja"]
_COPIES = ["*/*", "consolidated*"]  # of the weights, in other layouts


def locate(name: str | Path, weights: bool = True) -> Path:
    """The folder of a checkpoint: the shipped pair, a path, or a hub id.

    Args:
        weights: whether what comes from the hub includes them.

    Raises:
        CheckpointError: there is no such thing, here or on the hub.
    """
    text = str(name)
    if text in (DEMO_TARGET, DEMO_DRAFT):
        return ASSETS / ("target" if text == DEMO_TARGET else "draft")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{text} is a file: give the checkpoint's folder")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{text} cannot be read ({first_line(error)}): check it") from error
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{text} does not exist: give a checkpoint folder, a hub id (owner/name), "
            "'demo' or 'demo-draft'"
        )
    from huggingface_hub import snapshot_download

    wanted = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(snapshot_download(text, allow_patterns=wanted, ignore_patterns=_COPIES))
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

    folder = locate(name, weights=False)
    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} has a configuration that transformers cannot read ({first_line(error)}): "
            "check model_type in config.json, or upgrade transformers"
        ) from error
    _check_causal(str(name), raw)
    weights = Weights(locate(name))
    lean, reason = None, ""
    try:
        lean = LeanConfig.read(config.to_dict())
        check_weights(lean, weights)
    except UnsupportedModelError as error:
        lean, reason = None, str(error)
        _check_adaptable(str(name), config, reason)
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


def memory_of(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes of memory that a device has, and that are free; None where that cannot be told."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None, None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    except OSError:
        pass
    return total, free


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
    """The dtype as given; by default the checkpoint's, or the nearest that is fast here.

    fp32 stays fp32. A CPU takes the 16-bit formats as bf16, or as fp32 where it has no
    bf16 instructions; a GPU that has none takes bf16 as fp16.

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
    if wanted == torch.float32:
        return wanted
    if device.type == "cpu":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    if wanted == torch.bfloat16 and not multiplies_bf16(device):
        return torch.float16
    return wanted


def load_model(
    source: Source,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Progress = lambda what, done, total: None,
    *,
    compile: Compile = "auto",
    quantize: str | None = None,
) -> LanguageModel:
    """Load the weights into the compiled or the lean decoder, or else into the adapter.

    Raises:
        CheckpointError: missing, truncated or contradictory weights.
        UnsupportedModelError: no runner can run the model exactly.
        CompilerError: `compile` is True, and the kernels cannot be had.
        OptionError: an option that cannot work, for this model or at all.
    """
    place = choose_device(device)
    stored = getattr(source.config, "dtype", None) or getattr(source.config, "torch_dtype", None)
    kind = choose_dtype(dtype, stored, place)
    quantization = choose_quantization(quantize)
    check_runner(source, place, compile, quantization)
    if source.lean is None:
        progress(source.name, 0, 1)
        model = _adapted(source, kind, place)
        progress(source.name, 1, 1)
        return model
    done, total = 0, source.lean.layers

    def advance() -> None:
        nonlocal done
        done += 1
        progress(source.name, done, total)

    lean = source.lean
    if lean.tied and HEAD in source.weights:  # transformers ties equal tensors only
        head, embedding = (source.weights.load(n, kind, place) for n in (HEAD, EMBEDDING))
        lean = replace(lean, tied=torch.equal(head, embedding))
        del head, embedding

    def load(name: str) -> torch.Tensor:
        return source.weights.load(name, kind, place)

    if kernels := _kernels(compile, place, progress):
        return CompiledDecoder(lean, load, advance, quantization, kernels)
    decoder = LeanDecoder(lean, load, advance, quantization)
    graphs = place.type == "cuda" and compile is not False
    return GraphedDecoder(decoder) if graphs else decoder


def check_runner(
    source: Source, device: torch.device, compile: Compile, quantization: Quantization | None
) -> None:
    """Whether there is a runner for what is asked.

    Raises:
        OptionError: there is none.
    """
    check_compile(compile, device)
    for asked, what in ((compile is True, "compile=True"), (quantization, "quantize")):
        if asked and source.lean is None:
            raise OptionError(
                f"{what} is for the Llama family, and {source.name} is not of it "
                f"({source.reason}): leave it out"
            )


def check_compile(compile: Compile, device: torch.device) -> None:
    """What can be said before there is a checkpoint.

    Raises:
        OptionError: no such choice, or none on this device.
    """
    if compile not in (True, False, "auto"):
        raise OptionError(f"compile must be True, False or 'auto', not {compile!r}")
    if compile is True and device.type not in ("cpu", "cuda"):
        raise OptionError(f"compile=True is for CPUs and CUDA, not for {device}: leave it out")


def _kernels(compile: Compile, device: torch.device, progress: Progress) -> CDLL | None:
    """The compiled kernels; None for the lean decoder.

    Raises:
        CompilerError: they are asked for and cannot be had.
    """
    if device.type != "cpu" or compile is False:
        return None
    what = "the kernels, compiled once"
    steps: list[int] = []

    def waiting() -> None:
        steps.append(0)
        progress(what, 0, 1)

    try:
        return load_library(waiting=waiting)
    except CompilerError as error:
        if compile is True:
            raise
        warnings.warn(
            f"running without compiled kernels, which takes several times as long: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    finally:
        if steps:
            progress(what, 1, 1)


def _check_adaptable(name: str, config: Any, reason: str) -> None:
    """Whether the adapter might run what the lean decoder does not take.

    Raises:
        UnsupportedModelError: its class or configuration shows that it cannot.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from .adapter import refuse_unfit

    try:
        refuse_unfit(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    except UnsupportedModelError as error:
        raise _no_runner(name, config, error, reason) from error
    except ImportError as error:
        raise CheckpointError(
            f"{name} needs a package that is not here ({first_line(error)}): install it"
        ) from error


def _no_runner(name: str, config: Any, error: Exception, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} ({config.model_type}) cannot be run exactly: {error}; the lean decoder does not "
        f"take it because {reason}. Use a model whose cache holds keys and values only"
    )


def _adapted(source: Source, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    from .adapter import TransformersAdapter

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        _check_complete(source.name, report)
        return TransformersAdapter(model.to(device))
    except UnsupportedModelError as error:
        raise _no_runner(source.name, source.config, error, source.reason) from error
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
    """The ids that end a text: `generation_config.json`, else the model's, else the tokenizer's.

    Raises:
        CheckpointError: they are no token ids.
    """
    path = source.folder / "generation_config.json"
    for holder in (read_json(path) if path.is_file() else {}, source.raw):
        eos = holder.get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(type(i) is int for i in ids):
                raise CheckpointError(
                    f"{source.name} has eos_token_id {eos!r} in its configuration: it must be a "
                    "token id or a list of them"
                )
            return tuple(ids)
    return tokenizer.eos_token_ids
