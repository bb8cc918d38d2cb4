"""What the lean decoder needs to know of a checkpoint, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .rope import inverse_frequencies

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def context_length(config: Any) -> int:
    """Positions a transformers configuration was made for; 2048 where it is silent."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "max_position_embeddings", None) or 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanConfig:
    """The shape of a Llama-family decoder.

    Attributes:
        windows: per layer, how many positions back a row may look (itself
            included); None is no limit.
        rotary: per layer, whether queries and keys are rotated.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    context_length: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]

    @classmethod
    def read(cls, c: Mapping[str, Any]) -> LeanConfig:
        """From a configuration with its defaults filled in.

        Raises:
            UnsupportedModelError: another family, or a variant that the lean
                decoder would not compute exactly; the message is the reason.
            CheckpointError: values that contradict each other.
        """
        family = c.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModelError(f"{family!r} is not of the Llama family")
        if c.get("hidden_act") != "silu":
            raise UnsupportedModelError(f"its activation is {c.get('hidden_act')!r}, not 'silu'")
        if c.get("quantization_config"):
            raise UnsupportedModelError("its weights are quantised")
        layers, heads, hidden = (
            int(c["num_hidden_layers"]),
            int(c["num_attention_heads"]),
            int(c["hidden_size"]),
        )
        kv_heads = int(c.get("num_key_value_heads") or heads)
        if layers < 1:
            raise CheckpointError(f"config.json has {layers} layers: at least one is needed")
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json has {heads} heads over {kv_heads} key-value heads: the first must "
                "be a multiple of the second"
            )
        attention_bias = family != "mistral" and bool(c.get("attention_bias"))
        rope, head_dim = _rope(c), int(c.get("head_dim") or hidden // heads)
        context_length = int(c["max_position_embeddings"])
        if context_length < 1:
            raise CheckpointError(f"config.json has max_position_embeddings {context_length}")
        try:
            inverse_frequencies(rope, head_dim, context_length)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"config.json has rotary parameters that make no sense ({error!r}): {rope}"
            ) from error
        return cls(
            family=family,
            vocab_size=int(c["vocab_size"]),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_size=int(c["intermediate_size"]),
            context_length=context_length,
            norm_eps=float(c["rms_norm_eps"]),
            tied=bool(c.get("tie_word_embeddings")),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=family != "mistral" and bool(c.get("mlp_bias")),
            qk_norm=family == "qwen3",
            rope=rope,
            windows=_windows(c, layers),
            rotary=_rotary(c, layers),
        )


def _rope(c: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise UnsupportedModelError("its rotary embedding differs by layer type")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or c.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("its rotary embedding covers part of each head only")
    rope.setdefault("rope_type", rope.get("type") or "default")
    rope.setdefault("rope_theta", c.get("rope_theta") or 10000.0)
    if rope["rope_type"] in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"its rope_type {rope['rope_type']!r} changes frequencies with the length of the text"
        )
    return rope


def _windows(c: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Mistral has one window for all layers, Llama none whatever its configuration says, the
    others name the kind of each layer."""
    family, window = c["model_type"], c.get("sliding_window")
    off = family == "llama" or (family != "mistral" and c.get("use_sliding_window") is False)
    if not window or off:
        return (None,) * layers
    if int(window) < 0:
        raise CheckpointError(f"config.json has a sliding_window of {window}")
    if family == "mistral":
        return (int(window),) * layers
    kinds = c.get("layer_types") or ()
    if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != layers:
        raise UnsupportedModelError(f"its layer types are {sorted(set(kinds))}")
    return tuple(int(window) if k == "sliding_attention" else None for k in kinds)


def _rotary(c: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    flags = c.get("no_rope_layers")  # 1 where the layer does rotate
    if flags and len(flags) != layers:
        raise CheckpointError(
            f"config.json has {layers} layers and {len(flags)} entries in no_rope_layers"
        )
    return tuple(bool(f) for f in flags) if flags else (True,) * layers
