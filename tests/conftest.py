"""Shared settings and the small checkpoints that many tests load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from checkpoints import TEXT, VOCAB, build
from outpace.cli.main import run
from outpace.training.bpe import train_tokenizer

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)

settings.register_profile("outpace", deadline=None, derandomize=True)
settings.load_profile("outpace")


def pytest_collection_modifyitems(items):
    """What must run in one process is long: it begins first."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def write_pair(folder: Path) -> None:
    """A random target and a draft near it, one byte-level tokenizer, in `folder`."""
    train_tokenizer(TEXT * 20, VOCAB, folder / "tokenizer")
    shape = {"vocab_size": VOCAB, "num_key_value_heads": 2, "tie_word_embeddings": True}
    for name, layers, seed in (("target", 3, 0), ("draft", 1, 1)):
        model = build("Qwen3", shape | {"head_dim": 12, "num_hidden_layers": layers}, seed)
        model.save_pretrained(folder / name)
        for file in (folder / "tokenizer").iterdir():
            shutil.copy(file, folder / name)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Path:
    """Folder with `target/` and `draft/`: read only."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder)
    return folder


@pytest.fixture
def refused(capsys):
    """`refused(arguments, message)`: the command ends with code 2 and one line that says why."""

    def check(arguments: list[str], message: str) -> None:
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("outpace: ")
        assert message in captured.err

    return check
