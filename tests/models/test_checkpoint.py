"""Checkpoints that cannot be run: each is one clear line, and no weights are read first."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from running import in_blocks, plain, text
from safetensors.torch import load_file, save_file

from checkpoints import LEAN
from outpace import CheckpointError, OptionError, OutpaceError, UnsupportedModelError
from outpace.models import inspect_checkpoint, lean, load_model, load_tokenizer
from outpace.models.adapter import TransformersAdapter
from outpace.models.checkpoint import Weights
from outpace.models.loading import choose_device, choose_dtype, eos_token_ids, locate
from outpace.models.tokenizer import Tokenizer


@pytest.fixture
def copy(saved, tmp_path):
    """`copy(name)`: a checkpoint to damage."""

    def make(name="llama2"):
        return shutil.copytree(saved(name).folder, tmp_path / "model")

    return make


@pytest.fixture
def sharded(saved, tmp_path):
    folder = saved("llama2-shards", *LEAN["llama2"], shard="20KB").folder
    return shutil.copytree(folder, tmp_path / "model")


@pytest.fixture
def unread(monkeypatch):
    """Reading a weight is a failure."""

    def fail(self, name, dtype, device):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Weights, "load", fail)


def load(folder):
    return load_model(inspect_checkpoint(folder), "fp32", "cpu")


def refusal(folder, kind=CheckpointError, of=load):
    """The one-line message with which a folder is refused."""
    with pytest.raises(kind) as caught:
        of(folder)
    assert isinstance(caught.value, OutpaceError)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def edit(folder, drop=(), **changes):
    """Change config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in drop:
        del config[key]
    path.write_text(json.dumps(config | changes))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- folders and configurations -------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    message = refusal(tmp_path / "nowhere", of=inspect_checkpoint)
    assert "nowhere does not exist: give a checkpoint folder, a hub id (owner/name)" in message


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "../b", "a/b/c", "~/no-such-model"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    assert "does not exist" in refusal(name, of=locate)


def test_a_hub_id_that_is_not_to_be_had(monkeypatch):
    asked = []

    def download(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = refusal("owner/name", of=inspect_checkpoint)
    assert "owner/name is neither a folder here nor to be had from the hub" in message
    assert "(no route to the hub): check the name and the network" in message
    assert asked[0][0] == "owner/name"
    assert not any(p.endswith((".bin", ".pt", ".py")) for p in asked[0][1])


def test_a_hub_id_is_the_folder_it_was_downloaded_to(monkeypatch, saved):
    folder = saved("llama2").folder
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(folder))
    assert inspect_checkpoint("owner/name").folder == folder


def test_weights_are_downloaded_once_the_rest_has_been_checked(monkeypatch, copy):
    folder, asked = copy(), []

    def download(name, allow_patterns, ignore_patterns):
        asked.append("*.safetensors" in allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    inspect_checkpoint("owner/name")
    assert asked == [False, True]
    asked.clear()
    edit(folder, architectures=["LlamaForSequenceClassification"])
    assert "not a causal language model" in refusal("owner/name", of=inspect_checkpoint)
    assert asked == [False]


@pytest.mark.parametrize("name", ["~no-such-user/model", "a" * 300, "./" + "a" * 300])
def test_a_path_that_the_system_refuses(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    assert "cannot be read" in refusal(name, of=inspect_checkpoint)


def test_a_file_that_may_not_be_read(copy, monkeypatch):
    from pathlib import Path

    def denied(self, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert "cannot be read (Permission denied)" in refusal(copy(), of=inspect_checkpoint)


def test_a_file_is_not_a_folder(copy):
    message = refusal(copy() / "model.safetensors", of=inspect_checkpoint)
    assert message.endswith("model.safetensors is a file: give the checkpoint's folder")


def test_no_configuration(copy):
    folder = copy()
    (folder / "config.json").unlink()
    assert "config.json is missing: download" in refusal(folder, of=inspect_checkpoint)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{'model_type': 'llama'}", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[1, 2]", "does not hold a JSON object"),
    ],
)
def test_a_configuration_that_is_not_json(copy, content, why):
    folder = copy()
    (folder / "config.json").write_bytes(content)
    message = refusal(folder, of=inspect_checkpoint)
    assert why in message
    assert message.endswith("download or copy the checkpoint again")


