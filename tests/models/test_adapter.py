"""The adapter computes what the model's own code computes, or refuses the model.

Every architecture runs through prefixes, blocks, branches, rollbacks and
neighbours, past its sliding window and past a bucket of the cache, and is
compared with plain forward passes. Models that would not agree are refused
when they are loaded.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from running import (
    alone,
    append,
    feed,
    greedy,
    in_blocks,
    keep,
    path_to,
    plain,
    plain_greedy,
    text,
    together,
)

from checkpoints import ADAPTED, LEAN, REFUSED, build
from outpace import UnsupportedModelError
from outpace.models import adapter, inspect_checkpoint, load_model, prefill
from outpace.models.adapter import TransformersAdapter
from outpace.types import Tree

TREE = Tree((-1, -1, 0, 1, 1, 3))


def off(a, b):
    """The largest difference, relative to the largest logit."""
    return ((a.float() - b.float()).abs().max() / b.abs().max()).item()


# --- as the model itself --------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTED)
def test_logits_are_the_models_own(saved, name):
    model, ids = saved(name).load(), text(90)
    assert isinstance(model, TransformersAdapter)
    assert model.weight_bytes == sum(p.nbytes for p in saved(name).hf.parameters())
    assert off(in_blocks(model, ids, 17, 1, 5, 4, 1, 12), plain(saved(name).hf, ids)) <= 1e-4


@pytest.mark.parametrize("name", ADAPTED)
def test_greedy_continuation_is_the_models_own(saved, name):
    expected = plain_greedy(saved(name).hf, text(8), 40, repeats=False)
    assert greedy(saved(name).load(), text(8), 40, repeats=False) == expected


@pytest.mark.parametrize("prefix", [20, 61])
@pytest.mark.parametrize("name", ADAPTED)
def test_branches_and_rollbacks(saved, name, prefix):
    one, ids = saved(name), text(prefix + 1 + len(TREE))
    before, (root, *nodes), after = ids[:prefix], ids[prefix:], text(3, seed=1)
    cache = one.load().new_cache(3, 256)
    prefill(one.load(), cache, 1, before)
    rows = feed(one.load(), cache, 1, [root, *nodes], TREE)
    for node in range(len(TREE)):
        path = [nodes[n] for n in path_to(TREE, node)]
        assert off(rows[node + 1], plain(one.hf, [*before, root, *path])[-1]) <= 1e-4
    path = path_to(TREE, 5)
    keep(cache, 1, path)
    whole = [*before, root, *(nodes[n] for n in path), *after]
    assert off(append(one.load(), cache, 1, after), plain(one.hf, whole)[-3:]) <= 1e-4
    cache.truncate(1, prefix)
    assert off(feed(one.load(), cache, 1, after), plain(one.hf, [*before, *after])[-3:]) <= 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_a_branch_under_a_causal_mask_is_another_text(saved, name):
    model, ids = saved(name).load(), text(20)
    cache = model.new_cache(1, 64)
    prefill(model, cache, 0, ids[:13])
    assert off(feed(model, cache, 0, ids[13:]), feed(model, cache, 0, ids[13:], TREE)) > 1e-2


@pytest.mark.parametrize("name", ADAPTED)
def test_slots_of_different_lengths_run_together(saved, name):
    model, lengths = saved(name).load(), (30, 3, 70)
    prefixes = {s: text(n, seed=n) for s, n in zip((4, 0, 1), lengths, strict=True)}
    blocks = [text(5, seed=n) for n in range(3)]
    joint = together(model, prefixes, blocks)
    assert off(joint, alone(model, prefixes, blocks)) <= 1e-4
    assert off(joint[1], alone(model, prefixes, blocks)[0]) > 1e-2


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "starcoder2"])
def test_a_window_ignored_shows_in_the_logits(saved, monkeypatch, name):
    monkeypatch.setattr(adapter, "_windows", lambda config: None)
    model, ids = load_model(inspect_checkpoint(saved(name).folder), "fp32", "cpu"), text(40)
    assert off(in_blocks(model, ids, 5), plain(saved(name).hf, ids)) > 1e-2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ADAPTED)
def test_half_precision_is_near_full_precision(saved, name, dtype):
    model, ids = saved(name).load(dtype), text(40)
    assert model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    logits, full = in_blocks(model, ids, 17, 5).float(), plain(saved(name).hf, ids)
    assert logits.isfinite().all()  # on average near: half a bit can choose another expert
    assert (logits - full).abs().mean() <= {"bf16": 0.05, "fp16": 0.01}[dtype] * full.abs().mean()


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_taps_are_the_models_hidden_states(saved, name):
    one, ids = saved(name), text(12)
    with torch.inference_mode():
        states = one.hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    cache = one.load().new_cache(1, 64)
    first = prefill(one.load(), cache, 0, ids[:7], taps=(1, 0))
    rest = one.load().forward(
        torch.tensor([ids[7:]]), torch.arange(7, 12)[None], cache, [0], taps=(1, 0), logits=False
    )
    assert rest.logits is None
    for tap, layer in enumerate((1, 0)):
        assert off(torch.cat([first[tap], rest.taps[tap]], 1), states[layer + 1]) <= 1e-4


def test_the_last_layer_is_not_tapped_behind_the_final_norm(saved):
    """transformers shows it normed, the lean decoder as it is: refused rather than different."""
    model, at = TransformersAdapter(saved("qwen3").hf), torch.arange(6)[None]
    with pytest.raises(UnsupportedModelError, match="tap an earlier layer"):
        model.forward(at + 5, at, model.new_cache(1, 64), [0], taps=(2,))


@pytest.mark.parametrize("name", ["llama-tied-gqa", "qwen2-window", "smollm3"])
def test_what_the_lean_decoder_runs_the_adapter_runs_too(saved, name):
    model, ids = TransformersAdapter(saved(name).hf), text(40)
    assert off(in_blocks(model, ids, 17, 5), in_blocks(saved(name).load(), ids, 17, 5)) <= 1e-4


def test_a_variant_beside_the_lean_decoder_goes_to_the_adapter(saved):
    kind, options = LEAN["mistral-window"]
    one, ids = saved("mistral-gelu", kind, options | {"hidden_act": "gelu"}), text(40)
    assert isinstance(one.load(), TransformersAdapter)
    assert off(in_blocks(one.load(), ids, 17, 5), plain(one.hf, ids)) <= 1e-4


def test_a_text_may_fill_the_context(saved):
    one = saved("gpt2-40", "GPT2", {"max_position_embeddings": 40})
    assert one.load().context_length == 40
    assert off(in_blocks(one.load(), text(40), 7), plain(one.hf, text(40))) <= 1e-4


# --- refused --------------------------------------------------------------------------------

REASONS = {"mamba": "recurrent state", "rwkv": "recurrent state", "bloom": "no position_ids"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_roll_back_is_refused_with_its_reason(saved, monkeypatch, name):
    def unreachable(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", unreachable)
    with pytest.raises(UnsupportedModelError, match=REASONS[name]) as caught:
        inspect_checkpoint(saved(name).folder)
    message = str(caught.value)
    assert message.startswith(f"{saved(name).folder} ({name}) cannot be run exactly: ")
    assert f"{name!r} is not of the Llama family" in message
    assert message.endswith("Use a model whose cache holds keys and values only")
    assert "\n" not in message


def patched(name, forward):
    """The model with `forward(self, original, **arguments)` in the place of its own."""
    model = build(*ADAPTED[name])
    original = model.forward
    model.forward = MethodType(lambda self, **kw: forward(self, original, **kw), model)
    return model


def drop_the_mask(self, original, attention_mask=None, **rest):
    return original(**rest)


def mask_causally(self, original, attention_mask=None, **rest):
    if attention_mask is not None:  # the block's branches merged into one line
        rows = attention_mask.shape[2]
        seen = (attention_mask == 0).any(2, keepdim=True).expand_as(attention_mask)
        first = seen[0, 0, 0].sum() - rows
        later = torch.arange(seen.shape[-1]) > first + torch.arange(rows)[:, None]
        attention_mask = attention_mask.zero_().masked_fill(~seen | later, -torch.inf)
    return original(attention_mask=attention_mask, **rest)


def drop_the_positions(self, original, position_ids=None, **rest):
    return original(**rest)


def remember_more(self, original, past_key_values=None, **rest):
    out = original(past_key_values=past_key_values, **rest)
    if past_key_values is not None:
        self.state = getattr(self, "state", 0) + rest["input_ids"].float().mean()
        out.logits = out.logits + 0.01 * self.state
    return out


def nothing_but_nan(self, original, **rest):
    out = original(**rest)
    out.logits = out.logits * torch.nan
    return out


def change_nothing(self, original, **rest):
    return original(**rest)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize(
    "forward",
    [drop_the_mask, mask_causally, drop_the_positions, remember_more, nothing_but_nan],
)
def test_the_trial_finds_a_model_that_does_not_agree(name, forward):
    with pytest.raises(UnsupportedModelError, match=r"after a rollback .* ignores the mask"):
        TransformersAdapter(patched(name, forward))


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_the_trial_passes_a_model_that_agrees(name):
    TransformersAdapter(patched(name, change_nothing))


def test_a_model_that_does_not_run_is_refused():
    def fail(self, original, **rest):
        raise RuntimeError("no kernel for this\nand a second line")

    def fail_on_masks(self, original, attention_mask=None, **rest):
        return original(**rest) if attention_mask is None else fail(self, original)

    with pytest.raises(UnsupportedModelError, match=r"^it does not run: no kernel for this$"):
        TransformersAdapter(patched("gpt2", fail))
    with pytest.raises(UnsupportedModelError, match=r"explicit mask .*\(no kernel for this\)$"):
        TransformersAdapter(patched("gpt2", fail_on_masks))


def test_a_model_without_a_cache_is_refused():
    def forget(self, original, use_cache=None, **rest):
        return original(use_cache=False, **rest)

    with pytest.raises(UnsupportedModelError, match="no cache of keys and values"):
        TransformersAdapter(patched("gpt2", forget))


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 32,
}
REACH = {
    "local attention": (
        "GPTNeo",
        {
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": 70,
            "num_heads": 4,
            "num_layers": 3,
        },
    ),
    "kept keys": ("Doge", {"num_key_value_heads": 2, "keep_window_size": 16}),
    "longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "chunks": (
        "Llama4",
        {
            "attention_chunk_size": 16,
            "num_key_value_heads": 2,
            "num_local_experts": 2,
            "intermediate_size_mlp": 80,
            "head_dim": 12,
            "moe_layers": [],
        },
    ),
}


@pytest.mark.parametrize("name", REACH)
def test_what_differs_on_long_texts_alone_is_refused_or_exact(saved, monkeypatch, name):
    monkeypatch.setitem(build.__globals__["_CONFIG"], "Llama4", "Llama4TextConfig")
    one = saved(name, *REACH[name])
    try:
        model = one.load()
    except UnsupportedModelError:
        return
    prefixes, blocks = {0: text(10), 1: text(90, seed=1)}, [text(5, seed=n) for n in range(2)]
    expected = [
        plain(one.hf, [*p, *b])[-5:] for p, b in zip(prefixes.values(), blocks, strict=True)
    ]
    assert off(together(model, prefixes, blocks), torch.stack(expected)) <= 1e-4
