"""A block that is computed in several passes is the block computed in one, by every runner.

Trees grow by passes that end anywhere, in a ragged batch, and each row is compared with the pass
over the whole block and with its own path alone: to the last bit where the runner promises it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import append, feed, grown, keep, path_to, text

from outpace.errors import CompilerError
from outpace.kernels import load_library
from outpace.models import MarkovModel, base, prefill
from outpace.models.graphs import GraphedDecoder
from outpace.trees import block_mask, block_positions
from outpace.types import Tree
from tape import Recorder

SLOTS = (4, 1, 2)


@dataclass
class Case:
    """A runner, one that computes texts alone, and whether they agree to the last bit."""

    model: Any
    plain: Any
    exact: bool

    def agree(self, a, b):
        if self.exact:
            return torch.equal(a, b)
        return ((a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max())).item()

    def text(self, length, seed=0):
        return text(length, self.model.vocab_size, seed)


CASES = [
    *(("compiled", n, d) for n in ("llama-tied-gqa", "mistral-window") for d in ("fp32", "bf16")),
    ("compiled", "qwen2-window", "bf16"),
    ("lean", "qwen3", "fp32"),
    ("lean", "qwen2-window", "fp32"),
    ("graphed", "mistral-window", "fp32"),
    ("adapter", "gpt2", "fp32"),
    ("adapter", "gemma2", "fp32"),
    ("markov", "3", "fp64"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, checkpoint):
    kind, name, dtype = request.param
    if kind == "markov":
        model = MarkovModel.random(5, int(name), 0)
        return Case(model, model, exact=True)
    if kind == "compiled":
        try:
            load_library()
        except CompilerError as error:
            pytest.skip(str(error))
    compile = {"compiled": True, "adapter": "auto"}.get(kind, False)
    model = replace(checkpoint(name), compile=compile).load(dtype)
    runner = GraphedDecoder(model, Recorder()) if kind == "graphed" else model
    return Case(runner, model, exact=kind == "compiled")


@pytest.fixture(autouse=True, scope="module")
def _recordable():
    """On a CPU the first largest element is found by NumPy, which a tape does not hear."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "argmax", lambda x: x.argmax(-1))
        yield


@st.composite
def trees(draw):
    size = draw(st.integers(1, 10))
    if draw(st.integers(0, 4)) == 0:
        return Tree(tuple(range(-1, size - 1)))
    return Tree(tuple(draw(st.integers(-1, i - 1)) for i in range(size)))


@st.composite
def growths(draw):
    """Trees of a batch, and where passes over them end."""
    shapes = draw(st.lists(trees(), min_size=1, max_size=3))
    rows = max(len(tree) for tree in shapes) + 1
    return shapes, sorted({*draw(st.sets(st.integers(1, rows), max_size=5)), rows})


def begin(case, lengths):
    """A cache that holds texts, and a block of so many rows for each."""
    cache = case.model.new_cache(5, 512)
    prefixes = [case.text(n, n) for n in lengths]
    for slot, prefix in zip(SLOTS, prefixes, strict=False):
        prefill(case.model, cache, slot, prefix)
    return cache, prefixes


def alone(case, prefix, ids):
    """Logits `[T, V]` of a text behind another, in a pass of its own."""
    cache = case.plain.new_cache(1, 512)
    prefill(case.plain, cache, 0, prefix)
    return feed(case.plain, cache, 0, ids)


@settings(max_examples=12)
@given(growth=growths(), lengths=st.tuples(*[st.integers(0, 150)] * 3), kept=st.integers(0, 9))
def test_a_tree_that_grows_is_the_tree(case, growth, lengths, kept):
    shapes, ends = growth
    cache, prefixes = begin(case, lengths[: len(shapes)])
    slots, blocks = SLOTS[: len(shapes)], [case.text(ends[-1], 7 + i) for i in range(len(shapes))]
    whole = grown(case.model, cache, slots, blocks, shapes, ends[-1:])
    rows = grown(case.model, cache, slots, blocks, shapes, ends)
    assert case.agree(rows, whole)
    for b, (prefix, (root, *nodes), tree) in enumerate(zip(prefixes, blocks, shapes, strict=True)):
        for node in range(len(tree)):
            ids = [root, *(nodes[n] for n in path_to(tree, node))]
            assert case.agree(rows[b, node + 1], alone(case, prefix, ids)[-1])
    for slot, prefix, (root, *nodes), tree in zip(slots, prefixes, blocks, shapes, strict=True):
        path, after = path_to(tree, kept % len(tree)), case.text(3, 1)
        keep(cache, slot, path)
        expected = alone(case, prefix, [root, *(nodes[n] for n in path), *after])[-3:]
        assert case.agree(feed(case.model, cache, slot, after), expected)


