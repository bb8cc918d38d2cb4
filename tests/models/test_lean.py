"""The lean and the compiled decoder compute what transformers computes, whatever blocks, trees
and neighbours.

Two kinds of equality: with transformers up to rounding, and with itself to the
last bit, whatever else is computed in the same pass. For both, variants that
are wrong on purpose show that the check would notice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import (
    alone,
    append,
    feed,
    greedy,
    in_blocks,
    keep,
    path_to,
    plain,
    plain_greedy,
    text,
    together,
)
from safetensors.torch import load_file, save_file

from checkpoints import LEAN, promised
from outpace.errors import CompilerError
from outpace.kernels import load_library
from outpace.models import inspect_checkpoint, linear, load_model, prefill
from outpace.models import lean as lean_module
from outpace.models.compiled import CompiledDecoder
from outpace.models.lean import LeanDecoder
from outpace.trees import block_mask, block_positions
from outpace.types import Tree

BLOCKS = (17, 1, 5, 4, 1, 12)


def off(a, b):
    return (a.float() - b.float()).abs().max().item()


@pytest.fixture(scope="module", params=[False, True], ids=["lean", "compiled"])
def saved(request, checkpoint):
    """Checkpoints run by either decoder."""
    if request.param:
        try:
            load_library()
        except CompilerError as error:
            pytest.skip(str(error))
    return lambda *name, **more: replace(checkpoint(*name, **more), compile=request.param)


def changed(saved, **changes):
    """The same checkpoint, run with a configuration that is wrong on purpose."""
    source = inspect_checkpoint(saved.folder)
    wrong = replace(source, lean=replace(source.lean, **changes))
    return load_model(wrong, "fp32", "cpu", compile=saved.compile)


def is_right(saved, model):
    return isinstance(model, CompiledDecoder if saved.compile else LeanDecoder)


EXACT = ["float32", "bfloat16"]
"""Types in which a row's result does not depend on its company, to the last bit."""


def exactly(saved, dtype):
    """The model in a type in which it promises that: fp32, and bf16 where trials say so."""
    return promised(saved.load(dtype), 4, 16)


# --- as transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAN)
def test_logits_are_those_of_transformers(saved, name):
    model, ids = saved(name).load(), text(40)
    assert is_right(saved(name), model)
    assert off(in_blocks(model, ids, *BLOCKS), plain(saved(name).hf, ids)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama-linear", {"rope": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama-yarn", {"rope": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama3", {"rope": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", {"rope": {"rope_type": "default", "rope_theta": 9e3}}),
        ("mistral-window", {"windows": (None,) * 3}),
        ("mistral-window", {"windows": (10,) * 3}),
        ("qwen2-window", {"windows": (None,) * 3}),
        ("qwen2-window", {"windows": (7,) * 3}),
        ("smollm3", {"rotary": (True,) * 3}),
        ("qwen3", {"norm_eps": 1e-2}),
    ],
)
def test_a_setting_read_wrongly_shows_in_the_logits(saved, name, wrong):
    model, ids = changed(saved(name), **wrong), text(40)
    assert is_right(saved(name), model)
    assert off(in_blocks(model, ids, *BLOCKS), plain(saved(name).hf, ids)) > 1e-3


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("name", LEAN)
def test_greedy_continuation_is_that_of_transformers(saved, name, repeats):
    """Also without repeats: tied embeddings, drawn at random, like to say one token forever."""
    expected = plain_greedy(saved(name).hf, text(8), 40, repeats)
    assert repeats or len(set(expected)) == 40
    assert greedy(saved(name).load(), text(8), 40, repeats) == expected


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "llama-head-dim"])
def test_shards_hold_the_same_model(saved, name):
    sharded = saved(f"{name}-shards", *LEAN[name], shard="20KB")
    assert len(list(sharded.folder.glob("*.safetensors"))) > 3
    ids = text(20)
    assert torch.equal(in_blocks(sharded.load(), ids, 20), in_blocks(saved(name).load(), ids, 20))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LEAN)
