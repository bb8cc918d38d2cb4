"""The lean decoder: the Llama family in one short forward pass.

Query, key and value projections are one matrix, gate and up another; keys and
values are written in place into the slots; attention reads each slot up to a
bucket of its own length. So what a row computes depends on its own sequence
alone: not on how many rows are computed with it (linear layers are prepacked,
attention gets at least four query rows), nor on the neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedModelError
from .base import ForwardOutput
from .cache import SlotCache, extent
from .checkpoint import Weights
from .config import LeanConfig
from .linear import Linear
from .masks import additive, causal, visible, within
from .norm import RMSNorm
from .rope import inverse_frequencies, rotate, rotation_tables

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

QUERY_ROWS = 4
"""Attention is asked for a multiple of this many query rows. It works in blocks of 32; a block,
or what is left over, of fewer rows than this takes other kernels, which round differently."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's parameters."""

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: tuple[RMSNorm, Tensor] | None  # weights [heads + kv_heads, D]
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring sequences in neighbouring slots whose attention has one shape."""

    rows: slice
    slots: slice
    length: int  # positions read
    masks: dict[int | None, Tensor]  # per window, additive, [b, 1, G * T, length]


class LeanDecoder:
    """A Llama-family decoder over a slot cache. See `LanguageModel`."""

    def __init__(
        self,
        config: LeanConfig,
        load: Callable[[str], Tensor],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: `load` returns a parameter by its checkpoint name, in dtype and on device."""
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self._embedding = load(EMBEDDING)
        self._layers = []
        for i in range(config.layers):
            self._layers.append(_layer(config, load, f"model.layers.{i}."))
            progress()
        self._norm = _norm(config, load("model.norm.weight"))
        self._head = Linear(self._embedding if config.tied else load(HEAD))
        inverse, factor = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        self._rope = inverse, factor
        self._cos, self._sin = self._tables(min(config.context_length, 4096))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def _tables(self, positions: int) -> tuple[Tensor, Tensor]:
        return rotation_tables(*self._rope, positions, self.dtype, self.device)

    def new_cache(self, slots: int, max_len: int) -> SlotCache:
        c = self.config

        def make(slots: int, capacity: int) -> list[Tensor]:
            # Zeros, not empty: masked positions are multiplied by 0, and 0 * NaN is NaN.
            shape = (slots, capacity, c.kv_heads, c.head_dim)
            return [
                torch.zeros(shape, dtype=self.dtype, device=self.device)
                for _ in range(2 * c.layers)
            ]

        return SlotCache(slots, max_len, make)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        slots: Sequence[int],
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        logits: bool = True,
    ) -> ForwardOutput:
        c = self.config
        rows = tokens.shape[1]
        cache.reserve(slots, rows)
        write = cache.row_indices(slots, rows).to(self.device)
        groups = self._groups(cache, slots, rows, positions, mask)
        cos, sin = self._rotations(positions, cache)
        h = F.embedding(tokens, self._embedding)  # [B, T, H]
        states: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            x = layer.input_norm(h)
            keys, values = cache.storage[2 * i], cache.storage[2 * i + 1]
            angles = (cos, sin) if c.rotary[i] else None
            q = self._write(layer, x, angles, keys, values, write)
            h = h + layer.out(self._attend(q, keys, values, groups, c.windows[i]))
            x = layer.mlp_norm(h)
            gate, up = layer.gate_up(x).chunk(2, -1)
            h = h + layer.down(F.silu(gate) * up)
            if i in taps:
                states[i] = h
        tapped = tuple(states[i] for i in taps)
        return ForwardOutput(self._head(self._norm(h)) if logits else None, tapped)

    def _rotations(self, positions: Tensor, cache: SlotCache) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[B, T, 1, D]`; the tables grow with the cache."""
        if cache.capacity > len(self._cos) and len(self._cos) < self.context_length:
            self._cos, self._sin = self._tables(min(2 * cache.capacity, self.context_length))
        return self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)

    def _write(
        self,
        layer: Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        write: Tensor,
    ) -> Tensor:
        """Project, rotate, put keys and values into the slots; queries `[B, T, heads, D]`."""
        c = self.config
        batch, rows, _ = x.shape
        qkv = layer.qkv(x).view(batch, rows, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = torch.split(qkv, [c.heads + c.kv_heads, c.kv_heads], 2)
        if layer.qk_norm is not None:
            norm, weight = layer.qk_norm
            qk = norm(qk) * weight
        if angles is not None:
            qk = rotate(qk, *angles)
        q, k = torch.split(qk, [c.heads, c.kv_heads], 2)
        flat = (batch * rows, c.kv_heads, c.head_dim)
        if self.dtype == torch.float16:  # what overflows must not reach the rows it is masked from
            k, v = k.nan_to_num(), v.nan_to_num()
        keys.view(-1, *flat[1:]).index_copy_(0, write, k.reshape(flat))
        values.view(-1, *flat[1:]).index_copy_(0, write, v.reshape(flat))
        return q

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, groups: list[_Group], window: int | None
    ) -> Tensor:
        """Attention `[B, T, heads * D]`; a key-value head's query heads share its rows.

        Folding the query heads of a group into rows `[b, kv_heads, G * T, D]`
        reads keys and values as they lie, without repeating them.
        """
        c = self.config
        batch, rows = q.shape[:2]
        fold = c.heads // c.kv_heads
        folded = q.view(batch, rows, c.kv_heads, fold, c.head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(batch, c.kv_heads, fold * rows, c.head_dim)
        short = -fold * rows % QUERY_ROWS
        if short:
            folded = F.pad(folded, (0, 0, 0, short))
        parts = [
            F.scaled_dot_product_attention(
                folded[g.rows],
                keys[g.slots, : g.length].transpose(1, 2),
                values[g.slots, : g.length].transpose(1, 2),
                attn_mask=g.masks[window],
            )
            for g in groups
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if short:
            out = out[:, :, :-short]
        out = out.view(batch, c.kv_heads, fold, rows, c.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, rows, c.heads * c.head_dim)

    def _groups(
        self,
        cache: SlotCache,
        slots: Sequence[int],
        rows: int,
        positions: Tensor,
        mask: Tensor | None,
    ) -> list[_Group]:
        """Split the batch into runs of neighbouring slots with the same bucket, so that no
        key or value is copied and a sequence reads as much alone as among others."""
        extents = [extent(cache.lengths[s], rows) for s in slots]
        groups, start = [], 0
        for end in range(1, len(slots) + 1):
            together = end < len(slots) and (
                slots[end] == slots[end - 1] + 1 and extents[end] == extents[start]
            )
            if not together:
                picked, length = slice(start, end), extents[start]
                lengths = [cache.lengths[s] for s in slots[picked]]
                block = None if mask is None else mask[picked]
                masks = self._masks(lengths, rows, length, positions[picked], block)
                held = slice(slots[start], slots[end - 1] + 1)
                groups.append(_Group(picked, held, length, masks))
                start = end
        return groups

    def _masks(
        self,
        lengths: Sequence[int],
        rows: int,
        length: int,
        positions: Tensor,
        block: Tensor | None,
    ) -> dict[int | None, Tensor]:
        """Per window, additive masks `[b, 1, G * T, length]`; padding rows see everything."""
        fold = self.config.heads // self.config.kv_heads
        short = -fold * rows % QUERY_ROWS
        windows = set(self.config.windows)
        if block is None and windows == {None}:
            return {None: causal(lengths, rows, length, fold, short, self.dtype, self.device)}
        seen = visible(lengths, rows, length, block, self.device)
        masks = {}
        for w in windows:
            near = seen if w is None else seen & within(w, lengths, positions, length)
            masks[w] = F.pad(additive(near, self.dtype).repeat(1, 1, fold, 1), (0, 0, 0, short))
        return masks


def _layer(c: LeanConfig, load: Callable[[str], Tensor], prefix: str) -> Layer:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."

    def fused(names: Sequence[str], bias: bool) -> Linear:
        weight = torch.cat([load(n + ".weight") for n in names])
        return Linear(weight, torch.cat([load(n + ".bias") for n in names]) if bias else None)

    qk_norm = None
    if c.qk_norm:
        weight = torch.cat(
            [
                load(attention + "q_norm.weight").expand(c.heads, -1),
                load(attention + "k_norm.weight").expand(c.kv_heads, -1),
            ]
        )
        qk_norm = RMSNorm(None, c.head_dim, c.norm_eps, weight), weight
    return Layer(
        input_norm=_norm(c, load(prefix + "input_layernorm.weight")),
        qkv=fused([attention + n for n in ("q_proj", "k_proj", "v_proj")], c.qkv_bias),
        qk_norm=qk_norm,
        out=fused([attention + "o_proj"], c.output_bias),
        mlp_norm=_norm(c, load(prefix + "post_attention_layernorm.weight")),
        gate_up=fused([mlp + "gate_proj", mlp + "up_proj"], c.mlp_bias),
        down=fused([mlp + "down_proj"], c.mlp_bias),
    )


def _norm(c: LeanConfig, weight: Tensor) -> RMSNorm:
    return RMSNorm(weight, c.hidden_size, c.norm_eps, weight)


def parameter_shapes(c: LeanConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder reads, by checkpoint name, with its shape."""
    q, kv, hidden, mlp = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden_size, c.mlp_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tied:
        shapes[HEAD] = (c.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q, hidden, c.qkv_bias),
        "self_attn.k_proj": (kv, hidden, c.qkv_bias),
        "self_attn.v_proj": (kv, hidden, c.qkv_bias),
        "self_attn.o_proj": (hidden, q, c.output_bias),
        "mlp.gate_proj": (mlp, hidden, c.mlp_bias),
        "mlp.up_proj": (mlp, hidden, c.mlp_bias),
        "mlp.down_proj": (hidden, mlp, c.mlp_bias),
    }
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if c.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (c.head_dim,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_weights(config: LeanConfig, weights: Weights) -> None:
    """Every tensor is there with its shape, and none is left over.

    Raises:
        CheckpointError: one is missing or misshapen.
        UnsupportedModelError: the checkpoint has parameters the decoder would ignore.
    """
    for name, shape in parameter_shapes(config).items():
        weights.check(name, shape)
    if config.tied and HEAD in weights:
        weights.check(HEAD, (config.vocab_size, config.hidden_size))
    rest = weights.unused(lambda n: n.endswith("rotary_emb.inv_freq"))
    if rest:
        raise UnsupportedModelError(f"it has parameters of another layout, e.g. {rest[0]!r}")