WIDE = Tree((-1, -1, -1, 0, 0, 1, 2, 4))
LEVELS = (1, 4, 8, 9)


def test_rows_that_all_may_look_at_are_noticed(case):
    """The control: the mask of rows that have been computed is ignored."""
    cache, _ = begin(case, (20, 3))
    args = case.model, cache, SLOTS[:2], [case.text(9, 1), case.text(9, 2)], [WIDE, WIDE], LEVELS
    mask = block_mask([WIDE, WIDE], 9)
    for first, last in pairwise(LEVELS):
        mask[:, first:last, :first] = True
    rows, wrong = grown(*args), grown(*args, mask)
    assert case.agree(rows[:, :4], wrong[:, :4])
    assert not case.agree(rows, wrong)
    assert (rows - wrong)[:, 4:].abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [(1, 4, 3), (5, 1, 20), (20, 1, 2)])
@pytest.mark.parametrize("length", [10, 60])
def test_a_text_in_parts_that_are_not_committed(case, length, sizes):
    """A causal block, also across the end of a bucket."""
    cache, prefixes = begin(case, (length, 3))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    blocks = [case.text(ends[-1], n) for n in range(2)]
    shapes = [Tree(tuple(range(-1, ends[-1] - 2)))] * 2
    rows = grown(case.model, cache, SLOTS[:2], blocks, shapes, ends)
    for b, (prefix, block) in enumerate(zip(prefixes, blocks, strict=True)):
        assert case.agree(rows[b], alone(case, prefix, block))


def test_states_and_the_likeliest_tokens_are_of_the_new_rows(case):
    if isinstance(case.model, MarkovModel):
        pytest.skip("it has no layers")
    cache, _ = begin(case, (30,))
    tokens, positions = torch.tensor([case.text(9)]), block_positions([30], [WIDE], 9)
    mask = block_mask([WIDE], 9)

    def run(end, computed):
        block = tokens[:, :end], positions[:, :end], cache, SLOTS[:1], mask[:, :end, :end]
        return case.model.forward(*block, taps=(1, 0), computed=computed)

    whole, _, last = run(9, 0), run(4, 0), run(9, 4)
    assert all(case.agree(a[:, 4:], b) for a, b in zip(whole.taps, last.taps, strict=True))
    assert not case.agree(*last.taps)
    if whole.top is not None:
        assert torch.equal(whole.top.tokens[:, 4:], last.top.tokens)
        assert case.agree(whole.top.logprobs[:, 4:], last.top.logprobs)


@pytest.mark.parametrize("lost", [False, True])
def test_the_cache_may_grow_between_the_passes(case, lost):
    """Were what lies behind the committed positions lost, it would be noticed."""
    cache, shape = case.model.new_cache(1, 1024), Tree((-1, *range(10), *range(10), 19, 20, 21))
    prefill(case.model, cache, 0, case.text(232))
    args = case.model, cache, [0], [case.text(25)], [shape]
    grown(*args, [8, 22])
    capacity = cache.capacity
    if lost:
        cache.ends = list(cache.lengths)
    rows = grown(*args, [25], computed=22)
    assert cache.capacity > capacity
    assert case.agree(rows, grown(*args, [25])[:, 22:]) is not lost


def test_a_pass_over_other_slots_in_between_is_not_noticed(case):
    cache, prefixes = begin(case, (20, 3, 70))
    (root, *nodes), path = case.text(9, 1), path_to(WIDE, 7)
    grown(case.model, cache, SLOTS[1:2], [[root, *nodes]], [WIDE], LEVELS)
    for slot in (4, 2):
        append(case.model, cache, slot, case.text(5))
    keep(cache, 1, path)
    ids = [root, *(nodes[n] for n in path), *case.text(2)]
    found = feed(case.model, cache, 1, case.text(2))
    assert case.agree(found, alone(case, prefixes[1], ids)[-2:])
