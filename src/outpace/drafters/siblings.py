"""Smaller models on this disk that can draft for a target.

Looked at are the model that is shipped for the target, the folders beside the target's, and what
the Hugging Face cache holds. Nothing is downloaded, and of weights only names and shapes are read.
A model is found if it runs here, has half the target's parameters at most, and passes the check of
vocabularies that a draft model passes that is named.

Pairs that are known (`families.py`) come first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import first_line
from ..models.checkpoint import read_json
from ..models.loading import (
    DEMO_DRAFT,
    DEMO_TARGET,
    Source,
    inspect_checkpoint,
    load_tokenizer,
    locate,
)
from ..models.tokenizer import Tokenizer, check_vocabularies
from .families import drafts_for

MOST = 0.5
"""The largest share of the target's parameters that a sibling may have."""

_BEST = 0.05
"""The share that is preferred where no pair is known: small drafts are cheap, and agree less."""

_LISTED, _INSPECTED, _TRIED = 256, 32, 8
"""At most so many configurations are read, so many checkpoints inspected, so many tokenizers."""

_SIMILAR = 1.05
"""Rows of two embeddings of one vocabulary differ by padding and added tokens, not by more."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A smaller model that can draft for a target.

    Attributes:
        name: as one would name it: a hub id, a folder, or a shipped model.
        source: its checkpoint, as it was found.
        why: how it was found, in a few words.
        ratio: its parameters over the target's.
    """

    name: str
    source: Source
    why: str
    ratio: float

    @property
    def folder(self) -> Path:
        return self.source.folder


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, the preferred one first, and what else was looked at.

    Attributes:
        left_out: names, and why these cannot draft.
    """

    found: tuple[Sibling, ...]
    left_out: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    folder: Path
    why: str
    rank: int  # among the known pairs; all others come behind


def known_drafts(source: Source) -> tuple[str, ...]:
    """Hub ids that are known to draft for a target, the preferred one first."""
    names = (_hub_name(source.folder), source.name)
    return next(filter(None, (drafts_for(_base(name)) for name in names if name)), ())


def siblings(
    source: Source, tokenizer: Tokenizer, cache: Path | None = None, most: int | None = None
) -> Search:
    """Smaller models on this disk with the target's vocabulary.

    Args:
        source: the target's checkpoint.
        cache: a Hugging Face cache; by default the user's.
        most: look for no more than so many.
    """
    left_out: list[tuple[str, str]] = []
    ranked: list[tuple[tuple[float, ...], str, Sibling]] = []
    places = [p for p in _places(source, cache) if _suits(p, source, tokenizer, left_out)]
    for place in places[:_INSPECTED]:
        try:
            draft = inspect_checkpoint(place.folder)
        except Exception as error:  # whatever lies there is no fault of the target's
            left_out.append((place.name, first_line(error)))
            continue
        ratio = draft.weights.parameters / max(1, source.weights.parameters)
        if ratio > MOST:
            left_out.append((place.name, f"it has {ratio:.0%} of the target's parameters"))
            continue
        key = (place.rank, abs(math.log(max(ratio, 1e-9) / _BEST)))
        ranked.append((key, place.name, Sibling(place.name, draft, place.why, ratio)))
    ranked.sort(key=lambda entry: entry[:2])
    left_out += [(p.name, "too many others were looked at before") for p in places[_INSPECTED:]]
    found = _agreeing([entry[2] for entry in ranked], tokenizer, left_out, most)
    return Search(tuple(found), tuple(left_out))


def _agreeing(
    ranked: Sequence[Sibling],
    tokenizer: Tokenizer,
    left_out: list[tuple[str, str]],
    most: int | None,
) -> list[Sibling]:
    """Those whose vocabulary is the target's."""
    found: list[Sibling] = []
    for tried, sibling in enumerate(ranked):
        if most is not None and len(found) >= most:
            left_out.append((sibling.name, f"{found[0].name} is preferred"))
            continue
        if tried >= _TRIED:
            left_out.append((sibling.name, "too many others were tried before"))
            continue
        draft = sibling.source
        try:
            check_vocabularies(tokenizer, load_tokenizer(draft), draft.vocab_size)
        except Exception as error:
            left_out.append((sibling.name, first_line(error)))
            continue
        found.append(sibling)
    return found


