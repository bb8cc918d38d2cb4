"""The recipe of the shipped pair, run whole on a tiny corpus: stages, export, card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outpace
from outpace.cli.main import run
from outpace.training import corpus, demo
from outpace.training.corpus import SourceFile, is_held_out, is_test, standard_library
from outpace.training.loop import TrainConfig
from outpace.training.teacher import TeachConfig


@pytest.fixture
def tiny(monkeypatch):
    """A corpus of some twenty files, models of a few thousand weights, a handful of steps."""
    files = []
    for file in standard_library():
        if len(file.text) < 12_000 and not is_test(file.path):
            files.append(file)
        if len(files) > 60 and sum(f.held_out for f in files) >= 2:
            break
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
    }
    monkeypatch.setattr(corpus, "standard_library", lambda root=None, held_out=None: iter(files))
    for name in demo.SHAPES:
        depth = 2 if name == "target" else 1
        monkeypatch.setitem(demo.SHAPES, name, {**shape, "num_hidden_layers": depth})
    small = {"batch_tokens": 256, "length": 64, "long_length": 128, "evaluate_every": 2}
    stages = {
        n: replace(c, steps=3, warmup=1, **small)
        for n, c in demo.STAGES.items()
        if isinstance(c, TrainConfig)
    }
    stages["teach"] = TeachConfig(copied=18, generated=5, length=64, prompt=16, top=8)
    stages = {n: stages[n] for n in demo.STAGES}
    monkeypatch.setattr(demo, "STAGES", stages)
    monkeypatch.setattr("outpace.training.export.STAGES", stages)


def test_the_whole_recipe(tiny, tmp_path, capsys):
    first = ["train", "demo", "--out", str(tmp_path), "--stage", "shallow", "--minutes", "1e-9"]
    assert run(first) == 0
    assert "not finished" in capsys.readouterr().err
    assert run(["train", "demo", "--out", str(tmp_path)]) == 0
    out = tmp_path / "pair"
    generator = outpace.load(str(out / "target"), str(out / "draft"), k=2)
    plain = outpace.load(str(out / "target"))
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    assert generator.generate("def f(", **options).token_ids == (
        plain.generate("def f(", **options).token_ids
    )
    card = (out / "README.md").read_text()
    assert "PSF" in card
    assert all(p in card for p in demo.prepare(tmp_path / "corpus").held_out_paths)
    assert (out / "loss.png").stat().st_size > 1000
    (out / "target" / "tokenizer.json").write_text("{}")
    with pytest.raises(outpace.CheckpointError, match="different tokenizers"):
        demo.published(tmp_path, "target")


def test_a_stack_repeats_the_shallow_models_layers():
    shape = {**demo.SHAPES["draft"], "num_hidden_layers": 2}
    shallow = demo.new_model(shape, seed=1)
    deep = demo.new_model({**shape, "num_hidden_layers": 4}, seed=2)
    demo.stack(shallow.state_dict(), deep)
    for i, layer in enumerate(deep.model.layers):
        for name, weight in layer.named_parameters():
            below = shallow.model.layers[i % 2].get_parameter(name)
            assert torch.equal(weight, below)
    assert torch.equal(deep.model.embed_tokens.weight, shallow.model.embed_tokens.weight)


def test_a_stage_needs_those_before_it(tiny, tmp_path):
    with pytest.raises(outpace.OptionError, match="run the stage 'shallow' first"):
        demo.run_stage("target", tmp_path)
    with pytest.raises(outpace.OptionError, match="run the stage 'teach' first"):
        demo.run_stage("draft", tmp_path)
    with pytest.raises(outpace.OptionError, match="run the stage 'target' first"):
        demo.run_stage("teach", tmp_path)
    with pytest.raises(outpace.OptionError, match="stages that train"):
        demo.run_stage("teach", tmp_path, steps=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be more than 0"),
        (["--minutes", "nan"], "--minutes must be more than 0"),
        (["--stage", "target", "--steps", "0"], "--steps"),
        (["--stage", "tarket"], "unknown stage 'tarket'"),
        (["--steps", "3"], "--steps goes with one --stage"),
        (["--device", "tpu"], "device"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tiny, tmp_path, capsys, arguments, message):
    assert run(["train", "demo", "--out", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new" / "corpus").exists()


def test_a_place_that_cannot_be_written_is_refused_at_once(tiny, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["train", "demo", "--out", str(tmp_path / "file")]) == 2
    assert "use a folder" in capsys.readouterr().err


def test_a_fixed_share_of_files_is_held_out():
    assert is_held_out("pdb.py")
    assert not is_held_out("os.py")
    share = sum(is_held_out(f"package/module_{i}.py") for i in range(5000)) / 5000
    assert 0.03 < share < 0.05


def test_the_corpus_is_source_without_tables():
    files = list(standard_library(held_out=True))
    assert len(files) > 20
    assert all(isinstance(f, SourceFile) and f.text and f.held_out for f in files)
    assert not any(f.path.startswith("encodings/") or "site-packages" in f.path for f in files)


def test_a_stripped_library_is_a_clear_error(tmp_path):
    with pytest.raises(outpace.OptionError, match="no Python source found"):
        list(standard_library(tmp_path))
