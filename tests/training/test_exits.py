"""Adapters for exits: training raises acceptance, what is written is what drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

import outpace
from outpace.cli.main import run
from outpace.drafters.early_exit import read_adapter
from outpace.models.loading import inspect_checkpoint, load_model
from outpace.training.exits import AdapterConfig, train_adapter, write_adapter


@pytest.fixture(scope="module")
def target(pair):
    return load_model(inspect_checkpoint(pair / "target"), "float32", "cpu")


TOKENS = np.random.default_rng(0).integers(0, 320, 4000)


def trained(target, pair, **options):
    seen = []
    config = AdapterConfig(**({"layer": 1, "steps": 60, "rows": 2, "length": 64} | options))
    source = inspect_checkpoint(pair / "target")
    return train_adapter(target, source, TOKENS, config, seen.append), seen


def test_training_raises_acceptance_and_the_adapter_holds_it(target, pair, tmp_path):
    adapter, seen = trained(target, pair)
    first, last = (float(np.mean([s["alpha"] for s in some])) for some in (seen[:5], seen[-5:]))
    assert last > first + 0.02
    assert [s["step"] for s in seen] == list(range(1, 61))
    write_adapter(adapter, tmp_path)
    read = read_adapter(tmp_path)
    assert torch.equal(read.weight, adapter.weight)
    ids, at = torch.from_numpy(TOKENS[None, :60]), torch.arange(60)[None]

    def law(model):
        return model.forward(ids, at, target.new_cache(1, 64), [0]).logits[0].softmax(-1)

    p = law(target)
    with_, without = (
        float(torch.minimum(p, law(target.part([0], a))).sum(-1).mean()) for a in (read, None)
    )
    assert with_ > without + 0.01


def test_the_same_seed_makes_the_same_adapter(target, pair):
    a, b, c = (trained(target, pair, steps=3, seed=s)[0].weight for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "needs a target of more, this one has 3"),
        ({"layer": 0}, "layer must be at least 1"),
        ({"length": 400, "rows": 20}, "too few for 20 windows of 400"),
        ({"length": 600}, "longer than the target's context of 512"),
    ],
)
def test_what_cannot_be_trained_is_refused(target, pair, options, message):
    with pytest.raises(outpace.OutpaceError, match=message):
        trained(target, pair, **options)


def test_the_command_writes_what_early_exit_takes(pair, tmp_path, capsys, refused, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("for i in range(3):\n    print(i)\n" * 400)
    model = ["--model", str(pair / "target")]
    arguments = [*model, "--file", str(text), "--steps", "2", "--out", str(tmp_path / "a")]
    assert run(["train", "exit", "--layers", "2", *arguments]) == 0
    with safe_open(tmp_path / "a" / "adapter.safetensors", "pt") as handle:
        assert handle.metadata()["layers"] == "2"
    capsys.readouterr()
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    target = str(pair / "target")
    plain = outpace.load(target).generate("for i", **options)
    fast = outpace.load(target, f"early-exit:2,{tmp_path / 'a'}").generate("for i", **options)
    assert fast.token_ids == plain.token_ids
    refused(["train", "exit", "--layers", "5", *arguments], "leaves nothing to verify with")
    (tmp_path / "short.txt").write_text("x")
    short = [*model, "--file", str(tmp_path / "short.txt"), "--out", str(tmp_path / "b")]
    monkeypatch.setattr("outpace.assembly.load_model", None)  # before any weight is read
    refused(["train", "exit", "--layers", "1", *short], "too few for 8 windows of 256")
