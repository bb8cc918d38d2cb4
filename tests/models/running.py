"""Ways to feed a `LanguageModel`, and the plain forward pass that each must equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from outpace.models import LanguageModel, SlotCache
from outpace.trees import ancestor_mask, block_mask, block_positions, chain
from outpace.types import Tree


def text(length: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.inference_mode()
def plain(hf: Any, ids: Sequence[int]) -> Tensor:
    """Logits `[T, V]` of one forward pass of transformers, without a cache."""
    return hf(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def best(logits: Tensor, said: Sequence[int] = ()) -> int:
    """The likeliest token, leaving out those already said."""
    return int(logits.index_fill(0, torch.tensor(said, dtype=torch.int64), -torch.inf).argmax())


def plain_greedy(hf: Any, prompt: Sequence[int], new: int, repeats: bool = True) -> list[int]:
    """Greedy continuation, every token from a full forward pass."""
    out: list[int] = []
    for _ in range(new):
        out.append(best(plain(hf, [*prompt, *out])[-1], () if repeats else out))
    return out


def feed(
    model: LanguageModel, cache: SlotCache, slot: int, ids: Sequence[int], tree: Tree | None = None
) -> Tensor:
    """Logits `[T, V]` of a block behind the slot; nothing is committed.

    With a tree, `ids` are the root and then the nodes.
    """
    positions = block_positions([cache.lengths[slot]], [tree or chain(len(ids) - 1)], len(ids))
    mask = None if tree is None else ancestor_mask(tree, len(ids))[None]
    logits = model.forward(torch.tensor([list(ids)]), positions, cache, [slot], mask).logits
    assert logits is not None
    return logits[0]


def grown(
    model: LanguageModel,
    cache: SlotCache,
    slots: Sequence[int],
    blocks: list[list[int]],
    shapes: Sequence[Tree],
    ends: Sequence[int],
    mask: Tensor | None = None,
    computed: int = 0,
) -> Tensor:
    """Logits `[B, T, V]` of trees, by passes that end behind these rows; nothing is committed.

    `mask` is another than theirs, and `computed` are rows that have run before.
    """
    tokens = torch.tensor(blocks)
    positions = block_positions([cache.lengths[s] for s in slots], shapes, tokens.shape[1])
    mask = block_mask(shapes, tokens.shape[1]) if mask is None else mask
    parts = []
    for end in ends:
        seen = None if mask is None else mask[:, :end, :end]
        block = tokens[:, :end], positions[:, :end], cache, slots, seen
        out = model.forward(*block, computed=computed).logits
        assert out is not None
        parts.append(out)
        computed = end
    return torch.cat(parts, 1)


def append(model: LanguageModel, cache: SlotCache, slot: int, ids: Sequence[int]) -> Tensor:
    """Logits `[T, V]` of a block that is committed whole."""
    logits = feed(model, cache, slot, ids)
    cache.commit(slot, range(len(ids)))
    return logits


@torch.inference_mode()
def keep(cache: SlotCache, slot: int, path: Sequence[int]) -> None:
    """Commit the root and these nodes of the last pass, as a round does."""
    cache.commit(slot, [0, *(node + 1 for node in path)])


def in_blocks(model: LanguageModel, ids: Sequence[int], *sizes: int) -> Tensor:
    """Logits `[T, V]` of a text fed in blocks of these sizes, over and over."""
    cache, parts, start = model.new_cache(1, 2048), [], 0
    for size in cycle(sizes):
        parts.append(append(model, cache, 0, ids[start : start + size]))
        start += size
        if start >= len(ids):
            break
    return torch.cat(parts)


def greedy(
    model: LanguageModel, prompt: Sequence[int], new: int, repeats: bool = True
) -> list[int]:
    """Greedy continuation, one token at a time through the cache."""
    cache = model.new_cache(1, len(prompt) + new)
    logits, out = append(model, cache, 0, prompt), list[int]()
    for _ in range(new):
        out.append(best(logits[-1], () if repeats else out))
        logits = append(model, cache, 0, out[-1:])
    return out


def together(model: LanguageModel, prefixes: dict[int, list[int]], rows: list[list[int]]) -> Tensor:
    """Logits `[B, T, V]`: one pass over all slots behind prefixes of their own lengths."""
    cache = model.new_cache(max(prefixes) + 1, 512)
    for slot, prefix in prefixes.items():
        append(model, cache, slot, prefix)
    base = torch.tensor([[len(p)] for p in prefixes.values()])
    positions = base + torch.arange(len(rows[0]))
    logits = model.forward(torch.tensor(rows), positions, cache, list(prefixes)).logits
    assert logits is not None
    return logits


def alone(model: LanguageModel, prefixes: dict[int, list[int]], rows: list[list[int]]) -> Tensor:
    """The same, each sequence in a cache of its own."""
    parts = []
    for prefix, row in zip(prefixes.values(), rows, strict=True):
        cache = model.new_cache(1, 512)
        append(model, cache, 0, prefix)
        parts.append(feed(model, cache, 0, row))
    return torch.stack(parts)


def path_to(tree: Tree, node: int) -> list[int]:
    """The nodes from the root's child down to this one."""
    path = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]
