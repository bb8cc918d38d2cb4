"""The compiled decoder: a whole forward pass of the Llama family in one call of C++.

A decoding step is short: what it costs beyond reading the weights is the time
between kernels. `kernels/cpp/` has the pass as one function, without any. Weights
are kept in the narrowest format that holds them exactly, or quantised, and
arithmetic is fp32: the dtype decides about weights and cache. A bf16 model's
layers also take their inputs in bf16 where the processor multiplies pairs of it.

What a row computes depends on its own sequence alone, by construction: no
partial sum is divided among threads, and all are added in an order that follows
from the row's own position. So a row gets the same bits in any block, batch or tree.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Arena, Filters, load_library
from ..sampling import DraftNoise
from ..types import Resume
from .base import Adapter, ForwardOutput, Rollout, Top
from .cache import HeadCache, SlotCache, round_up
from .config import LeanConfig
from .lean import EMBEDDING, HEAD
from .quantize import Quantization, Quantized
from .rope import inverse_frequencies, rotation_table

BLOCK = 64
"""Outputs of a linear layer that are computed together."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8, _INT4, _BF16_PAIRS = 3, 4, 5

_STRETCH = 128
"""Inputs of an int8 layer that are rounded together."""

_Number, _Address = ctypes.c_int64, ctypes.c_void_p


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Matrix(ctypes.Structure):
    _fields_ = (
        *_fields(_Address, "data scale bias"),
        *_fields(_Number, "inputs outputs stretch"),
        ("kind", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *_fields(_Matrix, "qkv out gate_up down"),
        *_fields(_Address, "input_norm mlp_norm q_norm k_norm"),
        *_fields(_Number, "window rotary"),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *_fields(_Number, "hidden heads kv_heads head_dim mlp layers"),
        *_fields(_Address, "layer norm"),
        *_fields(_Matrix, "head adapter"),
        *_fields(_Address, "adapter_norm embedding"),
        *_fields(ctypes.c_int32, "embedding_kind cache_kind"),
        ("norm_eps", ctypes.c_float),
    )


_SCRATCH = "h qkv q attended act normed rounded scales sums sums_seen parts"


class _Pass(ctypes.Structure):
    _fields_ = (
        *_fields(_Number, "batch rows computed"),
        *_fields(_Address, "tokens positions lengths slots keys values"),
        ("capacity", _Number),
        *_fields(_Address, "paths depths angles states"),
        *_fields(_Number, "first"),
        *_fields(_Address, "taps logits top top_logprob"),
        *_fields(_Address, _SCRATCH),
        *_fields(_Number, "widest last"),
    )


class _Rollout(ctypes.Structure):
    _fields_ = (
        *_fields(_Address, "first"),
        *_fields(_Number, "steps"),
        *_fields(_Address, "ends budgets"),
        *_fields(_Number, "end"),
        *_fields(
            _Address,
            "temperatures k top_p min_p noise seeds starts drawn p states tokens positions lengths",
        ),
    )


class CompiledDecoder:
    """A Llama-family decoder over a slot cache, on a CPU. See `LanguageModel`."""

    def __init__(
        self,
        config: LeanConfig,
        load: Callable[[str], Tensor],
        progress: Callable[[], None] = lambda: None,
        quantization: Quantization | None = None,
        library: ctypes.CDLL | None = None,
        share: CompiledDecoder | None = None,
    ) -> None:
        """Args:
            load: returns a parameter by its checkpoint name, in dtype, on the CPU.
            progress: called after every layer.
            library: the kernels, by default those of `load_library`.
            share: a decoder of the same checkpoint and dtype whose embedding and norms this
                one takes.

        Raises:
            CompilerError: there are no kernels.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.device = torch.device("cpu")
        self.library = library or load_library()
        self._width = int(self.library.outpace_width())
        self._group = int(self.library.outpace_group())
        self._chunk = int(self.library.outpace_chunk())
        self._alone = int(self.library.outpace_alone())
        self._least_stretch = int(self.library.outpace_least_stretch())
        self._arena = Arena()
        self._kept: list[Tensor] = []  # what the structures point to
        self._load = load
        embedding = load(EMBEDDING)
        self.dtype: torch.dtype = embedding.dtype
        paired = self.dtype == torch.bfloat16 and self.library.outpace_pairs_of_bf16()
        self._multiplies_bf16 = bool(paired)
        self._converts = quantization is not None or self._multiplies_bf16  # inputs of layers
        self._embedding: Tensor = (
            share._embedding if share else self._arena.keep(narrowest(embedding))
        )
        layers = []
        for i in range(config.layers):
            theirs = None if share is None else share._layers[i]
            layers.append(self._layer(load, i, quantization, theirs))
            progress()
        self._layers: Any = (_Layer * config.layers)(*layers)
        self._shared = share  # kept as long as what is its is pointed to
        head = narrowest(embedding) if config.tied else load(HEAD)
        self._model: _Model = _Model(
            config.hidden_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.mlp_size,
            config.layers,
            ctypes.addressof(self._layers),
            self._vector(load("model.norm.weight")) if share is None else share._model.norm,
            self._matrix(head, None, quantization and quantization.of_head),
            _Matrix(),
            None,
            self._embedding.data_ptr(),
            _KINDS[self._embedding.dtype],
            _KINDS[self.dtype],
            config.norm_eps,
        )
        self._rope = inverse_frequencies(config.rope, config.head_dim, config.context_length)
        self._angles = self._table(min(config.context_length, 4096))
        self._runs = tuple(range(config.layers))
        self._prepare_passes()

    def _prepare_passes(self) -> None:
        """What a decoder, or a part of one, has for itself."""
        self._scratch = _floats(0)
        self._spare = _floats(0), Top(_floats(0), _floats(0))  # of a rollout
        self._pass = _Pass()
        self._model_at, self._pass_at = ctypes.byref(self._model), ctypes.byref(self._pass)
        self._each_layer = _Address * len(self._runs)
        self._room: tuple[int, ...] | None = None  # what there is room for

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
        """Memory that the parameters take."""
        return sum(t.numel() * t.element_size() for t in (*self._kept, self._embedding))

    # --- parameters -------------------------------------------------------------

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(self._arena.keep(tensor))
        return self._kept[-1].data_ptr()

    def _vector(self, tensor: Tensor) -> int:
        return self._keep(tensor.float())

    def _matrix(
        self, weight: Tensor, bias: Tensor | None, quantization: Quantization | None
    ) -> _Matrix:
        out, size = weight.shape
        where = None if bias is None else self._vector(bias)
        if quantization is None and self._multiplies_bf16:
            pairs = self._keep(step_blocks(weight))
            return _Matrix(pairs, None, where, size, out, 0, _BF16_PAIRS)
        if quantization is None:
            weight = narrowest(weight)
            pack = paired_blocks if weight.dtype == torch.bfloat16 else blocks
            kind = _KINDS[weight.dtype]
            return _Matrix(self._keep(pack(weight)), None, where, size, out, 0, kind)
        made = Quantized.of(weight, quantization)
        if quantization.bits == 8:
            values, scales = step_blocks(made.values), self._vector(made.scales[:, 0])
            return _Matrix(self._keep(values), scales, where, size, out, _STRETCH, _INT8)
        low, high = step_blocks(made.values + 8).unbind(-1)
        nibbles, scales = self._keep(low | (high << 4)), self._keep(blocks(made.scales))
        return _Matrix(nibbles, scales, where, size, out, made.group, _INT4)

    def _layer(
        self,
        load: Callable[[str], Tensor],
        i: int,
        quantization: Quantization | None,
        share: _Layer | None,
    ) -> _Layer:
        """Args:
        share: the same layer, whose norms it takes.
        """
        c, prefix = self.config, f"model.layers.{i}."

        def matrix(join: Callable[..., Tensor], biased: bool, *names: str) -> _Matrix:
            weight = join([load(f"{prefix}{n}.weight") for n in names])
            bias = join([load(f"{prefix}{n}.bias") for n in names]) if biased else None
            return self._matrix(weight, bias, quantization)

        def norm(name: str, field: str) -> Any:
            if share is not None:
                return getattr(share, field)
            return self._vector(load(f"{prefix}{name}.weight"))

        return _Layer(
            matrix(torch.cat, c.qkv_bias, *(f"self_attn.{n}_proj" for n in "qkv")),
            matrix(torch.cat, c.output_bias, "self_attn.o_proj"),
            matrix(by_turns, c.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
            matrix(torch.cat, c.mlp_bias, "mlp.down_proj"),
            norm("input_layernorm", "input_norm"),
            norm("post_attention_layernorm", "mlp_norm"),
            *(norm(f"self_attn.{n}_norm", f"{n}_norm") if c.qk_norm else None for n in "qk"),
            c.windows[i] or 0,
            c.rotary[i],
        )

    def _table(self, positions: int) -> Tensor:
        return rotation_table(*self._rope, positions, torch.float32, self.device)

    # --- parts ------------------------------------------------------------------

    def part(self, layers: Sequence[int], adapter: Adapter | None = None) -> CompiledDecoder:
        part = copy.copy(self)
        part._runs = tuple(layers)
        part._layers = (_Layer * len(layers))(*(self._layers[i] for i in layers))
        part._model = _Model.from_buffer_copy(self._model)
        part._model.layers = len(layers)
        part._model.layer = ctypes.addressof(part._layers)
        part._kept = list(self._kept)
        if adapter is not None:
            part._model.adapter = part._matrix(adapter.weight.to(self.dtype), None, None)
            part._model.adapter_norm = part._vector(adapter.norm)
        part._prepare_passes()
        return part

    def quantized(
        self, quantization: Quantization, progress: Callable[[], None] = lambda: None
    ) -> CompiledDecoder:
        """The same model with matrices of so few bits, which shares the embedding."""
        return CompiledDecoder(
            self.config, self._load, progress, quantization, self.library, share=self
        )

    # --- passes -----------------------------------------------------------------

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        return 0.0

    def new_cache(self, slots: int, max_len: int) -> HeadCache:
        c = self.config
        head_dim = round_up(c.head_dim, self._width)
        shape = c.layers, c.kv_heads, head_dim
        return HeadCache(slots, max_len, *shape, self.dtype, self.library)

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
        assert not computed or resume is None
        room = tokens.shape[1]
        tokens, positions = tokens[:, computed:], positions[:, computed:]
        batch, rows = tokens.shape
        out = _floats(batch, rows, self.vocab_size) if logits else None
        p, held = self._prepare(tokens, positions, cache, slots, room)
        p.computed = computed
        if mask is not None:
            held += _paths(mask[:, computed:])
            p.paths, p.depths = held[-2].data_ptr(), held[-1].data_ptr()
        if resume is not None:
            held.append(resume.states.float().contiguous())
            p.states, p.first = held[-1].data_ptr(), resume.layer
        states = {i: _floats(batch, rows, self.config.hidden_size) for i in taps}
        if states:
            held.append(self._taps(states))
            p.taps = ctypes.addressof(held[-1])
        top = None if out is None else self._score_into(p, out)
        # Without logits the last layer's keys and values are all that is wanted of it.
        p.last = len(self._runs) - (not logits and self._runs[-1] not in states)
        self.library.outpace_forward(self._model_at, self._pass_at, torch.get_num_threads())
        return ForwardOutput(out, tuple(states[i] for i in taps), top)

    def _taps(self, states: Mapping[int, Tensor]) -> Any:
        """Where the states behind each layer go, as an array for C."""
        return self._each_layer(
            *(states[i].data_ptr() if i in states else None for i in self._runs)
        )

    def rollout(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        slots: Sequence[int],
        ends: Sequence[int],
        budgets: Sequence[int],
        temperatures: Tensor | None = None,
        filters: Filters | None = None,
        noise: DraftNoise | None = None,
        states: bool = False,
    ) -> Rollout:
        batch, rows = tokens.shape
        steps = max(budgets)
        assert min(ends) >= 0
        p, held = self._prepare(tokens, positions, cache, slots, rows + steps)
        if len(self._spare[0]) < batch * rows:
            logits = _floats(batch * rows, 1, self.vocab_size)
            self._spare = logits, self._score_into(p, logits)
        _point(p, *self._spare)
        p.last = len(self._runs)
        o = _Rollout(ctypes.addressof(p), steps, end=self.context_length - 1)
        integers = _integers(batch)
        held += [integers(*ends), integers(*budgets), *(integers() for _ in range(3))]
        o.ends, o.budgets, o.tokens, o.positions, o.lengths = map(ctypes.addressof, held[-5:])
        drawn, law, kept = tokens.new_empty(batch, steps), None, None
        o.drawn = drawn.data_ptr()
        if states:
            hidden = self.config.hidden_size
            tap, kept = _floats(batch * rows, hidden), _floats(batch, steps + 1, hidden)
            held += [tap, self._taps({self._runs[-1]: tap})]
            p.taps, o.states = ctypes.addressof(held[-1]), kept.data_ptr()
        if temperatures is not None:
            assert noise is not None
            law = _floats(batch, steps, self.vocab_size)
            held += [temperatures, law]
            o.temperatures, o.p = temperatures.data_ptr(), law.data_ptr()
            if filters is not None:
                held += filters
                o.k, o.top_p, o.min_p = (f.data_ptr() for f in filters)
            if noise.keys is not None:
                held += [noise.keys.seeds.contiguous(), noise.keys.first.contiguous()]
                o.seeds, o.starts = held[-2].data_ptr(), held[-1].data_ptr()
            else:
                assert noise.uniforms is not None
                held.append(noise.uniforms[:, :steps].contiguous())
                o.noise = held[-1].data_ptr()
        threads = torch.get_num_threads()
        self.library.outpace_rollout(self._model_at, ctypes.byref(o), threads)
        for slot, end, budget in zip(slots, ends, budgets, strict=True):
            cache.commit(slot, range(end + budget))
        return Rollout(drawn, law, kept)

    def _prepare(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, slots: Sequence[int], room: int
    ) -> tuple[_Pass, list[Any]]:
        """The pass over these rows, and what must live as long as the call.

        Args:
            room: positions to make room for behind each slot's length.
        """
        assert isinstance(cache, HeadCache)
        p = self._pass
        batch, rows = tokens.shape
        cache.reserve(slots, room)
        lengths = [cache.lengths[s] for s in slots]
        self._make_room(batch, rows, max(lengths) + room, cache.capacity)
        integers = _integers(batch)
        held = [
            tokens.contiguous(),
            positions.contiguous(),
            integers(*lengths),
            integers(*slots),
            *cache.addresses(self._runs),
        ]
        p.batch, p.rows, p.capacity = batch, rows, cache.capacity
        p.tokens, p.positions = held[0].data_ptr(), held[1].data_ptr()
        p.lengths, p.slots, p.keys, p.values = map(ctypes.addressof, held[2:])
        p.paths = p.depths = p.taps = p.logits = p.states = None
        p.first = p.computed = 0
        return p, held

    def _score_into(self, p: _Pass, logits: Tensor) -> Top:
        shape = logits.shape[:2]
        top = Top(logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape))
        _point(p, logits, top)
        return top

    def _make_room(self, batch: int, rows: int, positions: int, capacity: int) -> None:
        """For angles, and for a pass's intermediate values in one buffer that is kept."""
        threads, reach = torch.get_num_threads(), min(capacity, self.context_length)
        chunks = round_up(positions, 256) // self._chunk + 1
        needed = batch, rows, chunks, reach, threads
        if needed == self._room:
            return
        self._room = None  # until all is there
        if len(self._angles) < reach:
            self._angles = self._table(min(2 * reach, self.context_length))
        c, p = self.config, self._pass
        p.angles = self._angles.data_ptr()
        head = round_up(c.head_dim, self._width)
        q = c.heads * head
        qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
        each = (c.hidden_size, qkv, q, q, max(c.mlp_size, c.hidden_size))
        sizes = [batch * rows * n for n in each]
        taken = max(batch * rows, threads * min(batch * rows, self._alone))
        p.widest = round_up(max(c.hidden_size, q, c.mlp_size), BLOCK) if self._converts else 0
        scales = p.widest // self._least_stretch
        sizes += [taken * n for n in (c.hidden_size, p.widest // 2, scales, scales)]
        sizes.append(threads * 2 * self._group * head)
        pairs = batch * c.kv_heads
        folded = min(rows * (c.heads // c.kv_heads), self._group)  # a rollout's later passes: fewer
        sizes.append(pairs * chunks * folded * (head + 2) if pairs < threads else 0)
        sizes = [round_up(n, BLOCK) for n in sizes]
        if len(self._scratch) < sum(sizes):
            self._scratch = _floats(sum(sizes))
        at = self._scratch.data_ptr()
        for name, size in zip(_SCRATCH.split(), sizes, strict=True):
            setattr(p, name, at)
            at += self._scratch.element_size() * size
        self._room = needed


def _floats(*shape: int) -> Tensor:
    """What the kernels write to, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _point(p: _Pass, logits: Tensor, top: Top) -> None:
    p.logits, p.top = logits.data_ptr(), top.tokens.data_ptr()
    p.top_logprob = top.logprobs.data_ptr()


@cache
def _integers(count: int) -> Any:
    return _Number * count


def _paths(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rows `[B, T, N]` of a block that each of its last T may look at, in order, and how
    many."""
    order = mask.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    return order.to(torch.int32), mask.sum(-1)


def narrowest(weight: Tensor) -> Tensor:
    """The same values in half the memory, where 16 bits hold all of them."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            small = weight.to(dtype)
            if torch.equal(small.float(), weight):
                return small
    return weight


def blocks(weight: Tensor) -> Tensor:
    """`[out, n]` as `[blocks, n, 64]`."""
    return _whole(weight, BLOCK).view(-1, BLOCK, weight.shape[1]).transpose(1, 2)


def paired_blocks(weight: Tensor) -> Tensor:
    """`[out, n]` as `[blocks, n, 32, 2]`: output i of a block beside output 32 + i."""
    halves = _whole(weight, BLOCK).view(-1, 2, BLOCK // 2, weight.shape[1])
    return halves.permute(0, 3, 2, 1)


def step_blocks(values: Tensor) -> Tensor:
    """`[out, n]` as `[blocks, n / 2, 64, 2]`: an output's values of two inputs side by side."""
    if values.shape[1] % 2:
        values = F.pad(values, (0, 1))
    pairs = _whole(values, BLOCK).view(-1, BLOCK, values.shape[1] // 2, 2)
    return pairs.transpose(1, 2)


def by_turns(parts: Sequence[Tensor]) -> Tensor:
    """Rows of two matrices or vectors, 32 of the one and 32 of the other in turn."""
    half = BLOCK // 2
    split = [_whole(p, half).view(-1, half, *p.shape[1:]) for p in parts]
    return torch.stack(split, 1).flatten(0, 2)


def _whole(rows: Tensor, multiple: int) -> Tensor:
    """Padded with zeros to a multiple of rows."""
    short = -len(rows) % multiple
    return torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])]) if short else rows