def test_half_precision_is_near_full_precision(saved, name, dtype):
    model, ids = saved(name).load(dtype), text(40)
    assert model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    logits, full = in_blocks(model, ids, *BLOCKS), in_blocks(saved(name).load(), ids, *BLOCKS)
    assert logits.isfinite().all()
    bound = {"bf16": 0.1, "fp16": 0.01}[dtype]
    assert 0 < off(logits, full) <= bound * full.abs().max().item()


@pytest.mark.parametrize("name", ["llama-tied-gqa", "mistral-window"])
def test_it_tells_what_its_matrices_take(checkpoint, name):
    """On a CPU a head that is tied is packed beside the embedding."""
    one = replace(checkpoint(name), compile=False)
    matrices = [p for p in one.hf.parameters() if p.dim() == 2]
    packed = one.hf.config.tie_word_embeddings * one.hf.get_output_embeddings().weight.nbytes
    assert one.load("fp32").weight_bytes == sum(p.nbytes for p in matrices) + packed


def test_taps_are_the_hidden_states_of_transformers(saved):
    one, ids = saved("qwen3"), text(12)
    normed = []
    hook = one.hf.model.norm.register_forward_pre_hook(lambda module, args: normed.append(args[0]))
    with torch.inference_mode():
        states = one.hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    cache = one.load().new_cache(1, 64)
    first = prefill(one.load(), cache, 0, ids[:7], taps=(0, 1, 2))
    rest = one.load().forward(
        torch.tensor([ids[7:]]), torch.arange(7, 12)[None], cache, [0], taps=(0, 1, 2)
    )
    for tap, expected in enumerate([states[1], states[2], normed[0]]):
        assert off(torch.cat([first[tap], rest.taps[tap]], 1), expected) <= 1e-4
    assert off(rest.taps[0], states[2][:, 7:]) > 1e-2  # a neighbouring layer is far away


def test_taps_come_in_the_order_they_were_asked_for(saved):
    model = saved("qwen3").load()

    def taps(*layers):
        at = torch.tensor([[0, 1]])
        return model.forward(at + 5, at, model.new_cache(1, 64), [0], taps=layers).taps

    first, last = taps(0, 2)
    assert all(map(torch.equal, taps(2, 0), (last, first)))


def test_the_head_runs_only_when_asked_for(saved):
    model = saved("llama2").load()
    out = model.forward(
        torch.tensor([[1]]), torch.tensor([[0]]), model.new_cache(1, 64), [0], logits=False
    )
    assert out.logits is None
    assert out.taps == ()


# --- long texts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied-gqa", "mistral-window", "llama-yarn"])
def test_the_cache_grows_under_a_long_text(saved, name):
    kind, options = LEAN[name]
    one = saved(f"{name}-long", kind, options | {"max_position_embeddings": 2048})
    model, ids, beside = one.load(), text(1100), text(30, seed=1)
    cache = model.new_cache(2, 2048)
    append(model, cache, 1, beside[:20])
    capacities, parts = [cache.capacity], []
    prefill(model, cache, 0, ids[:200])
    for start in range(200, 1100, 60):
        parts.append(append(model, cache, 0, ids[start : start + 60]))
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [256, 512, 1024, 2048]
    assert off(torch.cat(parts), plain(one.hf, ids)[200:]) <= 1e-4
    assert off(feed(model, cache, 1, beside[20:]), plain(one.hf, beside)[20:]) <= 1e-4


def test_the_rotation_tables_grow_with_the_cache(saved):
    options = {"max_position_embeddings": 8192, "num_hidden_layers": 1}
    one = saved("llama-8k", "Llama", options)
    model, ids = one.load(), text(4200)
    cache = model.new_cache(1, 8192)
    prefill(model, cache, 0, ids[:-4])
    assert off(feed(model, cache, 0, ids[-4:]), plain(one.hf, ids)[-4:]) <= 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_prefill_in_chunks_equals_one_go(saved, monkeypatch, chunk):
    model, ids = saved("qwen2-window").load(), text(40)

    def run():
        cache = model.new_cache(1, 64)
        states = prefill(model, cache, 0, ids[:-1], taps=(0, 2))
        assert cache.lengths == [39]
        return [*states, feed(model, cache, 0, ids[-1:])]

    whole = run()
    assert whole[0].shape == (1, 39, 48)
    monkeypatch.setattr("outpace.models.base.PREFILL_CHUNK", chunk)
    for a, b in zip(run(), whole, strict=True):
        assert off(a, b) <= 1e-5


