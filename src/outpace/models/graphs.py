"""The lean decoder on CUDA: short passes recorded once as CUDA graphs, and replayed.

A decoding step launches some ten kernels per layer, and launching them takes a
GPU's host longer than running them. A graph is launched as one. It has fixed
shapes and addresses, and so has every pass here: a block is padded to
`ROWS` rows, the batch to a power of two of slots, and what attention reads to
a bucket. Padding writes behind what is committed, where the next pass writes,
and in slots that are not in the pass behind what was written last.

Fixed shapes are what keeps a sequence's bits, too: plain and speculative
decoding of one sequence replay the same graph, in which a row is computed
alike wherever it stands. (A row reads as far as its own position says: where a
block crosses the end of a bucket, two passes share it.) In a batch, shapes
follow the longest sequence and the highest slot, so there a row's last bits
may depend on its neighbours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import first_line
from ..types import Resume
from .base import Adapter, ForwardOutput, Top, upload
from .cache import KVCache, SlotCache, round_up
from .lean import Group, LeanDecoder

ROWS = 16
"""Rows of a recorded block. Longer blocks are not recorded, nor is prefill."""

_FIRST_BUCKET = 256


@dataclass(slots=True)
class Recordings:
    """How many passes this process has recorded. That takes far longer than they do, and
    happens once: who times what runs has to know."""

    count: int = 0


RECORDINGS = Recordings()

Run = Callable[[], None]
Record = Callable[[Run], Callable[[], object]]
"""A function that reads tensors and writes others, to one that does the same again. The tensors
must live as long as it is called."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory for intermediate values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Callable[[], object]:
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            self._aside.wait_stream(main)
            with torch.cuda.stream(self._aside):  # once before: kernels allocate at first use
                run()
            main.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                run()
        return graph.replay