@pytest.mark.parametrize("kind", ["no-such-architecture", None])
def test_an_unknown_architecture(copy, kind):
    folder = copy()
    edit(folder, **({"model_type": kind} if kind else {"drop": ["model_type"]}))
    message = refusal(folder, UnsupportedModelError, of=inspect_checkpoint)
    assert "transformers cannot read" in message
    assert "check model_type in config.json, or upgrade transformers" in message


OTHERS = {
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "classifier": ("LlamaConfig", "LlamaForSequenceClassification"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_a_causal_language_model(tmp_path, unread, name):
    import transformers

    config, architecture = OTHERS[name]
    getattr(transformers, config)(architectures=[architecture]).save_pretrained(tmp_path)
    message = refusal(tmp_path, UnsupportedModelError, of=inspect_checkpoint)
    assert f"is not a causal language model ({architecture}): give a decoder-only" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": "many"},
        {"head_dim": 11},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=str,
)
def test_a_configuration_that_contradicts_itself(copy, unread, changes):
    folder = copy()
    edit(folder, **changes)
    assert "config" in refusal(folder, of=inspect_checkpoint)


@pytest.mark.parametrize(
    "wrong", [{"factor": "two"}, {"factor": None}, {"rope_theta": "x"}], ids=str
)
def test_a_rope_scaling_with_values_that_are_no_numbers(copy, unread, wrong):
    folder = copy()
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    edit(folder, rope_parameters=rope | wrong)
    refusal(folder)


def test_layers_without_a_word_on_their_rotation(copy):
    folder = copy("smollm3")
    edit(folder, no_rope_layers=[1])
    refusal(folder, of=lambda folder: in_blocks(load(folder), text(3), 3))


# --- weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 4, 100, 5000, -1])
def test_a_truncated_file(copy, unread, left):
    folder = copy()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    message = refusal(folder)
    assert "model.safetensors is truncated or corrupt (" in message
    assert message.endswith("download or copy the checkpoint again")


@pytest.mark.parametrize(
    "header", [b"no JSON here", b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}']
)
def test_a_corrupt_header(copy, unread, header):
    folder = copy()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    assert "model.safetensors is truncated or corrupt (" in refusal(folder)


def test_no_weights(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors: download" in refusal(folder)


def test_pickled_weights_are_not_opened(copy):
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "has pickled weights (.bin) only: convert them with save_pretrained" in message


def test_a_missing_shard(sharded, unread):
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    message = refusal(sharded)
    assert f"lacks 1 of {len(shards)} weight files, e.g. {shards[1].name}" in message


def test_a_truncated_shard(sharded, unread):
    path = sorted(sharded.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path.name} is truncated or corrupt" in refusal(sharded)


def test_a_shard_that_holds_other_tensors(sharded, unread):
    path = sorted(sharded.glob("*.safetensors"))[1]
    name = next(iter(load_file(path)))
    save_file({"other": torch.zeros(1)}, path, metadata={"format": "pt"})
    message = refusal(sharded)
    assert "has no tensor 'model." in message
    assert name.startswith("model.")


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"weight_map": ["model.safetensors"]}'],
)
def test_an_index_that_lists_nothing(sharded, unread, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "download or copy the checkpoint again" in refusal(sharded)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"],
)
def test_a_missing_tensor(copy, unread, name):
    folder = copy()
    edit_weights(folder, lambda tensors: tensors.pop(name))
    assert f"has no tensor {name!r}: download" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"vocab_size": 98}, "model.embed_tokens.weight"),
        ({"intermediate_size": 81}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_key_value_heads": 2}, "model.layers.0.self_attn.k_proj.weight"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
    ],
    ids=str,
)
def test_weights_of_another_configuration(copy, unread, changes, tensor):
    folder = copy()
    edit(folder, **changes)
    assert repr(tensor) in refusal(folder)


