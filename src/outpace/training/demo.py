"""The shipped pair: how its target and its draft are made, from nothing.

Stages, each resumable in the work folder: read the corpus, train the
tokenizer, encode, train a shallow model on next-token prediction, stack its
layers and train the target, let that write and score what the draft learns
from, distil the draft. A model that is finished is published in `pair/` as it
ships, with its log.
"""

from __future__ import annotations

import copy
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..assembly import load
from ..errors import CheckpointError, OptionError
from ..models.checkpoint import read_json
from . import attention, corpus
from .bpe import END_OF_TEXT, train_tokenizer
from .loop import TrainConfig, train, windows
from .objectives import forward_kl, next_token
from .teacher import TeachConfig, lessons_of, teach

SHIPPED = ("target", "draft")
VOCAB_SIZE = 4096
CONTEXT = 2048

_TARGET = {
    "hidden_size": 320,
    "num_hidden_layers": 14,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 960,
}
SHAPES = {
    "shallow": {**_TARGET, "num_hidden_layers": _TARGET["num_hidden_layers"] // 2},
    "target": _TARGET,
    "draft": {
        "hidden_size": 192,
        "num_hidden_layers": 2,  # one layer cannot copy what it saw: no induction head
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 640,
    },
}

STAGES: dict[str, TrainConfig | TeachConfig] = {
    "shallow": TrainConfig(steps=600, decay_fraction=0.0, long_fraction=0.0, seed=2),
    "target": TrainConfig(steps=500, warmup=30, decay_fraction=0.9),
    "teach": TeachConfig(copied=4608, generated=3072),
    "draft": TrainConfig(
        steps=3600, muon_lr=6e-3, adamw_lr=5e-3, length=512, decay_fraction=0.8, seed=1
    ),
}


def new_model(shape: dict[str, int], seed: int) -> nn.Module:
    """A randomly initialised Qwen3-shaped causal LM with tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    attention.register()
    torch.manual_seed(seed)
    config = Qwen3Config(
        **cast(dict[str, Any], shape),
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    config._attn_implementation = attention.NAME
    return cast(nn.Module, Qwen3ForCausalLM(config))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams and where they come from."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_paths: tuple[str, ...]
    files: int
    python: str


def prepare(folder: Path) -> Corpus:
    """Read the corpus, train the tokenizer, encode; cached in `folder`."""
    from transformers import AutoTokenizer

    meta = folder / "corpus.json"
    if not meta.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files = list(corpus.standard_library())
        train_tokenizer((f.text for f in files if not f.held_out), VOCAB_SIZE, folder / "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        rng = np.random.default_rng(0)
        for part in (False, True):
            chosen = [f for f in files if f.held_out is part]
            ids: list[int] = [end]
            for i in rng.permutation(len(chosen)):
                ids += [*tokenizer(chosen[i].text)["input_ids"], end]
            name = "held_out" if part else "train"
            np.save(folder / f"{name}.npy", np.array(ids, dtype=np.uint16))
        paths = [f.path for f in files if f.held_out]
        facts = {"held_out": paths, "files": len(files), "python": platform.python_version()}
        meta.write_text(json.dumps(facts, indent=1))
    info = read_json(meta)
    return Corpus(
        train=np.load(folder / "train.npy", mmap_mode="r"),
        held_out=np.load(folder / "held_out.npy", mmap_mode="r"),
        held_out_paths=tuple(info["held_out"]),
        files=info["files"],
        python=info["python"],
    )


def run_stage(
    stage: str,
    folder: Path,
    *,
    steps: int | None = None,
    device: str = "cpu",
    compile_step: bool = False,
    report: Callable[[dict[str, float]], None] = lambda row: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run or resume one stage; True when it has reached its last step.

    Args:
        steps: overrides the stage's number of steps (a run that has not begun
            to decay may be made longer or shorter).
        compile_step: compile forward and backward (needs a C++ compiler).
    """
    if stage not in STAGES:
        raise OptionError(f"unknown stage {stage!r}: choose from {', '.join(STAGES)}")
    config = STAGES[stage]
    if isinstance(config, TeachConfig):
        if steps is not None:
            raise OptionError("--steps is for stages that train")
        return _teach(folder, config, device, compile_step, report, should_stop)
    data = prepare(folder / "corpus")
    if steps is not None:
        config = replace(config, steps=steps)
    model = new_model(SHAPES[stage], config.seed)
    if stage == "target":
        stack(trained(folder, "shallow"), model)
    if stage != "draft":
        batches, objective = windows(data.train, config), next_token
    else:
        batches = lessons_of(folder / "teach", cast(TeachConfig, STAGES["teach"]), config)
        objective = forward_kl()
    if compile_step:
        model.compile()
    done = train(
        model,
        batches,
        data.held_out,
        config,
        folder / stage,
        objective=objective,
        device=device,
        report=report,
        should_stop=should_stop,
    )
    if done:
        (folder / "pair").mkdir(exist_ok=True)
        shutil.copy(folder / stage / "log.csv", folder / "pair" / f"{stage}.csv")
        if stage in SHIPPED:
            save_checkpoint(model, folder / "corpus" / "tokenizer", folder / "pair" / stage)
    return done


def trained(folder: Path, stage: str) -> dict[str, Tensor]:
    """The weights that a stage left in its last checkpoint.

    Raises:
        OptionError: the stage has not been run.
    """
    path = folder / stage / "checkpoint.pt"
    if not path.exists():
        raise OptionError(f"{path} is missing: run the stage {stage!r} first")
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)["model"]
    return weights