def reach(end: int) -> int:
    """How far rows read whose last is at position `end - 1`: a bucket of at most a quarter more."""
    if end <= _FIRST_BUCKET:
        return _FIRST_BUCKET
    return round_up(end, 1 << ((end - 1).bit_length() - 3))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a recorded pass over B slots reads."""

    tokens: Tensor  # [B, ROWS]
    numbers: Tensor  # [B, ROWS + 1] positions, then the committed length
    block: Tensor  # [B, ROWS, ROWS]
    first: Tensor  # [B, ROWS] where rows would go if nothing were committed


@dataclass(slots=True)
class _Recorded:
    """The passes recorded over one cache, as long as its storage is this one."""

    storage: list[Tensor]
    angles: Tensor
    inputs: dict[int, _Inputs] = field(default_factory=dict)  # by batch
    branched: set[int] = field(default_factory=set)  # batches whose `block` is not causal now
    outputs: dict[tuple[object, ...], ForwardOutput] = field(default_factory=dict)
    replays: dict[tuple[object, ...], Callable[[], object]] = field(default_factory=dict)


class GraphedDecoder:
    """A lean decoder whose short passes are recorded. See `LanguageModel`.

    Args:
        record: how a pass is recorded; by default as a CUDA graph.
    """

    def __init__(self, decoder: LeanDecoder, record: Record | None = None) -> None:
        self.decoder = decoder
        self.vocab_size = decoder.vocab_size
        self.context_length = decoder.context_length
        self._record: Record | None = record or CudaRecorder(decoder.device)
        self._recorded: WeakKeyDictionary[KVCache, _Recorded] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def layers(self) -> int:
        return self.decoder.layers

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def resumes(self) -> bool:
        return self._record is None

    @property
    def weight_bytes(self) -> int:
        """Memory that the matrices take."""
        return self.decoder.weight_bytes

    def part(self, layers: Sequence[int], adapter: Adapter | None = None) -> GraphedDecoder:
        return GraphedDecoder(self.decoder.part(layers, adapter), self._record)

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        if batch == 1 and rows <= ROWS and not branched and self._record is not None:
            return 0.0
        return self.decoder.doubt(batch, rows, branched)

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        return self.decoder.new_cache(slots, max_len)

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
        out = None
        rows = tokens.shape[1]
        # A recorded pass is whole: only then is it, to the last bit, what plain decoding replays.
        # What has been computed of a block is computed again.
        if logits and rows <= ROWS and self._record is not None:
            starts = [cache.lengths[s] for s in slots]
            self._reserve(cache, slots, max(starts) + rows, rows)
            how = cache, slots, mask, tuple(taps)
            first = rows
            if mask is None and len(slots) == 1:  # what lies in another bucket reads farther
                first = min(rows, reach(starts[0] + 1) - starts[0])
            out = self._replay(tokens[:, :first], positions[:, :first], starts, *how)
            if out is not None and first < rows:
                behind = [n + first for n in starts]
                rest = self._replay(tokens[:, first:], positions[:, first:], behind, *how)
                out = rest and _each(lambda *x: torch.cat(x, 1), out, rest)
        if out is not None:
            return _each(lambda x: x[:, computed:], out) if computed else out
        return self.decoder.forward(
            tokens, positions, cache, slots, mask, taps, logits, computed, resume
        )

    @staticmethod
    def _reserve(cache: KVCache, slots: Sequence[int], end: int, rows: int) -> None:
        """Room for all that a block's passes write and read, padding included."""
        batch = _batch(cache, slots)
        cache.make_room(batch, max(reach(end), max(end, *cache.ends[:batch]) + ROWS))
        cache.reserve(slots, rows)

    def _replay(
        self,
        tokens: Tensor,
        positions: Tensor,
        starts: Sequence[int],
        cache: KVCache,
        slots: Sequence[int],
        mask: Tensor | None,
        taps: tuple[int, ...],
    ) -> ForwardOutput | None:
        """A short block behind `starts`, which may lie behind what is committed; None where
        nothing can be recorded."""
        rows, batch = tokens.shape[1], _batch(cache, slots)
        length = reach(max(starts) + rows)
        recorded = self._recorded.get(cache)
        if recorded is None or recorded.storage is not cache.storage:
            recorded = _Recorded(cache.storage, self.decoder.angles(cache))
            self._recorded[cache] = recorded
        if batch not in recorded.inputs:
            recorded.inputs[batch] = self._inputs(batch, cache.capacity)
        inputs = recorded.inputs[batch]
        self._feed(inputs, tokens, positions, starts, cache, slots)
        if mask is not None or batch in recorded.branched:
            block = _causal(batch)
            if mask is not None:
                block[list(slots), :rows, :rows] = mask.cpu()
            inputs.block.copy_(upload(block, self.device))
            (recorded.branched.discard if mask is None else recorded.branched.add)(batch)
        wanted = batch, taps
        key = *wanted, length
        if key not in recorded.replays:
            run = self._pass(recorded, cache, *key)
            if wanted not in recorded.outputs:
                recorded.outputs[wanted] = run()
            outputs = recorded.outputs[wanted]
            if not self._try_to_record(recorded, key, lambda: _copy(run(), outputs)):
                return None
        recorded.replays[key]()
        return _each(lambda x: torch.stack([x[s, :rows] for s in slots]), recorded.outputs[wanted])

    def _try_to_record(self, recorded: _Recorded, key: tuple[object, ...], run: Run) -> bool:
        assert self._record is not None
        RECORDINGS.count += 1
        try:
            recorded.replays[key] = self._record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._record = None
            warnings.warn(
                f"running without CUDA graphs, which takes longer: {first_line(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
        return key in recorded.replays

    def _inputs(self, batch: int, capacity: int) -> _Inputs:
        first = torch.arange(batch).unsqueeze(1) * capacity + torch.arange(ROWS)
        return _Inputs(
            torch.zeros(batch, ROWS, dtype=torch.int64, device=self.device),
            torch.zeros(batch, ROWS + 1, dtype=torch.int64, device=self.device),
            upload(_causal(batch), self.device),
            upload(first, self.device),
        )

    def _feed(
        self,
        inputs: _Inputs,
        tokens: Tensor,
        positions: Tensor,
        starts: Sequence[int],
        cache: KVCache,
        slots: Sequence[int],
    ) -> None:
        """A block's own rows, then padding; slots that are not in the pass get padding alone."""
        batch, rows = len(inputs.tokens), tokens.shape[1]
        begin = cache.ends[:batch]
        for slot, start in zip(slots, starts, strict=True):
            begin[slot] = start
        numbers = torch.empty(batch, ROWS + 1, dtype=torch.int64)
        numbers[:, ROWS] = torch.tensor(begin)
        end = self.context_length - 1
        numbers[:, :ROWS] = (numbers[:, ROWS:] + torch.arange(ROWS)).clamp_max(end)
        numbers[list(slots), :rows] = positions.cpu()
        inputs.numbers.copy_(upload(numbers, self.device))
        tokens = upload(tokens, self.device)
        if list(slots) == list(range(slots[0], slots[0] + len(slots))):
            inputs.tokens[slots[0] : slots[0] + len(slots), :rows].copy_(tokens)
            return
        for row, slot in zip(tokens, slots, strict=True):
            inputs.tokens[slot, :rows].copy_(row)

    def _pass(
        self, recorded: _Recorded, cache: KVCache, batch: int, taps: tuple[int, ...], length: int
    ) -> Callable[[], ForwardOutput]:
        """What is recorded. All tensors from outside it are kept by `recorded`."""
        decoder, inputs, angles = self.decoder, recorded.inputs[batch], recorded.angles
        read, everything = cache.read(0, batch, length), slice(None)

        def run() -> ForwardOutput:
            positions, starts = inputs.numbers[:, :ROWS], inputs.numbers[:, ROWS]
            masks = decoder.masks(starts, positions, length, inputs.block)
            out = decoder.run(
                inputs.tokens,
                positions,
                angles,
                cache,
                (inputs.first + starts.unsqueeze(1)).flatten(),
                [Group(everything, everything, read, masks)],
                taps=taps,
            )
            assert out.logits is not None
            return replace(out, top=Top.of(out.logits))

        return run


def _batch(cache: KVCache, slots: Sequence[int]) -> int:
    """Slots of a pass, from the first on: a power of two, or all there are."""
    return min(1 << max(slots).bit_length(), cache.slots)


def _causal(batch: int) -> Tensor:
    return torch.ones(ROWS, ROWS, dtype=torch.bool).tril().repeat(batch, 1, 1)


def _tensors(out: ForwardOutput) -> list[Tensor]:
    top = () if out.top is None else (out.top.tokens, out.top.logprobs)
    return [*top, *out.taps, *(() if out.logits is None else (out.logits,))]


def _copy(source: ForwardOutput, target: ForwardOutput) -> None:
    for new, held in zip(_tensors(source), _tensors(target), strict=True):
        held.copy_(new)


def _each(f: Callable[..., Tensor], *outs: ForwardOutput) -> ForwardOutput:
    """A function of each tensor of outputs that have the same."""
    made = [f(*tensors) for tensors in zip(*map(_tensors, outs), strict=True)]
    logits = None if outs[0].logits is None else made.pop()
    top = None if outs[0].top is None else Top(made.pop(0), made.pop(0))
    return ForwardOutput(logits, tuple(made), top)