def test_the_message_gives_both_shapes(copy, unread):
    folder = copy()
    edit(folder, hidden_size=40, head_dim=12)
    message = refusal(folder)
    assert "is [97, 48], config.json asks for [97, 40]: the two files do not belong" in message


def test_parameters_left_over_are_never_ignored(copy, unread):
    """Fewer layers than the file holds; a bias that the configuration does not know."""
    folder = copy()
    edit(folder, num_hidden_layers=2)
    source = inspect_checkpoint(folder)
    assert source.lean is None
    assert "another layout" in source.reason


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama2", "model.layers.0.self_attn.q_proj.bias"),
        ("llama2", "model.layers.0.self_attn.q_norm.weight"),
        ("gpt2", "transformer.h.0.mlp.gate.bias"),
    ],
)
def test_a_parameter_that_no_runner_knows_is_refused(copy, name, extra):
    folder = copy(name)
    edit_weights(folder, lambda tensors: tensors.update({extra: torch.ones(48)}))
    assert extra in refusal(folder)


@pytest.mark.parametrize("name", ["transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias"])
def test_a_tensor_that_the_adapter_lacks_is_refused(copy, name):
    folder = copy("gpt2")
    edit_weights(folder, lambda tensors: tensors.pop(name))
    assert name in refusal(folder)


def test_a_shape_that_the_adapter_does_not_expect_is_refused(copy):
    folder = copy("gpt2")
    edit(folder, n_embd=40)
    assert "cannot be loaded by transformers" in refusal(folder)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_buffers_of_older_checkpoints_do_no_harm(copy, saved, extra):
    folder = copy()
    edit_weights(folder, lambda tensors: tensors.update({extra: torch.ones(6)}))
    model = load(folder)
    assert not isinstance(model, TransformersAdapter)
    assert torch.equal(in_blocks(model, text(9), 9), in_blocks(saved("llama2").load(), text(9), 9))


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_tied_embeddings_is_used_as_transformers_does(copy, saved, same):
    """Equal, it changes nothing; of its own values, it is the head whatever the configuration."""
    from transformers import AutoModelForCausalLM

    folder = copy("qwen3")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone() if same else embedding.flip(0).contiguous()
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    logits = in_blocks(load(folder), text(9), 9)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (logits - plain(theirs, text(9))).abs().max() <= 1e-4
    assert torch.equal(logits, in_blocks(saved("qwen3").load(), text(9), 9)) is same


