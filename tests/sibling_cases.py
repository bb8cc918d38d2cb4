"""Checkpoints of several sizes and one vocabulary, and Hugging Face caches that hold them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from checkpoints import TEXT, VOCAB, build
from outpace.models.loading import Source, inspect_checkpoint
from outpace.training.bpe import train_tokenizer

REVISION = "0123456789abcdef0123456789abcdef01234567"

SIZES: dict[str, dict[str, Any]] = {
    "large": {"num_hidden_layers": 12},
    "middle": {"num_hidden_layers": 8},
    "small": {"num_hidden_layers": 2},
    "tiny": {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 40},
    "padded": {"num_hidden_layers": 1, "vocab_size": 328},
}


def write_sizes(folder: Path, kind: str = "Llama") -> None:
    """Random checkpoints of `SIZES`, one byte-level tokenizer."""
    train_tokenizer(TEXT * 20, VOCAB, folder / "tokenizer")
    for name, shape in SIZES.items():
        options = {"vocab_size": VOCAB, "tie_word_embeddings": True} | shape
        build(kind, options).save_pretrained(folder / name)
        for file in (folder / "tokenizer").iterdir():
            shutil.copy(file, folder / name)


def cached(cache: Path, name: str, folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Put a checkpoint into a cache as a hub id; returns its folder there."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION)
    for file in folder.iterdir():
        if file.name not in without:
            shutil.copy(file, snapshot / file.name)
    return snapshot


def change(path: Path, **values: Any) -> None:
    """Change values of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def sizes(folder: Path) -> int:
    """Numbers in the weights."""
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return sum(handle.get_tensor(name).numel() for name in handle.keys())  # noqa: SIM118


def source_named(folder: Path, name: str) -> Source:
    """A checkpoint as if it had been loaded by this name."""
    return replace(inspect_checkpoint(folder), name=name)
