"""Drafters before they are built: what can be checked while no weight has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import OptionError, VocabularyMismatchError, first_line
from ..models.base import LanguageModel
from ..models.loading import (
    Compile,
    Progress,
    Source,
    check_runner,
    inspect_checkpoint,
    load_model,
    load_tokenizer,
)
from ..models.tokenizer import Tokenizer, check_vocabularies
from ..trees import Builder
from ..types import Law, Shape
from .base import Drafter
from .model import ModelDrafter, branch


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a target before its weights are read.

    Attributes:
        quantize: what its matrices are kept in, if not in its dtype.
        dtype: as it was asked for; None is a default.
    """

    source: Source
    tokenizer: Tokenizer
    device: torch.device
    compile: Compile = "auto"
    quantize: str | None = None
    dtype: str | torch.dtype | None = None


def path_of(text: str) -> Path:
    """A path as it was typed, with ~ for a home.

    Raises:
        OptionError: there is no such home.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise OptionError(f"{text} is no path ({first_line(error)}): check it") from error


class Blueprint(Protocol):
    """A drafter to be, of which all is known but weights. Every drafter is its own."""

    name: str
    laws: tuple[type[Law], ...]
    proposes: Shape
    k: int
    rule: str
    instant: bool
    remembers: bool

    def branch(self, builder: Builder) -> None:
        """Draft trees of this shape.

        Raises:
            IncompatibleError: it does not draft level by level.
        """
        ...

    def check(self, setting: Setting) -> Sequence[str]:
        """Whether it can draft for a target; remarks worth showing.

        Raises:
            OutpaceError: it cannot; the message says why, and what could.
        """
        ...

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        """The drafter, its weights read."""
        ...


class Checkpoint:
    """A draft model in a folder or on the hub.

    Args:
        path: folder, hub id, or a shipped model's name.
        name: what to call it; by default the same.
    """

    laws: tuple[type[Law], ...] = ModelDrafter.laws
    proposes = ModelDrafter.proposes
    k = ModelDrafter.k
    most = ModelDrafter.most
    rule = ModelDrafter.rule
    instant = ModelDrafter.instant
    remembers = ModelDrafter.remembers
    draws = ModelDrafter.draws
    builder: Builder | None = None

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.name = str(path) if name is None else name
        self._path = path
        self._source: Source
        self._compile: Compile = "auto"

    def branch(self, builder: Builder) -> None:
        branch(self, builder)

    def check(self, setting: Setting) -> Sequence[str]:
        self._find(setting)
        tokenizer = load_tokenizer(self._source)
        try:
            return check_vocabularies(setting.tokenizer, tokenizer, self._source.vocab_size)
        except VocabularyMismatchError as error:
            raise VocabularyMismatchError(
                f"{error}, or draft with this one by common tokens: 'tli:{self.name}'"
            ) from error

    def _find(self, setting: Setting) -> None:
        self._source = inspect_checkpoint(self._path)
        self._compile = setting.compile
        check_runner(self._source, setting.device, setting.compile, None)

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        return ModelDrafter(self._load(target, progress), self.name, self.builder)

    def _load(self, target: LanguageModel, progress: Progress) -> LanguageModel:
        # It runs as the target does; two precisions would only cost acceptance.
        return load_model(
            self._source, target.dtype, target.device, progress, compile=self._compile
        )
