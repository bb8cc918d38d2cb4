"""Any other transformers causal LM, over the same slot cache.

The model's own code runs; our cache stands in for its cache. Keys and values
are written into the slots, attention gets an explicit mask and positions, and
rolling back is forgetting. That is exact for a model whose only memory is
attention over positions, and for nothing else, so a model is tried before it
is used: a committed prefix, a branched block, a rollback, compared with the
model's own plain forward pass. What does not agree is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..errors import UnsupportedModelError, first_line
from ..trees import block_mask, block_positions
from ..types import Tree
from .base import ForwardOutput, prefill, rounding_doubt, upload
from .cache import SlotCache, extent
from .config import context_length
from .masks import additive, visible, within

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest logit difference allowed in the trial, relative to the largest logit."""


class _SlotLayers(Cache):  # type: ignore[misc]
    """What a transformers model sees as its cache during one forward pass."""

    def __init__(self, cache: SlotCache, slots: Tensor, write: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._cache, self._slots, self._write, self._length = cache, slots, write, length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, T, D]` in place, give back `[B, heads, length, D]`."""
        out = []
        for offset, states in enumerate((key_states, value_states)):
            held = self._cache.storage[2 * layer_idx + offset]  # [slots, S, heads, D]
            rows = states.transpose(1, 2).flatten(0, 1)
            held.view(-1, *held.shape[2:]).index_copy_(0, self._write, rows.to(held.dtype))
            out.append(held[self._slots, : self._length].transpose(1, 2).to(states.dtype))
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length, 0


class TransformersAdapter:
    """A transformers causal LM as a `LanguageModel`.

    Args:
        model: a loaded model in evaluation mode.

    Raises:
        UnsupportedModelError: its cache cannot roll back; the message says why.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self._config = config
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.context_length = context_length(config)
        refuse_unfit(type(model), model.config)
        self._window = _windows(config)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layout = self._read_layout()
        self._try_out()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def weight_bytes(self) -> int:
        """Memory that the parameters take."""
        return sum(p.nbytes for p in self._model.parameters())

    def doubt(self, batch: int, rows: int, branched: bool) -> float:
        return rounding_doubt(self.dtype)

    def new_cache(self, slots: int, max_len: int) -> SlotCache:
        def make(slots: int, capacity: int) -> list[Tensor]:
            return [
                torch.zeros(slots, capacity, heads, dim, dtype=self.dtype, device=self.device)
                for heads, dim in self._layout
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
        computed: int = 0,
    ) -> ForwardOutput:
        last = int(self._config.num_hidden_layers) - 1
        if last in taps:
            raise UnsupportedModelError(
                f"transformers shows layer {last} behind the final norm only: tap an earlier layer"
            )
        rows = tokens.shape[1]
        cache.reserve(slots, rows)
        lengths = [cache.lengths[s] for s in slots]
        length = extent(max(lengths), rows)
        starts, positions = self._take(torch.tensor(lengths)), self._take(positions)
        if mask is None:  # what has been computed is as good as committed
            masks = self._masks(starts + computed, positions[:, computed:], length, None)
        else:
            masks = self._masks(starts, positions, length, self._take(mask[:, computed:]))
        view = _SlotLayers(
            cache,
            self._take(torch.tensor(list(slots))),
            self._take(cache.row_indices(slots, rows - computed, computed)),
            length,
        )
        out = self._model(
            input_ids=self._take(tokens[:, computed:]),
            position_ids=positions[:, computed:],
            attention_mask=masks,
            past_key_values=view,
            use_cache=True,
            output_hidden_states=bool(taps),
            **({"logits_to_keep": 0 if logits else 1} if self._keeps else {}),
        )
        states = tuple(out.hidden_states[t + 1] for t in taps) if taps else ()
        return ForwardOutput(out.logits if logits else None, states)

    def _take(self, x: Tensor) -> Tensor:
        return upload(x, self.device)

    def _masks(self, starts: Tensor, positions: Tensor, length: int, block: Tensor | None) -> Any:
        rows = positions.shape[1] if block is None else block.shape[1]
        seen = visible(starts, rows, length, block)
        full = additive(seen, self.dtype)
        if self._window is None:
            return full
        size, mixed = self._window
        near = seen & within(size, starts, positions, length, rows)
        windowed = additive(near, self.dtype)
        if not mixed:
            return windowed
        return {"full_attention": full, "sliding_attention": windowed}

    @torch.inference_mode()
    def _read_layout(self) -> list[tuple[int, int]]:
        """(heads, width) of every layer's keys and values, from one plain step."""
        held: list[tuple[int, int]] = []
        probe = torch.tensor([[1, 2]], device=self.device)
        try:
            cache = self._model(input_ids=probe, use_cache=True).past_key_values
        except Exception as error:
            raise UnsupportedModelError(f"it does not run: {first_line(error)}") from error
        for i, layer in enumerate(getattr(cache, "layers", [])):
            if not all(isinstance(getattr(layer, n, None), Tensor) for n in ("keys", "values")):
                raise UnsupportedModelError(
                    f"layer {i} keeps a state ({type(layer).__name__}) that cannot be rolled back"
                )
            held += [(s.shape[1], s.shape[3]) for s in (layer.keys, layer.values)]
        if not held:
            raise UnsupportedModelError("it keeps no cache of keys and values per layer")
        return held

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Compare a prefix, a branched block and a rollback with plain forward passes."""
        size = min(self.vocab_size, 64)
        ids = [(7 * i + 3) % size for i in range(10)]
        prefix, branches, after = ids[:5], ids[5:8], ids[8]
        tree = Tree((-1, 0, -1))  # two branches; the second is the one that is kept
        try:
            cache = self.new_cache(2, 128)
            prefill(self, cache, 1, prefix[:-1])
            block = torch.tensor([[prefix[-1], *branches]])
            positions = block_positions([len(prefix) - 1], [tree], 4)
            tried = [self._last(block, positions, cache, block_mask([tree], 4))[0, [0, 2, 3]]]
            cache.commit(1, (0, 3))
            at = torch.tensor([[len(prefix) + 1]])
            tried.append(self._last(torch.tensor([[after]]), at, cache)[0])
        except Exception as error:
            raise UnsupportedModelError(
                f"it does not run with an explicit mask and positions ({first_line(error)})"
            ) from error
        paths = [prefix, [*prefix, *branches[:2]], [*prefix, branches[2]]]
        paths.append([*paths[2], after])
        plain = torch.stack([self._plain(path) for path in paths])
        worst = (torch.cat(tried).float() - plain).abs().max().item()
        bound = _TOLERANCE[self.dtype] * plain.abs().max().item()
        if not worst <= bound:
            raise UnsupportedModelError(
                f"after a rollback its logits are off by {worst:.2g}: it remembers more than "
                "keys and values, or ignores the mask"
            )

    def _last(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, mask: Tensor | None = None
    ) -> Tensor:
        out = self.forward(tokens, positions, cache, [1], mask).logits
        assert out is not None
        return out

    def _plain(self, path: list[int]) -> Tensor:
        tokens = torch.tensor([path], device=self.device)
        logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits[0, -1]
        return logits.float()


def refuse_unfit(model_class: type, config: Any) -> None:
    """Refuse what class and configuration already show, before weights are loaded.

    A short trial cannot show what only a long text would: attention that is
    neither full nor a sliding window, frequencies that follow the length.

    Raises:
        UnsupportedModelError: a recurrent state, no way to place tokens, or
            attention or positions that our masks would not reproduce.
    """
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError("it keeps a recurrent state that cannot be rolled back")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:  # type: ignore[attr-defined]
        raise UnsupportedModelError("its forward pass takes no position_ids")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(f"its layers are of kinds unknown here ({sorted(kinds)})")
    for name in ("attention_chunk_size", "keep_window_size", "attention_types"):
        if getattr(text, name, None):
            raise UnsupportedModelError(f"its attention is local in a way of its own ({name})")
    if "longrope" in str(getattr(text, "rope_parameters", None)):
        raise UnsupportedModelError("its rope_type 'longrope' follows the length of the text")


def _windows(config: Any) -> tuple[int, bool] | None:
    """The sliding window and whether only some layers have it; None when none has."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if "sliding_attention" not in kinds:
        return None
    return int(window), len(kinds) > 1


__all__ = ["TransformersAdapter", "refuse_unfit"]
