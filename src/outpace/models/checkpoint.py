"""Checkpoint folders: `config.json` and safetensors, single file or sharded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, first_line

_AGAIN = "download or copy the checkpoint again"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: missing or not JSON.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {_AGAIN}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check it") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: {_AGAIN}")
    return value


class Weights:
    """The tensors of a checkpoint by name; headers are read and checked at once.

    Raises:
        CheckpointError: no safetensors, a shard missing, or a file that is
            truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._used: set[str] = set()
        for path in self._shards():
            with _opened(path) as handle:
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    self._files[name] = path
                    self._shapes[name] = tuple(handle.get_slice(name).get_shape())

    def _shards(self) -> list[Path]:
        single, index = (
            self.folder / "model.safetensors",
            self.folder / "model.safetensors.index.json",
        )
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise CheckpointError(f"{index} has no weight_map: {_AGAIN}")
            names = sorted(set(places.values()))
            missing = [n for n in names if not (self.folder / n).is_file()]
            if missing:
                raise CheckpointError(
                    f"{self.folder} lacks {len(missing)} of {len(names)} weight files, e.g. "
                    f"{missing[0]}: {_AGAIN}"
                )
            return [self.folder / n for n in names]
        if single.is_file():
            return [single]
        if any(self.folder.glob("*.bin")):
            raise CheckpointError(
                f"{self.folder} has pickled weights (.bin) only: convert them with "
                "save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(f"{self.folder} has no model.safetensors: {_AGAIN}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Whether a tensor is there and has this shape.

        Raises:
            CheckpointError: it is not, or has not.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}: {_AGAIN}")
        if self._shapes[name] != shape:
            raise CheckpointError(
                f"tensor {name!r} in {self.folder} is {list(self._shapes[name])}, config.json "
                f"asks for {list(shape)}: the two files do not belong together"
            )
        self._used.add(name)

    def unused(self, ignored: Callable[[str], bool]) -> list[str]:
        """Tensors that were never asked for, except those `ignored`."""
        return sorted(n for n in self._files if n not in self._used and not ignored(n))

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor, converted."""
        with _opened(self._files[name]) as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor.to(device=device, dtype=dtype)


class _opened:
    """`safe_open` with errors in our terms."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        try:
            self._handle = safe_open(self._path, framework="pt")
            return self._handle.__enter__()  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._path} is truncated or corrupt ({first_line(error)}): {_AGAIN}"
            ) from error

    def __exit__(self, *details: Any) -> None:
        self._handle.__exit__(*details)  # type: ignore[no-untyped-call]