def _places(source: Source, cache: Path | None) -> list[_Place]:
    """Every other checkpoint there is, known pairs first; each folder once."""
    drafts = known_drafts(source)
    known = {_base(name): rank for rank, name in enumerate(drafts)}
    listed = [*_shipped(source), *_cached(cache, drafts), *_beside(source.folder)]
    seen, places = {os.path.realpath(source.folder)}, []
    for name, folder, why in listed:
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        rank = -1 if name == DEMO_DRAFT else known.get(_base(name), len(known))
        how = f"known to draft for it, {why}" if 0 <= rank < len(known) else why
        places.append(_Place(name, folder, how, rank))
    places.sort(key=lambda place: (place.rank, place.name))
    return places


def _shipped(source: Source) -> Iterator[tuple[str, Path, str]]:
    if os.path.realpath(source.folder) == os.path.realpath(locate(DEMO_TARGET)):
        yield DEMO_DRAFT, locate(DEMO_DRAFT), "shipped with it"


def _beside(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Checkpoints in folders beside the target's."""
    if _hub_name(folder):  # there are other revisions of the target
        return
    for path in islice(_folders(folder.absolute().parent), _LISTED):
        if os.path.isfile(path / "config.json"):
            shown = path if folder.name in ("", "..") else folder.parent / path.name
            named = str(shown) if len(shown.parts) > 1 else f".{os.sep}{shown}"
            yield named, path, "in a folder beside it"


def _cached(cache: Path | None, first: Sequence[str]) -> Iterator[tuple[str, Path, str]]:
    """Models of the Hugging Face cache, at the revision that a hub id stands for."""
    from huggingface_hub import constants, try_to_load_from_cache

    root = Path(constants.HF_HUB_CACHE if cache is None else cache)
    held = [_hub_id(path.name) for path in _folders(root) if path.name.startswith("models--")]
    for name in islice(dict.fromkeys([*(n for n in first if n in held), *held]), _LISTED):
        try:
            config = try_to_load_from_cache(name, "config.json", cache_dir=root)
        except (OSError, ValueError):  # no name of a repository, or not to be read
            continue
        if isinstance(config, str):
            yield name, Path(config).parent, "in the Hugging Face cache"


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if os.path.isdir(path))
    except OSError:
        return []


def _suits(
    place: _Place, source: Source, tokenizer: Tokenizer, left_out: list[tuple[str, str]]
) -> bool:
    """Whether its configuration alone does not rule it out."""
    try:
        reason = _unfit(read_json(place.folder / "config.json"), source, tokenizer)
    except Exception as error:
        reason = first_line(error)
    if reason:
        left_out.append((place.name, reason))
    return not reason


def _unfit(config: dict[str, Any], source: Source, tokenizer: Tokenizer) -> str:
    if config.get("quantization_config"):
        return "its weights are quantised, which may need packages that are not here"
    text = config.get("text_config")
    rows = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(rows, int):
        return ""  # whatever its kind has by default
    if rows <= max(tokenizer.vocabulary.values()) or rows > _SIMILAR * source.vocab_size:
        return f"another vocabulary: {rows} rows, the target has {source.vocab_size}"
    return ""


def _hub_name(folder: Path) -> str | None:
    """The hub id of a folder in a Hugging Face cache."""
    parts = folder.absolute().parts[-3:]
    if len(parts) == 3 and parts[1] == "snapshots" and parts[0].startswith("models--"):
        return _hub_id(parts[0])
    return None


def _hub_id(folder: str) -> str:
    return folder.removeprefix("models--").replace("--", "/")


def _base(name: str) -> str:
    """The last part of a name or path, in lower case."""
    return Path(name).name.lower()