def stack(shallow: dict[str, Tensor], model: nn.Module) -> None:
    """Fill a deeper `model` in place with the layers of a shallow one, over and over.

    Half the depth costs half the time, and the stack learns on from where the
    shallow model stood (Du et al., NeurIPS 2024, "Stacking your transformers").
    """
    layers = 1 + max(int(name.split(".")[2]) for name in shallow if ".layers." in name)
    weights = {}
    for name in model.state_dict():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) % layers)
        weights[name] = shallow[".".join(parts)]
    model.load_state_dict(weights)


def _teach(
    folder: Path,
    config: TeachConfig,
    device: str,
    compile_step: bool,
    report: Callable[[dict[str, float]], None],
    should_stop: Callable[[], bool],
) -> bool:
    """The target as it ships writes, and scores in the precision of training."""
    model = published(folder, "target")
    if compile_step:
        model.compile()
    return teach(
        load(
            str(folder / "pair" / "target"),
            device=device,
            max_batch=64,
            max_len=config.length + 1,
        ),
        model.to(device),
        prepare(folder / "corpus").train,
        config,
        folder / "teach",
        report=report,
        should_stop=should_stop,
    )


def published(folder: Path, stage: str) -> nn.Module:
    """The finished model of a stage, as it ships, in fp32.

    Raises:
        OptionError: the stage has not been run to its end.
        CheckpointError: it speaks another vocabulary than the corpus of this folder.
    """
    from transformers import Qwen3ForCausalLM

    place = folder / "pair" / stage
    if not (place / "config.json").exists():
        raise OptionError(f"{place} is missing: run the stage {stage!r} first")
    prepare(folder / "corpus")
    ours = folder / "corpus" / "tokenizer" / "tokenizer.json"
    if ours.read_bytes() != (place / "tokenizer.json").read_bytes():
        raise CheckpointError(
            f"{place} and {folder / 'corpus'} have different tokenizers (another Python's library "
            "makes another corpus): use another folder"
        )
    attention.register()
    model: Any = Qwen3ForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation=attention.NAME
    )
    return cast(nn.Module, model)


def save_checkpoint(model: nn.Module, tokenizer: Path, place: Path) -> Path:
    """Write `model` in bf16 with its tokenizer's files; it is left as it was."""
    place.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copy(file, place / file.name)
    saved = cast(Any, copy.deepcopy(model).to(torch.bfloat16))
    saved.config.dtype = torch.bfloat16
    saved.generation_config.eos_token_id = 0
    saved.save_pretrained(place)
    return place
