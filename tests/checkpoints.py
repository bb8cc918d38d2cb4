"""Small random checkpoints of many architectures, written with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.models.lean import LeanDecoder
from outpace.models.linear import multiplies_bf16

TEXT = ["def naïve(x):\n    return 'größe 你好 🙂' * x\n", "for i in range(10):\n    print(i)\n"]
VOCAB = 320
"""What the tokenizer of the pair is trained on, and its size."""

EXACT = [
    "float32",
    pytest.param(
        "bfloat16",
        marks=pytest.mark.skipif(
            not multiplies_bf16(torch.device("cpu")), reason="no bf16 on this CPU"
        ),
    ),
]
"""Types in which a row's result must not depend on its company, to the last bit."""


def promised(model, batch: int, rows: int):
    """The model, where it promises the same bits in passes of this size. In the lean decoder's bf16
    that depends on the processor: where it does not, the test is skipped."""
    lean = isinstance(model, LeanDecoder)
    if lean and model.dtype == torch.bfloat16 and model.doubt(batch, rows, False):
        pytest.skip("on this processor the lean decoder does not promise it in bf16")
    return model


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama-tied-gqa": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-yarn": (
        "Llama",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 128}},
    ),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 9}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen2-window": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
}

ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 12}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 10}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoX", {}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 12}),
    "cohere": ("Cohere", {"num_key_value_heads": 2}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 4}),
    "rwkv": ("Rwkv", {"attention_hidden_size": 48}),
    "bloom": ("Bloom", {}),
}

_CLASS = {"GPT2": "GPT2LMHeadModel", "Gemma3": "Gemma3ForCausalLM"}
_CONFIG = {"Gemma3": "Gemma3TextConfig"}


def build(kind: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A random fp32 model whose logits differ clearly between tokens."""
    import transformers

    config_class = getattr(transformers, _CONFIG.get(kind, f"{kind}Config"))
    config = config_class(**(SMALL | options))
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASS.get(kind, f"{kind}ForCausalLM"))(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, away from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write(folder: Path, kind: str, options: dict[str, Any], shard: str = "5GB") -> Any:
    """Save a random checkpoint; returns the model it came from."""
    model = build(kind, options)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def swap_two_tokens(folder: Path) -> None:
    """Make the tokenizer in `folder` disagree on two ids."""
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    vocab = value["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(value), encoding="utf-8")
