"""What may draft for a target on a machine, and why the others may not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from checkpoints import SMALL, write
from outpace.cli.main import run
from outpace.drafters import NgramDrafter, Setting, parse
from outpace.drafters import candidates as module
from outpace.drafters.blueprint import Checkpoint
from outpace.drafters.candidates import Candidate, blueprint, candidates
from outpace.drafters.cascade import Cascade
from outpace.drafters.early_exit import EarlyExitDrafter
from outpace.errors import CompilerError
from outpace.kernels import load_library
from outpace.models.base import Adapter
from outpace.models.loading import inspect_checkpoint, load_model, load_tokenizer
from outpace.training.exits import write_adapter
from sibling_cases import cached, change, write_sizes

CPU = torch.device("cpu")


def has_kernels() -> bool:
    try:
        load_library()
    except CompilerError:
        return False
    return True


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="no compiler here")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_sizes(folder)
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path_factory, monkeypatch) -> Path:
    """No test sees the user's own cache."""
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def alone(made: Path, folder: Path) -> Path:
    """The large checkpoint where no other lies beside it."""
    return Path(shutil.copytree(made / "large", folder / "alone" / "large"))


def setting(folder: Path | str, device: str = "cpu", **options) -> Setting:
    source = inspect_checkpoint(folder)
    return Setting(source, load_tokenizer(source), torch.device(device), **options)


def fitting(found: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in found if candidate.fits]


def why(found: list[Candidate], name: str) -> str:
    (candidate,) = [c for c in found if c.name == name]
    return candidate.why


def test_the_shipped_pair():
    found = candidates(setting("demo"))
    assert fitting(found) == ["ngram", "demo-draft"]
    assert "9.7% of the target's parameters" in why(found, "demo-draft")
    assert "demo-draft is there" in why(found, "int4")
    assert all(c.why and "\n" not in c.why for c in found)


def test_look_ups_suit_the_size_of_the_target(made, monkeypatch):
    at = setting(made / "large")
    assert "ngram" in fitting(candidates(at))
    assert "small a model" in why(candidates(at), "suffix")
    monkeypatch.setattr(module, "_SMALL", at.source.weights.parameters)
    assert fitting(candidates(at))[0] == "suffix"
    assert "ngram" not in [candidate.name for candidate in candidates(at)]


def test_they_are_a_cascade_that_can_be_built(made):
    at = setting(made / "large")
    found = candidates(at)
    made_of = blueprint(found)
    assert isinstance(made_of, Cascade)
    assert made_of.name == "+".join(fitting(found)) == f"ngram+{made / 'tiny'}"
    assert parse(made_of.name).name == made_of.name
    assert made_of.check(at) == []
    target = load_model(at.source)
    drafter = made_of.build(target, lambda what, done, total: None)
    assert [type(m).__name__ for m in drafter.members] == ["NgramDrafter", "ModelDrafter"]