# --- sliding windows ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [("mistral-window", 9), ("qwen2-window", 7)])
def test_a_window_counts_only_past_its_width(saved, name, window):
    ids = text(40)
    honoured = in_blocks(saved(name).load(), ids, *BLOCKS)
    ignored = in_blocks(changed(saved(name), windows=(None,) * 3), ids, *BLOCKS)
    assert torch.equal(honoured[:window], ignored[:window])
    assert off(honoured[window], ignored[window]) > 1e-3


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_a_window_holds_in_a_tree(saved, name):
    ids, tree = text(20), Tree((-1, -1, 0, 1, 2, 3))
    expected = plain(saved(name).hf, [*ids[:14], ids[15], ids[17], ids[19]])[-1]  # node 5's path

    def last_node(model):
        cache = model.new_cache(1, 64)
        append(model, cache, 0, ids[:13])
        return feed(model, cache, 0, ids[13:], tree)[6]

    assert off(last_node(saved(name).load()), expected) <= 1e-4
    assert off(last_node(changed(saved(name), windows=(None,) * 3)), expected) > 1e-3


# --- trees ----------------------------------------------------------------------------------

TREE_NAMES = ["llama-tied-gqa", "mistral-window", "qwen2-window", "qwen3", "smollm3"]


@st.composite
def trees(draw):
    size = draw(st.integers(1, 9))
    return Tree(tuple(draw(st.integers(-1, i - 1)) for i in range(size)))


@pytest.mark.parametrize("name", TREE_NAMES)
@settings(max_examples=15)
@given(tree=trees(), prefix=st.integers(0, 70), kept=st.integers(0, 8), seed=st.integers(0, 9))
def test_a_node_of_a_tree_sees_its_path_alone(saved, name, tree, prefix, kept, seed):
    model, ids = saved(name).load(), text(prefix + len(tree) + 4, seed=seed)
    before, (root, *nodes), after = ids[:prefix], ids[prefix:-3], ids[-3:]

    def linear_logits(path, more=()):
        cache = model.new_cache(1, 512)
        prefill(model, cache, 0, before)
        return feed(model, cache, 0, [root, *(nodes[n] for n in path), *more])

    cache = model.new_cache(3, 512)
    prefill(model, cache, 1, before)
    rows = feed(model, cache, 1, [root, *nodes], tree)
    assert off(rows[0], linear_logits([])[0]) <= 1e-5
    for node in range(len(tree)):
        assert off(rows[node + 1], linear_logits(path_to(tree, node))[-1]) <= 1e-5
    path = path_to(tree, kept % len(tree))
    keep(cache, 1, path)
    assert cache.lengths == [0, prefix + 1 + len(path), 0]
    assert off(feed(model, cache, 1, after), linear_logits(path, after)[-3:]) <= 1e-5


@pytest.mark.parametrize("name", TREE_NAMES)
def test_a_branch_under_a_causal_mask_is_another_text(saved, name):
    model, ids, tree = saved(name).load(), text(14), Tree((-1, -1, 1))
    cache = model.new_cache(1, 64)
    prefill(model, cache, 0, ids[:10])
    branched = feed(model, cache, 0, ids[10:], tree)
    causal = feed(model, cache, 0, ids[10:])
    assert torch.equal(branched[:2], causal[:2])
    assert min(off(branched[2], causal[2]), off(branched[3], causal[3])) > 1e-3


def test_what_is_not_committed_leaves_no_trace(saved):
    model, ids = saved("mistral-window").load(), text(30)
    cache = model.new_cache(1, 64)
    append(model, cache, 0, ids[:20])
    expected = feed(model, cache, 0, ids[20:])
    feed(model, cache, 0, text(12, seed=1))
    feed(model, cache, 0, text(7, seed=2), Tree((-1, -1, 0, 0, 1, 2)))
    assert torch.equal(feed(model, cache, 0, ids[20:]), expected)
    append(model, cache, 0, text(8, seed=3))
    cache.truncate(0, 20)
    assert torch.equal(feed(model, cache, 0, ids[20:]), expected)


# --- to the last bit ------------------------------------------------------------------------


