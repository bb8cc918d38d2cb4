"""Checkpoints written once per run, and one thread: these models are too small for two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ADAPTED, LEAN, REFUSED, write
from outpace.models import LanguageModel, inspect_checkpoint, load_model


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk and the transformers model it came from."""

    folder: Path
    hf: Any
    compile: Any = "auto"

    @lru_cache(maxsize=8)  # noqa: B019 (lives as long as the test run)
    def load(self, dtype: str = "fp32", **options: Any) -> LanguageModel:
        source = inspect_checkpoint(self.folder)
        return load_model(source, dtype, "cpu", compile=self.compile, **options)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(name)`: one of LEAN, ADAPTED and REFUSED; with kind and options: a new one."""

    @cache
    def known(name: str) -> Saved:
        return make(name, *(LEAN | ADAPTED | REFUSED)[name])

    def make(name: str, kind: str, options: dict[str, Any], **more: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        return Saved(folder, write(folder, kind, options, **more))

    return lambda name, *new, **more: make(name, *new, **more) if new else known(name)


@pytest.fixture(scope="session")
def saved(checkpoint):
    """The same, where a module does not say otherwise."""
    return checkpoint