def test_a_draft_of_the_cache_is_called_by_its_id_and_not_looked_up_again(
    made, tmp_path, empty_cache, monkeypatch
):
    cached(empty_cache, "house/small", made / "small")
    at = setting(alone(made, tmp_path))
    found = candidates(at)
    assert fitting(found) == ["ngram", "house/small"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # not to be called
    (model,) = [c.make() for c in found if c.name == "house/small"]
    assert isinstance(model, Checkpoint)
    assert model.name == "house/small"
    assert model.check(at) == []


def test_one_draft_model_is_enough(made):
    found = candidates(setting(made / "large"))
    tiny, others = str(made / "tiny"), [str(made / name) for name in ("small", "padded")]
    assert tiny in fitting(found)
    assert not set(others) & set(fitting(found))
    assert {why(found, name) for name in others} == {f"{tiny} is preferred"}
    assert "parameters" in why(found, str(made / "middle"))


@needs_kernels
def test_without_a_draft_model_its_own_weights(made, tmp_path):
    folder = alone(made, tmp_path)
    found = candidates(setting(folder))
    assert fitting(found) == ["ngram", "int4"]
    assert why(found, "draft model").endswith("with its vocabulary on this disk")
    assert blueprint(found).check(setting(folder)) == []
    kept = candidates(setting(folder, quantize="int4"))
    assert fitting(kept) == ["ngram"]
    assert "kept in 4 bits" in why(kept, "int4")
    plain = candidates(setting(folder, compile=False))
    assert fitting(plain) == ["ngram"]
    assert "without compiled kernels" in why(plain, "int4")
    assert isinstance(blueprint(plain), NgramDrafter)


def test_what_could_be_downloaded_is_named(made, tmp_path):
    folder = shutil.copytree(made / "large", tmp_path / "alone" / "Qwen3-8B")
    found = candidates(setting(folder, compile=False))
    assert "Qwen/Qwen3-0.6B" in why(found, "draft model")


def test_on_a_gpu(made, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "memory_of", lambda device: (None, None))
    found = candidates(setting(alone(made, tmp_path), "cuda"))
    assert fitting(found) == ["ngram", "recycling"]
    assert "on cuda" in why(found, "int4")
    assert "rows" in why(candidates(setting(alone(made, tmp_path / "b"))), "recycling")


def test_what_memory_does_not_hold_is_left_out(made, tmp_path, monkeypatch):
    target = shutil.copytree(made / "large", tmp_path / "Qwen3-8B")
    known = str(shutil.copytree(made / "small", tmp_path / "Qwen3-0.6B"))
    other = str(shutil.copytree(made / "tiny", tmp_path / "tiny"))
    at = setting(target)
    sizes = [inspect_checkpoint(f).weights.parameters * 4 for f in (target, known, other)]  # fp32
    for free, left in (
        (sizes[0] + sizes[1], known),
        (sizes[0] + sizes[1] - 1, other),
        (sizes[0] + sizes[2], other),
        (sizes[0] + sizes[2] - 1, None),
    ):
        monkeypatch.setattr(module, "memory_of", lambda device, free=free: (None, free))
        found = candidates(at)
        assert [n for n in fitting(found) if n in (known, other)] == [n for n in [left] if n]
    assert "GB are free on cpu" in why(found, known)
    assert "GB are free on cpu" in why(found, other)
    found = candidates(setting(alone(made, tmp_path)))
    assert fitting(found) == ["ngram"]  # not int4 either


def test_memory_is_counted_as_the_target_is_kept(made, tmp_path, monkeypatch):
    target = shutil.copytree(made / "large", tmp_path / "large")
    shutil.copytree(made / "tiny", tmp_path / "tiny")
    large, tiny = (inspect_checkpoint(tmp_path / n).weights.parameters for n in ("large", "tiny"))
    for options, needed in (
        ({}, 4 * (large + tiny)),
        ({"dtype": "float16", "compile": False}, 2 * (large + tiny)),
        ({"quantize": "int4"}, 5 / 8 * large + 4 * tiny),
    ):
        for free, fits in ((needed + 1, True), (needed - 1, False)):
            monkeypatch.setattr(module, "memory_of", lambda device, free=free: (None, free))
            found = candidates(setting(target, **options))
            assert (str(tmp_path / "tiny") in fitting(found)) is fits, options


def adapter(hidden: int = SMALL["hidden_size"]) -> Adapter:
    return Adapter(torch.ones(hidden), torch.zeros(hidden, hidden))


def test_an_adapter_in_the_checkpoint_says_its_exit(made, tmp_path):
    folder = alone(made, tmp_path)
    write_adapter(adapter(), folder, layers=3)
    found = candidates(setting(folder, compile=False))
    name = f"early-exit:3,{folder}"
    assert fitting(found) == ["ngram", name]
    assert why(found, name).startswith("an adapter")
    made_of = parse(name)
    assert isinstance(made_of, EarlyExitDrafter)
    assert made_of.check(setting(folder)) == ()
    (own,) = [c.make() for c in found if c.name == name]
    assert own.name == made_of.name


@pytest.mark.parametrize(
    ("hidden", "layers", "reason"),
    [(48, None, "does not say which exit"), (7, 3, "states of 7 numbers"), (48, 12, "nothing to")],
)
def test_adapters_that_do_not_fit(made, tmp_path, hidden, layers, reason):
    folder = alone(made, tmp_path)
    write_adapter(adapter(hidden), folder, layers)
    found = candidates(setting(folder, compile=False))
    assert fitting(found) == ["ngram"]
    assert reason in why(found, "early-exit")


def test_a_broken_adapter(made, tmp_path):
    folder = alone(made, tmp_path)
    (folder / "adapter.safetensors").write_bytes(b"nothing")
    assert "write it again" in why(candidates(setting(folder)), "early-exit")


def test_a_configuration_says_its_exit(made, tmp_path):
    folder = alone(made, tmp_path)
    path = folder / "generation_config.json"
    change(path, assistant_early_exit=4)
    assert "early-exit:4" in fitting(candidates(setting(folder)))
    change(path, assistant_early_exit="first")
    assert "assistant_early_exit" in why(candidates(setting(folder)), "early-exit")


@pytest.mark.parametrize("place", ["folder", "name", "cache"])
def test_a_checkpoint_that_is_known_for_its_exit(made, tmp_path, place):
    if place == "cache":
        folder = cached(tmp_path / "hub", "facebook/layerskip-llama3-8B", made / "large")
    else:
        folder = shutil.copytree(made / "large", tmp_path / "a" / "layerskip-llama3-8B")
    at = setting(folder)
    if place == "name":
        at = setting(alone(made, tmp_path))
        at = replace(at, source=replace(at.source, name="facebook/layerskip-llama3-8B"))
    assert "early-exit:4" in fitting(candidates(at))


def test_other_targets_are_not(made, tmp_path):
    found = candidates(setting(alone(made, tmp_path)))
    assert "early-exit" not in "".join(fitting(found))
    assert "layers" in why(found, "early-exit")


def test_outside_the_llama_family(made, tmp_path):
    folder = tmp_path / "gpt2"
    write(folder, "GPT2", {"vocab_size": 320})
    for file in (made / "tokenizer").iterdir():
        shutil.copy(file, folder)
    found = candidates(setting(folder))
    assert fitting(found) == ["ngram"]
    assert "for the Llama family" in why(found, "int4")


def test_a_target_that_cannot_roll_back_has_none(made, tmp_path):
    from transformers import MambaConfig

    at = setting(alone(made, tmp_path))
    source = replace(at.source, name="mamba", lean=None, config=MambaConfig(vocab_size=320))
    found = candidates(replace(at, source=source))
    assert fitting(found) == []
    assert blueprint(found) is None
    assert len(found) == 5
    reason = "drafts cannot be taken back from mamba: it keeps a recurrent state"
    assert all(c.why.startswith(reason) for c in found)


def test_the_command_lists_them(capsys):
    assert run(["drafters", "demo", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if row["fits"]] == ["ngram", "demo-draft"]
    assert {"suffix", "recycling", "int4", "early-exit"} == {
        row["name"] for row in rows if not row["fits"]
    }
    assert all(set(row) == {"name", "fits", "why"} for row in rows)
    assert run(["drafters", "demo"]) == 0
    out = capsys.readouterr().out
    assert "May draft for demo:" in out
    assert "Left out:" in out
    assert "Try: --drafter ngram+demo-draft" in out


def test_the_command_does_not_list_every_folder(made, tmp_path, capsys):
    for i in range(15):
        shutil.copytree(made / "large", tmp_path / f"copy{i}")
    assert run(["drafters", str(tmp_path / "copy0"), "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert "... and 7 more: --json lists them." in out  # 14 copies, five others
    assert out.count("100% of the") == 7
    assert run(["drafters", str(tmp_path / "copy0"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 15


def test_the_command_refuses(refused, capsys, tmp_path):
    refused(["drafters", "nope"], "nope does not exist")
    refused(["drafters", "demo", "--device", "abacus"], "unknown device")
    refused(["drafters", "demo", "--quantize", "int3"], "int3")
    write(tmp_path / "mamba", "Mamba", {"state_size": 4})
    capsys.readouterr()
    refused(["drafters", str(tmp_path / "mamba")], "recurrent state")