SIZES = [(2,), (3,), (4,), (5,), (9,), (16,), (1, 5, 2)]
EXACT_NAMES = ["llama2", "llama-tied-gqa", "llama3", "mistral-window", "qwen2-window", "qwen3"]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_a_row_does_not_depend_on_the_rows_beside_it(saved, name, dtype):
    model, ids = exactly(saved(name), dtype), text(60)
    single = in_blocks(model, ids, 1)
    for sizes in SIZES:
        assert torch.equal(in_blocks(model, ids, *sizes), single), sizes


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", ["llama2", "llama-tied-gqa", "qwen2-window"])
def test_a_block_across_a_bucket_boundary_is_no_exception(saved, name, dtype):
    model, ids = exactly(saved(name), dtype), text(150)
    assert torch.equal(in_blocks(model, ids, 5), in_blocks(model, ids, 1))


def test_a_row_reads_as_far_in_any_block():
    """Attention is asked the same of a row wherever its block begins and ends."""
    reads = {}
    for length in range(150):
        for rows in range(1, 17):
            spans = lean_module._spans(length, rows)
            assert [i for some, _ in spans for i in range(rows)[some]] == list(range(rows))
            for some, far in spans:
                assert far % 64 == 0
                for i in range(rows)[some]:
                    assert reads.setdefault(length + i, far) == far > length + i


@pytest.mark.parametrize("dtype", EXACT)
def test_the_same_with_two_threads(saved, dtype):
    options = {"hidden_size": 256, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = exactly(saved("llama-wide", "Llama", options), dtype)
    prefixes, blocks = {0: text(9), 1: text(40), 3: text(70)}, [text(5, seed=n) for n in range(3)]
    one_thread = in_blocks(model, text(15), 1)
    torch.set_num_threads(2)
    assert torch.equal(in_blocks(model, text(15), 1), one_thread)
    assert torch.equal(in_blocks(model, text(15), 5), one_thread)
    assert torch.equal(together(model, prefixes, blocks), alone(model, prefixes, blocks))


@pytest.fixture(scope="module")
def five_heads(saved):
    """Folded over one key-value head, seven rows are 35: a block of 32 and three left over."""
    options = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
    return saved("llama-five", "Llama", options)


@pytest.mark.parametrize("dtype", EXACT)
def test_rows_left_over_from_a_block_are_no_exception(five_heads, dtype):
    model, ids = exactly(five_heads, dtype), text(60)
    single = in_blocks(model, ids, 1)
    for rows in (2, 5, 7, 13, 16):
        assert torch.equal(in_blocks(model, ids, rows), single), rows


@pytest.fixture
def wide_heads(saved):
    """The wider the heads, the more query rows attention needs to round as it always does."""

    def make(head_dim, **options):
        return saved(f"llama-head-{head_dim}", "Llama", {"head_dim": head_dim} | options)

    return make


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_wide_heads_are_no_exception(wide_heads, head_dim, kv_heads, dtype):
    model, ids = exactly(wide_heads(head_dim, num_key_value_heads=kv_heads), dtype), text(60)
    single = in_blocks(model, ids, 1)
    for rows in range(2, 17):
        assert torch.equal(in_blocks(model, ids, rows), single), rows


def test_doubt_is_where_rows_depend_on_their_company(saved, checkpoint):
    """What the tests above and below promise is without; what they do not is with."""
    model = saved("qwen3").load()
    for batch, rows, branched in ((1, 5, False), (8, 16, False), (1, 17, False), (1, 5, True)):
        promised = isinstance(model, CompiledDecoder) or (rows <= 16 and not branched)
        assert (model.doubt(batch, rows, branched) == 0) == promised
    adapted = checkpoint("gpt2").load()
    assert adapted.doubt(1, 5, False) > 0
    assert replace(checkpoint("qwen3"), compile=False).load("fp16").doubt(1, 5, False) > 0


def test_doubt_begins_with_the_rows_that_a_linear_layer_computes_otherwise(checkpoint, monkeypatch):
    agreeing = {(97, 48): 40, (160, 48): 33}
    monkeypatch.setattr(
        linear, "agreeing_rows", lambda pack, *size: agreeing.get(size[:2], math.inf)
    )
    model = replace(checkpoint("qwen3"), compile=False).load()
    assert {n.agreeing_rows for n in (model._head, *model._layers[0].linears)} == {40, 33, math.inf}
    for batch, rows in ((1, 16), (2, 16), (33, 1), (8, 4)):
        assert model.doubt(batch, rows, False) == 0
    for batch, rows in ((34, 1), (8, 5), (3, 12)):
        assert model.doubt(batch, rows, False) > 0


def test_without_more_query_rows_they_would_be(checkpoint, monkeypatch):
    monkeypatch.setattr(lean_module, "query_padding", lambda rows, head_dim: 0)
    one = checkpoint("llama-head-256", "Llama", {"head_dim": 256})
    model, ids = replace(one, compile=False).load(), text(60)
    assert not torch.equal(in_blocks(model, ids, 16), in_blocks(model, ids, 1))


def test_what_overflows_leaves_no_trace(saved):
    """A rejected row of infinities lies masked behind the text: 0 x inf would reach everything."""
    one = saved("llama-overflowing", *LEAN["llama2"])
    file = one.folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][5] = torch.inf
    save_file(weights, file, {"format": "pt"})
    model, ids = one.load("fp16"), [i for i in text(12) if i != 5]
    cache = model.new_cache(1, 64)
    append(model, cache, 0, ids[:4])
    expected = feed(model, cache, 0, ids[4:])
    assert expected.isfinite().all()
    assert feed(model, cache, 0, [ids[4], 5, 5]).isnan().any()
    assert torch.equal(feed(model, cache, 0, ids[4:]), expected)
    assert off(feed(model, cache, 0, ids[4:5]), expected[:1]) <= 1e-2


