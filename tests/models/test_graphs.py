"""Recorded passes are the lean decoder's, at fixed shapes. What records them here is no GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import alone, append, feed, greedy, in_blocks, keep, path_to, plain, text, together

from checkpoints import LEAN
from outpace import Generator, SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine.clock import Clock
from outpace.models import base, graphs, prefill
from outpace.models.graphs import ROWS, GraphedDecoder, reach
from outpace.models.lean import LeanDecoder
from outpace.trees import block_mask, block_positions
from outpace.types import Tree
from tape import Recorder
from ticking import ticking

NAMES = ["llama-tied-gqa", "mistral-window", "qwen2-window", "qwen3", "smollm3"]


def off(a, b):
    return (a.float() - b.float()).abs().max().item()


@pytest.fixture(autouse=True)
def _recordable(monkeypatch):
    """On a CPU the first largest element is found by NumPy, which a tape does not hear."""
    monkeypatch.setattr(base, "argmax", lambda x: x.argmax(-1))


@pytest.fixture
def graphed(checkpoint):
    def make(name, *new, dtype="fp32"):
        model = replace(checkpoint(name, *new), compile=False).load(dtype)
        assert isinstance(model, LeanDecoder)
        return GraphedDecoder(model, Recorder())

    return make


@pytest.mark.parametrize("name", LEAN)
def test_logits_are_those_of_transformers(graphed, checkpoint, name):
    model, ids = graphed(name), text(40)
    assert off(in_blocks(model, ids, 7, 1, 5, 4, 1, 12), plain(checkpoint(name).hf, ids)) <= 1e-4
    assert model._record.recorded == 1  # one shape for all of them
    assert model.weight_bytes == model.decoder.weight_bytes > 0
    assert model._record.replayed == 9


def test_longer_blocks_are_run_as_they_are(graphed):
    model, ids = graphed("qwen3"), text(40)
    logits = in_blocks(model, ids, ROWS + 1)
    assert model._record.replayed == 1  # of the six rows that were left
    assert torch.equal(logits[: ROWS + 1], in_blocks(model.decoder, ids, ROWS + 1)[: ROWS + 1])


def test_what_it_reads_is_a_bucket_of_a_quarter_more_at_most():
    ends = range(1, 20_000)
    far = [reach(n) for n in ends]
    assert all(
        n <= f and f % 64 == 0 and f <= max(256, 1.25 * n) for n, f in zip(ends, far, strict=True)
    )
    assert all(a <= b for a, b in pairwise(far))
    assert len(set(far)) <= 4 * 7


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_row_has_the_same_bits_in_any_block(graphed, rows):
    """Across the ends of buckets, and while the cache grows."""
    kind, options = LEAN["llama-tied-gqa"]
    model = graphed("llama-tied-gqa-long", kind, options | {"max_position_embeddings": 2048})
    ids = text(400)
    assert torch.equal(in_blocks(model, ids, rows), in_blocks(model, ids, 1))
    assert model._record.recorded > 4


@pytest.mark.parametrize("room", [520, 700])
def test_a_cache_that_ends_behind_a_bucket(graphed, room):
    """What the first part of a block has written is there for the second."""
    kind, options = LEAN["llama-tied-gqa"]
    model = graphed("llama-tied-gqa-long", kind, options | {"max_position_embeddings": 2048})
    ids, end = text(room), max(n for n in (320, 512, 640) if n < room)
    expected = in_blocks(model.decoder, ids[: end + 6], 1)[end - 2 :]
    cache = model.new_cache(1, room)
    prefill(model, cache, 0, ids[: end - 2])
    found = [
        append(model, cache, 0, ids[end - 2 : end + 2]),
        feed(model, cache, 0, ids[end + 2 : end + 6]),
    ]
    assert off(torch.cat(found), expected) <= 1e-5


def test_what_is_recorded_lives_on(graphed):
    """A graph holds addresses, not tensors."""
    model = graphed("mistral-window")
    model._record = recorder = Recorder(forgets=True)
    cache = model.new_cache(3, 512)
    for slot in (2, 0):  # the cache is not made anew in between
        prefill(model, cache, slot, text(9))
        feed(model, cache, slot, text(5))

    def lost():
        gc.collect()
        found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        tensors = [x for x in found if not x.is_mkldnn]
        return recorder.taken - {x.untyped_storage().data_ptr() for x in tensors}

    assert recorder.recorded == 2
    assert not lost()
    model._recorded[cache].inputs.clear()  # the control
    assert lost()


def test_a_bucket_is_not_crossed_within_a_pass(graphed, monkeypatch):
    """Where a block ends does not decide how far its rows read."""
    kind, options = LEAN["qwen3"]
    model = graphed("qwen3-long", kind, options | {"max_position_embeddings": 2048})
    asked = []
    masks = model.decoder.masks
    monkeypatch.setattr(
        model.decoder, "masks", lambda *a: asked.append(a[2]) or masks(*a), raising=True
    )
    cache = model.new_cache(1, 1024)
    prefill(model, cache, 0, text(250))
    asked.clear()
    feed(model, cache, 0, text(5))
    assert set(asked) == {256}
    feed(model, cache, 0, text(9))
    assert set(asked) == {256, 320}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(
    parents=st.lists(st.integers(-1, 8), min_size=1, max_size=9),
    prefix=st.integers(0, 300),
    kept=st.integers(0, 8),
)
def test_a_node_of_a_tree_sees_its_path_alone(graphed_once, name, parents, prefix, kept):
    tree = Tree(tuple(min(p, i - 1) for i, p in enumerate(parents)))
    model, ids = graphed_once(name), text(prefix + len(tree) + 4)
    before, (root, *nodes), after = ids[:prefix], ids[prefix:-3], ids[-3:]

    def linear_logits(path, more=()):
        cache = model.decoder.new_cache(1, 512)
        prefill(model.decoder, cache, 0, before)
        return feed(model.decoder, cache, 0, [root, *(nodes[n] for n in path), *more])

    cache = model.new_cache(3, 512)
    prefill(model, cache, 1, before)
    rows = feed(model, cache, 1, [root, *nodes], tree)
    for node in range(len(tree)):
        assert off(rows[node + 1], linear_logits(path_to(tree, node))[-1]) <= 1e-5
    path = path_to(tree, kept % len(tree))
    keep(cache, 1, path)
    assert cache.lengths == [0, prefix + 1 + len(path), 0]
    assert off(feed(model, cache, 1, after), linear_logits(path, after)[-3:]) <= 1e-5  # causal


@pytest.fixture(scope="module")
def graphed_once(checkpoint):
    return lambda name: GraphedDecoder(replace(checkpoint(name), compile=False).load(), Recorder())


def test_neighbours_are_left_alone(graphed):
    """Slots in any order, some of them idle: their committed positions are not written to."""
    model = graphed("qwen2-window")
    prefixes = {3: text(9), 0: text(250), 2: text(1)}
    blocks = [text(5, seed=n) for n in range(3)]
    assert off(together(model, prefixes, blocks), alone(model.decoder, prefixes, blocks)) <= 1e-5
    cache = model.new_cache(4, 320)
    append(model, cache, 0, text(200))
    for start in range(0, 56, 14):  # slot 0 is filled to the last position there is room for
        append(model, cache, 0, text(14, seed=start))
    expected = feed(model, cache, 0, text(6))
    append(model, cache, 3, text(12, seed=9))
    feed(model, cache, 2, text(7, seed=8))
    assert torch.equal(feed(model, cache, 0, text(6)), expected)


def test_a_batch_of_trees_and_chains(graphed):
    model = graphed("mistral-window")
    cache, shapes = model.new_cache(4, 512), (Tree((-1, -1, 0, 2)), Tree((-1, 0, 1)))
    expected, blocks = [], [text(5, seed=n) for n in (70, 40)]
    for slot, n, tree, ids in zip((0, 2), (70, 40), shapes, blocks, strict=True):
        append(model, cache, slot, text(n))
        own = model.decoder.new_cache(1, 512)
        append(model.decoder, own, 0, text(n))
        expected.append(feed(model.decoder, own, 0, ids, tree))
    positions = block_positions([70, 40], shapes, 5)
    out = model.forward(torch.tensor(blocks), positions, cache, [0, 2], block_mask(shapes, 5))
    for b, tree in enumerate(shapes):
        rows = len(tree) + 1
        assert off(out.logits[b, :rows], expected[b][:rows]) <= 1e-5


@pytest.mark.parametrize("k", [1, 4, 12])
def test_speculation_changes_no_bit(graphed, k):
    """One sequence, through the engine, across the end of a bucket."""
    target = graphed("llama-tied-gqa-512", "Llama", {"max_position_embeddings": 512})

    def run(drafter):
        generator = Generator(target, drafter, k, max_batch=1)
        return generator.generate(text(9), max_new_tokens=300, temperature=0, eos_token_ids=())

    plain, fast = run(None), run(ModelDrafter(graphed("llama2")))
    assert fast.token_ids == plain.token_ids
    assert [e.logprob for e in fast.tokens] == [e.logprob for e in plain.tokens]
    assert fast.stats.tokens_per_pass > 1


class Slow(Recorder):
    """That what is recorded takes long, by the clock of `ticking`."""

    def __init__(self, tick):
        super().__init__()
        self.tick = tick

    def __call__(self, run):
        self.tick(1000.0)
        return super().__call__(run)


@pytest.mark.parametrize("known", [True, False])
def test_rounds_in_which_passes_are_recorded_are_no_measure_of_others(graphed, known, monkeypatch):
    """They come again whenever a text has grown: drafts would seem too dear to be tried."""
    tick = ticking(monkeypatch, "drafting")
    monkeypatch.setattr("outpace.drafters.model.share_of", lambda *models: 0.1)
    if not known:
        monkeypatch.setattr(Clock, "recorded", False)
    long = "llama-tied-gqa-512", "Llama", {"max_position_embeddings": 512}
    models = [graphed(*long) for _ in range(2)]
    for model in models:
        model._record = Slow(tick)
    engine = Generator(models[0], ModelDrafter(models[1]), "auto", max_batch=1).engine
    control = engine.controller
    for seed in range(2):
        engine.submit(
            text(9, seed=seed), SamplingParams(max_new_tokens=300, temperature=0, eos_token_ids=())
        )
        while engine.busy:
            engine.step()
    control.report()
    assert engine.stats.drafted_rounds > 20
    assert sum(model._record.recorded for model in models) > 4
    # one is in the very first round, beside which nothing is known
    assert (control._prices.seconds < 2000) is known


def test_outputs_are_the_callers(graphed):
    model = graphed("llama2")
    cache = model.new_cache(1, 64)
    out = model.forward(torch.tensor([[3, 4]]), torch.tensor([[0, 1]]), cache, [0], taps=(0, 1))
    held = [x.clone() for x in graphs._tensors(out)]
    model.forward(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), cache, [0], taps=(0, 1))
    assert all(map(torch.equal, graphs._tensors(out), held))
    assert torch.equal(out.top.tokens, out.logits.argmax(-1))
    assert off(*out.taps) > 1e-3


def test_where_nothing_can_be_recorded_the_lean_decoder_runs(checkpoint):
    def refuses(run):
        raise RuntimeError("no such thing here\nand more")

    decoder = replace(checkpoint("qwen3"), compile=False).load()
    model = GraphedDecoder(decoder, refuses)
    with pytest.warns(RuntimeWarning, match=r"without CUDA graphs, .*: no such thing here$"):
        ids = greedy(model, text(8), 9)
    assert ids == greedy(decoder, text(8), 9)


def test_a_pass_that_reads_more_than_its_inputs_is_noticed(graphed, monkeypatch):
    """The control: a number that Python put into the pass is the same in every replay."""
    monkeypatch.setattr(
        GraphedDecoder,
        "_feed",
        lambda self, inputs, tokens, *a: inputs.tokens[:, : tokens.shape[1]].copy_(tokens),
    )
    model, ids = graphed("qwen3"), text(40)
    assert off(in_blocks(model, ids, 5), in_blocks(model.decoder, ids, 5)) > 1e-3
