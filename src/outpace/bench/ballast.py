"""Ballast: a small checkpoint made as costly as a big one without changing its function.

Every MLP is widened with units whose gate and up rows are random and whose
down columns are zero. They are computed in full and add exactly 0, so law and
acceptance are the small model's, and time and memory the big one's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..errors import OptionError


def add_ballast(source: Path, out: Path, mlp_size: int, seed: int = 0) -> None:
    """Write a copy of a Llama-family checkpoint with MLPs of `mlp_size` units.

    Raises:
        OptionError: the MLPs are that wide already.
    """
    config = json.loads((source / "config.json").read_text())
    extra = mlp_size - config["intermediate_size"]
    if extra <= 0:
        raise OptionError(f"mlp_size must exceed the model's {config['intermediate_size']} units")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            noise = torch.randn(extra, weight.shape[1], generator=generator) * weight.float().std()
            tensors[name] = torch.cat([weight, noise.to(weight.dtype)])
        elif name.endswith("down_proj.weight"):
            zeros = torch.zeros(weight.shape[0], extra, dtype=weight.dtype)
            tensors[name] = torch.cat([weight, zeros], 1)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"intermediate_size": mlp_size}, indent=2))
    for file in source.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            shutil.copy(file, out / file.name)