def plain_linears(saved, monkeypatch):
    monkeypatch.setattr(linear, "prepacking_available", lambda device, dtype: False)
    return load_model(inspect_checkpoint(saved.folder), "fp32", "cpu", compile=False)


def test_plain_linear_layers_round_differently(checkpoint, monkeypatch):
    model, ids = plain_linears(checkpoint("llama2"), monkeypatch), text(60)
    blocks, single = in_blocks(model, ids, 5), in_blocks(model, ids, 1)
    assert not torch.equal(blocks, single)
    assert off(blocks, single) <= 1e-4


RAGGED = {
    "neighbours of one bucket": (0, 1, 2, 3),
    "neighbours and others": (0, 1, 3, 5),
    "apart": (1, 4, 6, 9),
    "out of order": (3, 2, 0, 1),
}


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", EXACT_NAMES)
@pytest.mark.parametrize("slots", RAGGED.values(), ids=RAGGED)
def test_a_sequence_does_not_depend_on_its_neighbours(saved, name, dtype, slots):
    model = exactly(saved(name), dtype)
    for lengths in [(5, 31, 17, 58), (5, 31, 90, 120), (3, 64, 65, 190)]:
        prefixes = {s: text(n, seed=n) for s, n in zip(slots, lengths, strict=True)}
        for rows in (1, 2, 5):
            blocks = [text(rows, seed=100 + n) for n in lengths]
            assert torch.equal(together(model, prefixes, blocks), alone(model, prefixes, blocks))


def test_plain_linear_layers_let_neighbours_show(checkpoint, monkeypatch):
    model = plain_linears(checkpoint("llama2"), monkeypatch)
    prefixes, blocks = {0: text(9), 1: text(40)}, [text(1, seed=1), text(1, seed=2)]
    assert not torch.equal(together(model, prefixes, blocks), alone(model, prefixes, blocks))


def test_trees_beside_each_other_do_not_mix(saved):
    model, lengths = saved("qwen3").load(), (4, 70)
    shapes = [Tree((-1, -1, 0, 1)), Tree((-1, 0, 0, 2))]
    cache = model.new_cache(3, 512)
    expected, blocks = [], [text(5, seed=n) for n in lengths]
    for slot, n, tree, ids in zip((0, 2), lengths, shapes, blocks, strict=True):
        append(model, cache, slot, text(n))
        expected.append(feed(model, cache, slot, ids, tree))
    positions = block_positions(lengths, shapes, 5)
    out = model.forward(torch.tensor(blocks), positions, cache, [0, 2], block_mask(shapes, 5))
    assert torch.equal(out.logits, torch.stack(expected))
