"""The toy model's logits are its table, through caches, trees and rollbacks.

The twin walks the tokens of a path with a Python loop; the model reads them
from the cache and through the mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import append, feed, keep, path_to

from outpace import OptionError
from outpace.models import MarkovModel, prefill
from outpace.trees import block_mask, block_positions
from outpace.types import Tree

V = 4
MODELS = {order: MarkovModel.random(V, order, seed=order) for order in (1, 2, 3)}


def law(model, tokens):
    """log p(next | tokens), looked up by hand."""
    row = model.table
    for token in ([0] * model.order + list(tokens))[-model.order :]:
        row = row[token]
    return row.log()


@st.composite
def cases(draw):
    size = draw(st.integers(0, 8))
    token = st.integers(0, V - 1)
    return (
        draw(st.lists(token, max_size=6)),
        draw(st.lists(token, min_size=size + 1, max_size=size + 1)),
        Tree(tuple(draw(st.integers(-1, i - 1)) for i in range(size))),
    )


@pytest.mark.parametrize("order", MODELS)
@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, V - 1), min_size=1, max_size=12), split=st.integers(0, 11))
def test_a_text_follows_the_table(order, tokens, split):
    model = MODELS[order]
    cache = model.new_cache(2, 64)
    split = min(split, len(tokens) - 1)
    prefill(model, cache, 1, tokens[:split])
    rows = feed(model, cache, 1, tokens[split:])
    for i, row in enumerate(rows):
        assert torch.equal(row, law(model, tokens[: split + i + 1]))


@pytest.mark.parametrize("order", MODELS)
@settings(max_examples=60)
@given(case=cases(), kept=st.integers(0, 8), after=st.lists(st.integers(0, V - 1), min_size=1))
def test_a_tree_and_a_rollback_follow_the_table(order, case, kept, after):
    model, (prefix, block, tree) = MODELS[order], case
    cache = model.new_cache(2, 256)
    prefill(model, cache, 1, prefix)
    rows = feed(model, cache, 1, block, tree)
    assert torch.equal(rows[0], law(model, [*prefix, block[0]]))
    for node in range(len(tree)):
        path = [block[n + 1] for n in path_to(tree, node)]
        assert torch.equal(rows[node + 1], law(model, [*prefix, block[0], *path]))
    path = path_to(tree, kept % len(tree)) if len(tree) else []
    keep(cache, 1, path)
    text = [*prefix, block[0], *(block[n + 1] for n in path), *after]
    assert torch.equal(append(model, cache, 1, after)[-1], law(model, text))
    cache.truncate(1, len(prefix))
    assert torch.equal(feed(model, cache, 1, after)[-1], law(model, [*prefix, *after]))


@pytest.mark.parametrize("order", MODELS)
@settings(max_examples=40)
@given(batch=st.lists(cases(), min_size=2, max_size=4))
def test_sequences_side_by_side_follow_the_table(order, batch):
    model, rows = MODELS[order], max(len(block) for _, block, _ in batch)
    cache, slots = model.new_cache(9, 64), [2 * b + 1 for b in range(len(batch))]
    for slot, (prefix, _, _) in zip(slots, batch, strict=True):
        prefill(model, cache, slot, prefix)
    trees = [tree for _, _, tree in batch]
    logits = model.forward(
        torch.tensor([block + [0] * (rows - len(block)) for _, block, _ in batch]),
        block_positions([0] * len(batch), trees, rows),
        cache,
        slots,
        block_mask(trees, rows),
    ).logits
    for b, (prefix, block, tree) in enumerate(batch):
        assert torch.equal(logits[b, 0], law(model, [*prefix, block[0]]))
        for node in range(len(tree)):
            path = [block[n + 1] for n in path_to(tree, node)]
            assert torch.equal(logits[b, node + 1], law(model, [*prefix, block[0], *path]))


def test_a_wrong_mask_is_another_law():
    model, block = MODELS[2], [1, 2, 3]
    cache = model.new_cache(1, 64)
    branched = feed(model, cache, 0, block, Tree((-1, -1)))
    assert torch.equal(branched[2], law(model, [1, 3]))
    assert not torch.equal(feed(model, cache, 0, block)[2], branched[2])


def test_random_tables_follow_their_seed_and_sharpness():
    assert torch.equal(MarkovModel.random(V, 2, seed=5).table, MarkovModel.random(V, 2, 5).table)
    assert not torch.equal(MarkovModel.random(V, 2, 6).table, MarkovModel.random(V, 2, 5).table)
    sharp, flat = (MarkovModel.random(V, 1, 0, sharpness=s).table.amax(-1) for s in (4.0, 0.5))
    assert (sharp > flat).all()
    assert MarkovModel.random(V, 1, 0, context_length=12).context_length == 12


def test_a_certain_row_is_minus_infinity_elsewhere():
    model = MarkovModel(torch.eye(3))
    assert (model.vocab_size, model.order, model.dtype) == (3, 1, torch.float32)
    logits = feed(model, model.new_cache(1, 8), 0, [2])
    assert logits.tolist() == [[-math.inf, -math.inf, 0.0]]


@pytest.mark.parametrize(
    "table",
    [
        torch.tensor([1.0]),  # no context
        torch.full((2, 3), 1 / 3),  # not square
        torch.full((3, 2, 3), 1 / 3),
        torch.full((2, 2), 0.4),  # rows that do not sum to 1
        torch.tensor([[1.5, -0.5], [0.5, 0.5]]),
        torch.full((2, 2), torch.nan),
    ],
)
def test_a_table_that_is_no_law_is_refused(table):
    with pytest.raises(OptionError, match="Markov table"):
        MarkovModel(table)
