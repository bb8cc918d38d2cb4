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

    @lru_cache(maxsize=8)  # noqa: B019 (lives as long as the test run)
    def load(self, dtype: str = "fp32") -> LanguageModel:
        return load_model(inspect_checkpoint(self.folder), dtype, "cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(name)`: one of LEAN, ADAPTED and REFUSED; `saved(name, kind, options)`: a new one."""

    @cache
    def known(name: str) -> Saved:
        return make(name, *(LEAN | ADAPTED | REFUSED)[name])

    def make(name: str, kind: str, options: dict[str, Any], **more: str) -> Saved:
        folder = tmp_path_factory.mktemp(name)
        return Saved(folder, write(folder, kind, options, **more))

    return lambda name, *new, **more: make(name, *new, **more) if new else known(name)