def test_a_head_of_another_shape_is_refused(copy):
    folder = copy("qwen3")
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(97, 47)}))
    assert "'lm_head.weight'" in refusal(folder, of=inspect_checkpoint)


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("llama2", {"sliding_window": 4, "use_sliding_window": True}),
        ("mistral-window", {"use_sliding_window": False}),
        ("mistral-window", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_keys_that_the_family_ignores_are_ignored(copy, saved, name, stray):
    folder = copy(name)
    edit(folder, **stray)
    expected = in_blocks(saved(name).load(), text(20), 20)
    assert torch.equal(in_blocks(load(folder), text(20), 20), expected)


def test_eos_ids_that_are_none(copy):
    folder = copy("llama2")
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    source = inspect_checkpoint(folder)
    with pytest.raises(CheckpointError, match="eos_token_id '</s>'"):
        eos_token_ids(source, None)


def test_a_rope_type_that_the_lean_decoder_lacks_goes_to_the_adapter(saved):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    one = saved("llama-dynamic", "Llama", {"rope_parameters": rope})
    source = inspect_checkpoint(one.folder)
    assert source.lean is None
    assert "'dynamic' changes frequencies with the length" in source.reason
    model = load_model(source, "fp32", "cpu")
    assert isinstance(model, TransformersAdapter)
    assert (in_blocks(model, text(40), 7) - plain(one.hf, text(40))).abs().max() <= 1e-4


def test_progress_counts_the_layers(saved):
    seen = []
    source = inspect_checkpoint(saved("llama2").folder)
    load_model(source, "fp32", "cpu", progress=lambda *step: seen.append(step))
    assert seen == [(source.name, i, 3) for i in (1, 2, 3)]


def test_layers_that_are_packed_side_by_side_keep_their_order(saved, monkeypatch):
    source, ids = inspect_checkpoint(saved("llama2").folder), text(20)
    torch.set_num_threads(4)
    together = load_model(source, "fp32", "cpu")
    monkeypatch.setattr(lean, "_PACKERS", 1)
    alone = load_model(source, "fp32", "cpu")
    assert torch.equal(in_blocks(together, ids, 20), in_blocks(alone, ids, 20))


# --- what comes with the weights ------------------------------------------------------------


def test_no_tokenizer(copy):
    message = refusal(copy(), of=lambda folder: load_tokenizer(inspect_checkpoint(folder)))
    assert "has no tokenizer (tokenizer.json): save it there with" in message


def test_a_tokenizer_that_cannot_be_read(copy):
    folder = copy()
    (folder / "tokenizer.json").write_text("{")
    message = refusal(folder, of=Tokenizer.load)
    assert f"the tokenizer in {folder} cannot be read (" in message


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": None}, (9,)),
    ],
)
def test_where_the_end_of_text_comes_from(copy, generation, model, expected):
    folder = copy()
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder, **model)
    tokenizer = Tokenizer(type("", (), {"eos_token_id": 9})())
    assert eos_token_ids(inspect_checkpoint(folder), tokenizer) == expected


# --- device and dtype -----------------------------------------------------------------------


def test_a_device_is_taken_as_given():
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(False, False, "cpu"), (False, True, "mps"), (True, False, "cuda"), (True, True, "cuda")],
)
def test_the_device_by_default(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    assert choose_device(None) == torch.device(expected)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "tpu"])
def test_an_unknown_device(name):
    with pytest.raises(OptionError, match=r"unknown device .*: use cpu, cuda, cuda:N or mps"):
        choose_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "xpu", "meta"])
def test_a_device_that_is_not_here(monkeypatch, name):
    monkeypatch.setattr("torch.cuda.is_available", lambda: name == "cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(OptionError, match=f"{name}' is not available on this machine: use cpu"):
        choose_device(name)


def test_a_dtype_is_taken_as_given():
    cpu = torch.device("cpu")
    names = {
        torch.float32: ["fp32", "float32", torch.float32],
        torch.bfloat16: ["bf16", "bfloat16", torch.bfloat16],
        torch.float16: ["fp16", "float16", torch.float16],
    }
    for dtype, spellings in names.items():
        assert {choose_dtype(s, "float32", cpu) for s in spellings} == {dtype}


@pytest.mark.parametrize("dtype", ["int8", "half", "", torch.float64, torch.int8])
def test_an_unknown_dtype(dtype):
    with pytest.raises(OptionError, match=r"dtype .*: use .*bfloat16"):
        choose_dtype(dtype, "float32", torch.device("cpu"))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "stored", "fast", "expected"),
    [
        ("cpu", "float32", True, FP32),
        ("cpu", "bfloat16", True, BF16),
        ("cpu", torch.bfloat16, False, FP32),
        ("cpu", "float16", True, BF16),
        ("cpu", "float16", False, FP32),
        ("cpu", None, True, FP32),
        ("cuda", "bfloat16", True, BF16),
        ("cuda", "bfloat16", False, FP16),
        ("cuda", torch.float16, False, FP16),
        ("cuda", None, True, FP32),
    ],
)
def test_the_dtype_by_default(monkeypatch, device, stored, fast, expected):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: fast)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": fast})
    assert choose_dtype(None, stored, torch.device(device)) == expected


def test_the_dtype_of_a_checkpoint_is_found(copy, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    folder = copy()
    edit(folder, dtype="bfloat16")
    assert load_model(inspect_checkpoint(folder), None, "cpu").dtype == torch.bfloat16
