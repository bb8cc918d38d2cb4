"""The lean decoder: the Llama family in one short forward pass.

Query, key and value projections are one matrix, gate and up another; keys and
values are written in place into the slots; attention reads each slot up to a
bucket of its own length. So what a row computes depends on its own sequence
alone: not on how many rows are computed with it (linear layers are prepacked,
attention gets enough query rows), nor on the neighbours in the batch.

Within the decoder the query heads that share a key-value head lie `kv_heads`
apart, not side by side: then rows and heads of a sequence fold into the query
rows of one attention, and unfold again, without being reordered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedModelError
from ..types import Resume
from .base import Adapter, ForwardOutput, rounding_doubt, upload
from .cache import BLOCK, BUCKET, KVCache, SlotCache, extent, round_up
from .checkpoint import Weights
from .config import LeanConfig
from .linear import Linear, multiplies_bf16
from .masks import CausalTable, additive, visible, within
from .norm import RMSNorm
from .quantize import Quantization, Quantized
from .rope import inverse_frequencies, rotate, rotation_table
from .silu import silu

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_PACKERS = 4
"""Threads that pack weights; each holds a few copies of one in fp32."""

_QUERY_BLOCK = 32
"""Attention works through query rows in blocks of this many, or of a multiple."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's parameters."""

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None  # of queries and keys at once
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of neighbouring sequences in neighbouring slots whose attention has one shape."""

    sequences: slice
    rows: slice
    read: list[tuple[Tensor, Tensor]]  # per layer keys and values [b, kv_heads, length, D]
    masks: dict[int | None, Tensor]  # per window, additive, [b, 1, rows * G + padding, length]


class LeanDecoder:
    """A Llama-family decoder over a slot cache. See `LanguageModel`."""

    def __init__(
        self,
        config: LeanConfig,
        load: Callable[[str], Tensor],
        progress: Callable[[], None] = lambda: None,
        quantization: Quantization | None = None,
    ) -> None:
        """Args:
        load: returns a parameter by its checkpoint name, in dtype and on device.
        progress: called after every layer.
        quantization: rounds the matrices, which are multiplied with as ever; their memory
            and time stay what they are.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self._embedding = load(EMBEDDING)
        self._norm = RMSNorm(load("model.norm.weight"), config.norm_eps)
        self._layers = []

        def make_layer(i: int) -> Layer:
            return _layer(config, load, f"model.layers.{i}.", quantization)

        def make_head() -> Linear:
            head = self._embedding if config.tied else load(HEAD)
            return Linear(_rounded(head, quantization and quantization.of_head))

        # On a CPU packing takes longer than reading. On a GPU device and stream are the thread's.
        aside = self.device.type == "cpu"
        with ThreadPoolExecutor(min(_PACKERS, torch.get_num_threads())) as pool:
            head = pool.submit(make_head) if aside else None
            for layer in (pool.map if aside else map)(make_layer, range(config.layers)):
                self._layers.append(layer)
                progress()
            self._head = head.result() if head is not None else make_head()
        linears = [self._head, *(n for layer in self._layers for n in layer.linears)]
        self._agreeing_rows = min(linear.agreeing_rows for linear in linears)
        self._weight_bytes = sum(linear.weight_bytes for linear in linears)
        if aside or quantization is not None or not config.tied:
            self._weight_bytes += self._embedding.nbytes
        self._rope = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        self._angles = self._table(min(config.context_length, 4096))
        self._fold = config.heads // config.kv_heads
        self._causal = CausalTable(self._fold, self.dtype, self.device)
        self._runs: tuple[int, ...] = tuple(range(config.layers))
        self._adapter: tuple[RMSNorm, Linear] | None = None

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def layers(self) -> int:
        return self.config.layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def resumes(self) -> bool:
        return True

    @property
    def weight_bytes(self) -> int:
        """Memory that the matrices take."""
        return self._weight_bytes

    def part(self, layers: Sequence[int], adapter: Adapter | None = None) -> LeanDecoder:
        part = copy.copy(self)
        part._runs = tuple(layers)
        if adapter is not None:
            norm, weight = (x.to(self.device, self.dtype) for x in (adapter.norm, adapter.weight))
            part._adapter = RMSNorm(norm, self.config.norm_eps), Linear(weight)
        return part

    def _table(self, positions: int) -> Tensor:
        return rotation_table(*self._rope, positions, self.dtype, self.device)

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        exact = self.dtype == torch.float32 or multiplies_bf16(self.device)  # attention, too
        if exact and batch * rows <= self._agreeing_rows and rows <= BLOCK and not branched:
            return 0.0
        return rounding_doubt(self.dtype)

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        c = self.config
        shape = (c.layers, c.kv_heads, c.head_dim)
        return KVCache(slots, max_len, *shape, self.dtype, self.device)

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
        computed: int = 0,
        resume: Resume | None = None,
    ) -> ForwardOutput:
        assert isinstance(cache, KVCache)
        assert not computed or resume is None
        cache.reserve(slots, tokens.shape[1])
        tokens = upload(tokens[:, computed:], self.device)
        positions = upload(positions, self.device)
        write = upload(cache.row_indices(slots, tokens.shape[1], computed), self.device)
        groups = self._groups(cache, slots, positions, mask, computed)
        return self.run(
            tokens,
            positions[:, computed:],
            self.angles(cache),
            cache,
            write,
            groups,
            taps=taps,
            logits=logits,
            resume=resume,
        )

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        angles: Tensor,
        cache: KVCache,
        write: Tensor,
        groups: Sequence[Group],
        *,
        taps: Sequence[int] = (),
        logits: bool = True,
        resume: Resume | None = None,
    ) -> ForwardOutput:
        """A pass of which the device has everything: nothing is decided on the host.

        Args:
            angles: from `angles`.
            write: `[B * T]` where the rows' keys and values go, as in `row_indices`.
            groups: what the rows attend to; together they are all rows.
        """
        c = self.config
        batch, rows = tokens.shape
        cos, sin = angles.index_select(0, positions.flatten()).unbind(1)  # [B * T, 1, D]
        first = 0 if resume is None else resume.layer
        if resume is None:
            h = F.embedding(tokens.flatten(), self._embedding)  # [B * T, H]
        else:
            h = resume.states.flatten(0, 1).to(self.dtype)
        states: dict[int, Tensor] = {}
        last = self._runs[-1]
        for i in self._runs[first:]:
            layer = self._layers[i]
            qkv = self._project(layer, layer.input_norm(h), (cos, sin) if c.rotary[i] else None)
            cache.write(i, write, qkv.narrow(1, c.heads, 2 * c.kv_heads))
            if i == last and not logits and last not in taps:
                break  # its keys and values were all that was wanted
            q = qkv.narrow(1, 0, c.heads).reshape(batch, rows * self._fold, c.kv_heads, c.head_dim)
            h = h + layer.out(self._attend(q, groups, i).reshape(batch * rows, -1))
            gate, up = layer.gate_up(layer.mlp_norm(h)).chunk(2, -1)
            h = h + layer.down(silu(gate).mul_(up))
            if i in taps:
                states[i] = h.view(batch, rows, -1)
        if logits and self._adapter is not None:
            norm, adapt = self._adapter
            h = h + adapt(norm(h))
        scores = self._head(self._norm(h)).view(batch, rows, -1) if logits else None
        return ForwardOutput(scores, tuple(states[i] for i in taps))

    def angles(self, cache: KVCache) -> Tensor:
        """Cosine and sine `[positions, 2, 1, D]` of all the cache may hold; the table grows."""
        if len(self._angles) < min(cache.capacity, self.context_length):
            self._angles = self._table(min(2 * cache.capacity, self.context_length))
        return self._angles

    def _project(self, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries, keys (normed and rotated) and values `[B * T, heads + 2 * kv_heads, D]`."""
        c = self.config
        qkv = layer.qkv(x).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        held = qkv.narrow(1, 0, c.heads + c.kv_heads)
        qk = held if layer.qk_norm is None else layer.qk_norm(held)
        if angles is not None:
            rotate(qk, *angles, out=held)
        elif qk is not held:
            held.copy_(qk)
        if self.dtype == torch.float16:  # what overflows must not reach the rows it is masked from
            kv = qkv.narrow(1, c.heads, 2 * c.kv_heads)
            kv.copy_(kv.nan_to_num())
        return qkv

    def _attend(self, q: Tensor, groups: Sequence[Group], layer: int) -> Tensor:
        """Attention `[B, T * G, kv_heads, D]` of folded queries of that shape.

        A key-value head's query heads are rows beside each other, so keys and
        values are read as they lie, without repeating them.
        """
        window = self.config.windows[layer]
        if len(groups) == 1:
            return self._attend_group(q, groups[0], layer, window)
        out = torch.empty_like(q)
        for g in groups:
            part = g.sequences, slice(g.rows.start * self._fold, g.rows.stop * self._fold)
            out[part] = self._attend_group(q[part], g, layer, window)
        return out

    def _attend_group(self, q: Tensor, group: Group, layer: int, window: int | None) -> Tensor:
        folded = q.shape[1]
        short = query_padding(folded, self.config.head_dim)
        if short:
            q = F.pad(q, (0, 0, 0, 0, 0, short))
        keys, values = group.read[layer]
        mask = group.masks[window]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return out.transpose(1, 2).narrow(1, 0, folded)

    def _groups(
        self,
        cache: KVCache,
        slots: Sequence[int],
        positions: Tensor,
        mask: Tensor | None,
        computed: int,
    ) -> list[Group]:
        """Split the batch into runs of neighbouring slots whose rows read equally far, so that no
        key or value is copied and a row reads as much alone as among others.

        The rows are those behind the computed ones, which to a causal block are as good as
        committed.
        """
        starts = [cache.lengths[s] for s in slots]
        if mask is None:
            positions, starts = positions[:, computed:], [n + computed for n in starts]
            spans = [_spans(n, positions.shape[1]) for n in starts]
        else:
            mask = mask[:, computed:]
            everything = slice(0, mask.shape[1])
            spans = [[(everything, extent(n, positions.shape[1]))] for n in starts]
        groups, start = [], 0
        for end in range(1, len(slots) + 1):
            together = end < len(slots) and (
                slots[end] == slots[end - 1] + 1 and spans[end] == spans[start]
            )
            if not together:
                picked = slice(start, end)
                for some, length in spans[start]:
                    lengths = [n + some.start for n in starts[picked]]
                    block = None if mask is None else upload(mask[picked], self.device)
                    own = positions[picked, some] if mask is None else positions[picked]
                    masks = self._masks(lengths, length, own, block)
                    read = cache.read(slots[start], slots[end - 1] + 1, length)
                    groups.append(Group(picked, some, read, masks))
                start = end
        return groups

    def _masks(
        self, lengths: Sequence[int], length: int, positions: Tensor, block: Tensor | None
    ) -> dict[int | None, Tensor]:
        """Per window, additive masks `[b, 1, T * G + padding, length]`; padding sees something.

        Args:
            positions: `[b, N]` of the whole block, of which a `block` `[b, T, N]` has the last
                rows, and None all.
        """
        rows = positions.shape[1]
        plain = block is None and set(self.config.windows) == {None}
        if plain and self._causal.serves(rows, length):
            short = query_padding(rows * self._fold, self.config.head_dim)
            return {None: self._causal(lengths, rows, length, short)}
        starts = upload(torch.tensor(lengths), self.device)
        return self.masks(starts, positions, length, block)

    def masks(
        self, starts: Tensor, positions: Tensor, length: int, block: Tensor | None
    ) -> dict[int | None, Tensor]:
        """The same from committed lengths `[B]` that the device has."""
        rows = positions.shape[1] if block is None else block.shape[1]
        short = query_padding(rows * self._fold, self.config.head_dim)
        seen = visible(starts, rows, length, block)
        masks = {}
        for w in set(self.config.windows):
            near = seen if w is None else seen & within(w, starts, positions, length, rows)
            near = near | ~near.any(-1, keepdim=True)  # padding sees something
            mask = additive(near, self.dtype).repeat_interleave(self._fold, 2)
            masks[w] = F.pad(mask, (0, 0, 0, short))
        return masks


def _spans(length: int, rows: int) -> list[tuple[slice, int]]:
    """Rows of a causal block behind `length`, and how far they read.

    A row of a short block reads to the end of the bucket it lies in, wherever the block
    begins: rows on both sides of a boundary attend apart. The rows of a prefill, as the nodes of
    a tree, read to the end of the block.
    """
    if rows > BLOCK:
        return [(slice(0, rows), extent(length, rows))]
    end = round_up(length + 1, BUCKET)
    first = min(rows, end - length)
    spans = [(slice(0, first), end)]
    return spans if first == rows else [*spans, (slice(first, rows), end + BUCKET)]


def query_padding(rows: int, head_dim: int) -> int:
    """Query rows to add so that what a row becomes does not depend on their number.

    A block, or what is left over of one, takes kernels that round differently
    when it has fewer than about head_dim / 24 rows.
    """
    left = rows % _QUERY_BLOCK
    return max(0, max(4, head_dim // 16) - left) if left else 0


def _layer(
    c: LeanConfig, load: Callable[[str], Tensor], prefix: str, quantization: Quantization | None
) -> Layer:
    def parameter(name: str, kind: str) -> Tensor:
        tensor = load(f"{prefix}{name}.{kind}")
        if kind == "weight":
            tensor = _rounded(tensor, quantization)
        if name == "self_attn.q_proj":
            return _apart(tensor, c, 0)
        return _apart(tensor, c, 1) if name == "self_attn.o_proj" and kind == "weight" else tensor

    def fused(names: Sequence[str], bias: bool) -> Linear:
        weight = torch.cat([parameter(n, "weight") for n in names])
        return Linear(weight, torch.cat([parameter(n, "bias") for n in names]) if bias else None)

    qk_norm = None
    if c.qk_norm:
        q, k = (load(f"{prefix}self_attn.{n}_norm.weight") for n in "qk")
        weight = torch.cat([q.expand(c.heads, -1), k.expand(c.kv_heads, -1)])
        qk_norm = RMSNorm(weight, c.norm_eps)
    return Layer(
        input_norm=RMSNorm(load(prefix + "input_layernorm.weight"), c.norm_eps),
        qkv=fused([f"self_attn.{n}_proj" for n in "qkv"], c.qkv_bias),
        qk_norm=qk_norm,
        out=fused(["self_attn.o_proj"], c.output_bias),
        mlp_norm=RMSNorm(load(prefix + "post_attention_layernorm.weight"), c.norm_eps),
        gate_up=fused(["mlp.gate_proj", "mlp.up_proj"], c.mlp_bias),
        down=fused(["mlp.down_proj"], c.mlp_bias),
    )


def _rounded(weight: Tensor, quantization: Quantization | None) -> Tensor:
    if quantization is None:
        return weight
    return Quantized.of(weight, quantization).weight().to(weight.dtype)


def _apart(tensor: Tensor, c: LeanConfig, dim: int) -> Tensor:
    """Reorder a dimension of query heads: those of one key-value head, `kv_heads` apart."""
    shape = tensor.shape
    heads = (c.kv_heads, c.heads // c.kv_heads, c.head_dim)
    apart = tensor.view(*shape[:dim], *heads, *shape[dim + 1 :]).transpose(dim, dim + 1)
    return apart.reshape(shape)


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
