"""What the compiled decoder promises beyond the lean one, and what happens without a compiler."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from running import (
    alone,
    append,
    feed,
    greedy,
    grown,
    in_blocks,
    keep,
    path_to,
    plain,
    text,
    together,
)
from safetensors.torch import load_file, save_file

import outpace
from checkpoints import LEAN
from outpace.drafters import Commit, Context, ModelDrafter
from outpace.errors import CompilerError, OptionError
from outpace.kernels import SOURCES, compiler, load_library
from outpace.models import compiled, inspect_checkpoint, load_model, prefill
from outpace.models.compiled import CompiledDecoder, blocks, by_turns, narrowest, paired_blocks
from outpace.models.lean import LeanDecoder
from outpace.models.loading import choose_dtype
from outpace.models.quantize import QUANTIZATIONS, Quantized, choose_quantization
from outpace.sampling import DraftNoise, Keys, Warp
from outpace.types import Rows, SamplingParams, Tree

try:
    VECTORS = load_library().outpace_width()
    PAIRS = load_library().outpace_pairs_of_bf16()
except CompilerError as error:
    pytest.skip(str(error), allow_module_level=True)

CPU = torch.device("cpu")
DTYPES = ["fp32", "bf16", "fp16"]
WIDE = {
    "hidden_size": 320,
    "intermediate_size": 501,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 40,
    "num_hidden_layers": 2,
    "vocab_size": 150,
}
"""More than one block of 64 outputs everywhere, none of them whole; inputs of several stretches,
and once an odd number of them."""


@pytest.fixture(scope="module")
def saved(checkpoint):
    return lambda *name, **more: replace(checkpoint(*name, **more), compile=True)


@pytest.fixture(scope="module")
def wide(saved):
    return saved("llama-320", "Llama", WIDE)


def load_as(one, kind):
    """In a dtype, or in fp32 and quantised."""
    return one.load(kind) if kind in DTYPES else one.load("fp32", quantize=kind)


# --- to the last bit ------------------------------------------------------------------------


@st.composite
def trees(draw):
    size = draw(st.integers(1, 12))
    return Tree(tuple(draw(st.integers(-1, i - 1)) for i in range(size)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tied-gqa", "mistral-window", "qwen3", "smollm3"])
@settings(max_examples=10)
@given(tree=trees(), prefix=st.integers(0, 150), kept=st.integers(0, 11), seed=st.integers(0, 9))
def test_a_node_of_a_tree_gets_the_bits_of_plain_decoding(
    saved, name, dtype, tree, prefix, kept, seed
):
    model, ids = saved(name).load(dtype), text(prefix + len(tree) + 4, seed=seed)
    before, (root, *nodes), after = ids[:prefix], ids[prefix:-3], ids[-3:]
    path = path_to(tree, kept % len(tree))

    def step_by_step(path, more=()):
        cache = model.new_cache(1, 512)
        prefill(model, cache, 0, before)
        fed = [root, *(nodes[n] for n in path), *more]
        return torch.cat([append(model, cache, 0, [i]) for i in fed])

    cache = model.new_cache(3, 512)
    prefill(model, cache, 1, before)
    rows = feed(model, cache, 1, [root, *nodes], tree)
    for node in range(len(tree)):
        assert torch.equal(rows[node + 1], step_by_step(path_to(tree, node))[-1])
    keep(cache, 1, path)
    assert torch.equal(feed(model, cache, 1, after), step_by_step(path, after)[-3:])


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_rows_nor_threads_show(wide, dtype, quantize):
    model, ids = wide.load(dtype, quantize=quantize), text(330, 150)
    single = in_blocks(model, ids, 1)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for sizes in [(2, 7), (5,), (6, 3), (13,), (210, 17, 97)]:
            assert torch.equal(in_blocks(model, ids, *sizes), single), (threads, sizes)


@pytest.mark.parametrize("window", [None, 700])
def test_threads_may_share_what_a_row_sees(saved, window):
    """Behind a long text; plain decoding crosses the length from which they do."""
    more = {"num_key_value_heads": 1, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    kind = "Llama" if window is None else "Mistral"
    more |= {} if window is None else {"sliding_window": window}
    model, ids = saved(f"{kind}-shared", kind, more).load(), text(1720)
    tree = Tree((-1, -1, 0, 1, 1))

    def run(size):
        cache = model.new_cache(1, 4096)
        prefill(model, cache, 0, ids[:980])
        rows = [append(model, cache, 0, ids[n : n + size]) for n in range(980, 1700, size)]
        nodes = grown(model, cache, [0], [ids[1700:1706]], [tree], [6] if size == 1 else [1, 3, 6])
        return torch.cat([*rows, *nodes])

    alone = run(1)
    for threads in (2, 3):  # from 1024 and from 1536 positions on
        torch.set_num_threads(threads)
        for size in (1, 4, 12):
            assert torch.equal(run(size), alone)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantised_sequence_does_not_depend_on_its_neighbours(wide, quantize):
    model = wide.load("fp32", quantize=quantize)
    prefixes = {s: text(n, 150, n) for s, n in ((2, 5), (0, 64), (3, 190))}
    blocks = [text(5, 150, 100 + n) for n in range(3)]
    assert torch.equal(together(model, prefixes, blocks), alone(model, prefixes, blocks))


BREAKS = {
    "one row is summed in two halves": (
        "linear.h",
        "const int64_t stretch = w.quantised() ? w.stretch : STRETCH;",
        "const int64_t stretch = w.quantised() ? w.stretch : STRETCH / (rows == 1 ? 2 : 1);",
        {"fp32": 1e-4, "bf16": 0.3},
    ),
    "seven rows are divided in another way": (
        "step.cpp",
        "out[d] = seen.sum[d] / seen.mass;",
        "out[d] = p.rows == 7 ? seen.sum[d] * (1 / seen.mass) : seen.sum[d] / seen.mass;",
        {"fp32": 1e-4},  # the inputs of a bf16 layer may be too coarse to show it
    ),
}


@pytest.fixture(scope="module", params=BREAKS.values(), ids=BREAKS)
def broken(request, tmp_path_factory):
    """Kernels with one line changed, and how far logits may be off by that in what dtypes."""
    file, line, changed, bounds = request.param
    folder = tmp_path_factory.mktemp("broken") / "kernels"
    shutil.copytree(SOURCES, folder)
    source = (folder / file).read_text()
    assert source.count(line) == 1
    (folder / file).write_text(source.replace(line, changed))
    return load_library(folder), bounds


def run_by(library, saved, kind="fp32", quantize=None):
    source, dtype = inspect_checkpoint(saved.folder), choose_dtype(kind, None, CPU)

    def load(name):
        return source.weights.load(name, dtype, CPU)

    how = choose_quantization(quantize)
    return CompiledDecoder(source.lean, load, quantization=how, library=library)


def test_kernels_that_round_by_the_number_of_rows_show(wide, broken):
    library, bounds = broken
    ids = text(60, 150)
    for kind, bound in bounds.items():
        model = run_by(library, wide, kind)
        blocks, single = in_blocks(model, ids, 2, 7), in_blocks(model, ids, 1)
        assert not torch.equal(blocks, single)
        assert (blocks - single).abs().max() <= bound


NARROWER = {
    8: "-mno-avx512f",
    4: "-mno-avx512f -mno-avx2 -mno-fma",
    16: "-mno-avx512bf16 -mno-avx512vnni",
}


@pytest.mark.skipif(VECTORS != 16, reason="no AVX-512 to do without")
@pytest.mark.parametrize("width", NARROWER)
def test_processors_that_can_do_less(saved, wide, width, monkeypatch):
    monkeypatch.setenv("CXXFLAGS", NARROWER[width])
    library = load_library()
    assert library.outpace_width() == width
    assert not library.outpace_pairs_of_bf16()
    for one, vocabulary in [(wide, 150), (saved("qwen3"), 97), (saved("mistral-window"), 97)]:
        for kind in DTYPES:
            model, ids = run_by(library, one, kind), text(60, vocabulary)
            single = in_blocks(model, ids, 1)
            bound = {"fp32": 1e-4, "bf16": 0.3, "fp16": 0.03}[kind]
            assert (single - plain(one.hf, ids)).abs().max() <= bound
            assert torch.equal(in_blocks(model, ids, 2, 7, 13), single)
        for quantize in QUANTIZATIONS:
            model = run_by(library, one, "fp32", quantize)
            single, wider = in_blocks(model, ids, 1), one.load("fp32", quantize=quantize)
            assert (single - in_blocks(wider, ids, 1)).abs().max() <= 3e-3
            assert torch.equal(in_blocks(model, ids, 2, 7, 13), single)


@pytest.mark.skipif(not PAIRS, reason="no instructions for pairs of bf16")
@pytest.mark.parametrize("name", ["wide", "qwen3", "mistral-window"])
def test_pairs_of_bf16(saved, wide, name, monkeypatch):
    """In bf16 alone, they round what layers take: an error as large as that of their weights."""
    one = wide if name == "wide" else saved(name)
    ids = text(60, one.hf.config.vocab_size)
    native = load_library()
    monkeypatch.setenv("CXXFLAGS", NARROWER[16])
    without = load_library()
    for kind in ("fp32", "fp16"):
        logits = [in_blocks(run_by(lib, one, kind), ids, 5) for lib in (native, without)]
        assert torch.equal(*logits)
    rounded, whole = (in_blocks(run_by(lib, one, "bf16"), ids, 5) for lib in (native, without))
    error, of_weights = rounded - whole, whole - plain(one.hf, ids)
    assert 0 < error.square().mean() <= of_weights.square().mean()


@pytest.fixture
def margins(monkeypatch):
    """What lies behind all that the kernels write to."""
    found = []

    def floats(*shape):
        size = math.prod(shape)
        whole = torch.full((size + 2**16,), 7.0)
        found.append(whole[size:])
        return whole[:size].view(shape)

    monkeypatch.setattr(compiled, "_floats", floats)
    return found


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_nothing_is_written_where_there_is_no_room(saved, margins, kind):
    """A rollout's later passes may share by threads what its first, of more rows, did not."""
    many = {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 256}
    more = {"max_position_embeddings": 2048, "intermediate_size": 71}
    one = saved("llama-32-heads", "Llama", many | more)
    model = load_as(one, kind)
    cache = model.new_cache(3, 2048)
    for slot, length in enumerate((1100, 7, 130)):
        prefill(model, cache, slot, text(length))

    def tightly(run, batch, rows, *more):
        model._scratch, model._room = compiled._floats(0), None
        positions = torch.tensor(cache.lengths[:batch])[:, None] + torch.arange(rows)
        run(torch.ones(batch, rows, dtype=torch.int64), positions, cache, range(batch), *more)

    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for batch, rows in [(1, 1), (1, 2), (3, 5), (3, 6), (1, 17), (1, 130)]:
            tightly(model.forward, batch, rows)
        for batch, rows in [(1, 1), (1, 2), (3, 6)]:
            tightly(model.rollout, batch, rows, [rows - 1] * batch, [3] * batch)
            for slot in range(batch):
                cache.truncate(slot, (1100, 7, 130)[slot])
    assert len(margins) > 20
    assert all((margin == 7).all() for margin in margins)


# --- formats --------------------------------------------------------------------------------


def test_weights_are_kept_in_the_narrowest_format_that_holds_them():
    weight = torch.randn(70, 30, generator=torch.Generator().manual_seed(0))
    assert narrowest(weight).dtype == torch.float32
    assert narrowest(weight.bfloat16().float()).dtype == torch.bfloat16
    assert narrowest(weight.half().float()).dtype == torch.float16
    assert narrowest(weight.half()).dtype == torch.float16
    assert narrowest(torch.tensor([[1 + 2**-10, 70000.0]])).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 64, 100, 150])
def test_blocks_hold_every_weight_once(rows):
    weight = torch.arange(1, rows * 3 + 1).view(rows, 3)
    for packed in (blocks(weight), paired_blocks(weight)):
        assert packed.numel() == -(-rows // 64) * 64 * 3
        assert sorted(packed[packed > 0].tolist()) == weight.flatten().tolist()
    assert blocks(weight)[0, 2, 0] == weight[0, 2]
    paired = paired_blocks(F.pad(weight, (0, 0, 0, 64)))
    assert paired[0, 1, 5].tolist() == [F.pad(weight, (0, 0, 0, 64))[i, 1] for i in (5, 37)]


def test_two_matrices_by_turns():
    first, second = torch.arange(40), 100 + torch.arange(40)
    joined = by_turns([first, second])
    assert joined[:32].tolist() == list(range(32))
    assert joined[32:64].tolist() == list(range(100, 132))
    assert joined[64:72].tolist() == list(range(32, 40))
    assert joined[96:104].tolist() == list(range(132, 140))


def test_a_bf16_checkpoint_in_fp32_takes_half_the_memory(saved, tmp_path):
    one = saved("qwen3")
    copy.deepcopy(one.hf).bfloat16().save_pretrained(tmp_path)
    full, half = one.load(), load_model(inspect_checkpoint(tmp_path), "fp32", "cpu", compile=True)
    assert half.dtype == torch.float32
    assert half.weight_bytes < 0.55 * full.weight_bytes


# --- quantised ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("size", [(9, 64), (64, 100), (5, 7)])
def test_quantised_weights_are_within_half_a_step(name, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    how = QUANTIZATIONS[name]
    made = Quantized.of(weight, how)
    most = 2 ** (how.bits - 1) - 1
    assert made.values.abs().max() == most
    step = made.scales.repeat_interleave(made.group, 1)[:, : size[1]]
    assert ((made.weight() - weight).abs() <= 0.5001 * step).all()
    assert torch.equal(made.weight()[0], torch.zeros(size[1]))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("compile", [True, False], ids=["compiled", "lean"])
@pytest.mark.parametrize("name", [*LEAN, "wide"])
def test_a_quantised_model_is_the_model_of_the_rounded_weights(
    saved, wide, name, compile, quantize, tmp_path
):
    one = wide if name == "wide" else saved(name)
    how, vocabulary = QUANTIZATIONS[quantize], one.hf.config.vocab_size
    ids = text(40, vocabulary)
    source = inspect_checkpoint(one.folder)
    model = load_model(source, "fp32", "cpu", compile=compile, quantize=quantize)
    assert isinstance(model, CompiledDecoder if compile else LeanDecoder)
    rounded = type(one.hf)(one.hf.config).float().eval()
    rounded.load_state_dict(one.hf.state_dict())
    head = rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.clone())  # untied
    with torch.no_grad():
        for parameter in rounded.model.layers.parameters():
            if parameter.dim() == 2:
                parameter.copy_(Quantized.of(parameter, how).weight())
        head.copy_(Quantized.of(head, how.of_head).weight())
    logits = in_blocks(model, ids, 5)
    bound = 3e-3 if compile else 2e-4  # compiled, inputs are rounded to 16 bits
    assert (logits - plain(rounded, ids)).abs().max() <= bound
    assert (logits - plain(one.hf, ids)).abs().max() > 5 * bound


@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_what_is_not_a_number_is_not_rounded_to_one(saved, kind, odd):
    one = saved(f"llama-{odd}-{kind}", *LEAN["llama2"])
    file = one.folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][5, 3] = odd
    save_file(weights, file, {"format": "pt"})
    model = load_as(one, kind)
    logits = in_blocks(model, [4, 7, 5], 1)
    assert logits[:2].isfinite().all()
    assert logits[2].isnan().all()


def test_fewer_bits_take_less_memory(wide):
    sizes = [wide.load("fp32", quantize=q).weight_bytes for q in (None, "int8", "int4")]
    matrices = sizes[0] - 4 * 150 * 320
    assert sizes[1] < 0.3 * matrices + 4 * 150 * 320
    assert sizes[2] < sizes[1]


def test_what_is_not_a_quantization(saved):
    with pytest.raises(OptionError, match="unknown quantization 'int2': use int8 or int4"):
        saved("qwen3").load("fp32", quantize="int2")


# --- compiling ------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() {{ return {}; }}'


@pytest.fixture
def small_sources(tmp_path):
    """Kernels that compile at once."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "step.cpp").write_text(ANSWER.format(42))
    return folder


def test_compiled_once_and_kept(empty_cache, small_sources):
    waited = []
    for _ in range(2):
        library = load_library(small_sources, lambda: waited.append(1))
        assert library.answer() == 42
    assert waited == [1]
    (small_sources / "step.cpp").write_text(ANSWER.format(43))
    assert load_library(small_sources, lambda: waited.append(2)).answer() == 43
    assert waited == [1, 2]
    assert len(list(empty_cache.glob("*.so"))) == 2


def test_a_damaged_library_is_made_again(empty_cache, small_sources):
    empty_cache.mkdir()
    name = compiler._digest(small_sources, compiler._find_compiler())
    (empty_cache / f"kernels-{name}.so").write_bytes(b"torn")
    assert load_library(small_sources).answer() == 42


def test_sources_that_do_not_compile(empty_cache, small_sources):
    (small_sources / "step.cpp").write_text("int main() { retrun; }")
    with pytest.raises(
        CompilerError, match=r"cannot compile the kernels \(.*retrun.*compile=False"
    ):
        load_library(small_sources)
    assert not list(empty_cache.glob("*.so"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CXX": "no-such-compiler"}, r"no C\+\+ compiler \(no-such-compiler\): install one"),
        ({"CXX": "false"}, "does not run"),
        ({"CXX": "true"}, "cannot be compiled into"),
        ({"OUTPACE_CACHE": "/dev/null/cache"}, "name another folder in OUTPACE_CACHE"),
    ],
)
def test_without_a_compiler(saved, empty_cache, monkeypatch, variables, message):
    """Asked for, it is an error before weights are read; else the lean decoder does the work."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    source = inspect_checkpoint(saved("qwen3").folder)
    with monkeypatch.context() as unread:
        unread.setattr(type(source.weights), "load", None)
        with pytest.raises(CompilerError, match=message):
            load_model(source, "fp32", "cpu", compile=True)
    with pytest.warns(RuntimeWarning, match=message):
        assert isinstance(load_model(source, "fp32", "cpu"), LeanDecoder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(load_model(source, "fp32", "cpu", compile=False), LeanDecoder)


def test_by_default_what_can_be_compiled_is(saved):
    assert isinstance(
        load_model(inspect_checkpoint(saved("qwen3").folder), "fp32"), CompiledDecoder
    )


def test_what_cannot_be_compiled_or_quantised(checkpoint):
    gpt2 = inspect_checkpoint(checkpoint("gpt2").folder)
    with pytest.raises(OptionError, match=r"compile=True is for the Llama family, and .* is not"):
        load_model(gpt2, "fp32", "cpu", compile=True)
    with pytest.raises(OptionError, match="quantize is for the Llama family"):
        load_model(gpt2, "fp32", "cpu", quantize="int8")
    with pytest.raises(OptionError, match="compile must be True, False or 'auto', not 'yes'"):
        load_model(gpt2, "fp32", "cpu", compile="yes")


def test_a_wrong_choice_is_named_before_anything_is_looked_up():
    with pytest.raises(OptionError, match="compile must be True, False or 'auto', not 'yes'"):
        outpace.load("/no/such/folder", compile="yes")


# --- several steps in one call --------------------------------------------------------------


class StepByStep:
    """The same model, asked for one pass at a time."""

    def __init__(self, model):
        self.forward, self.new_cache = model.forward, model.new_cache
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.device, self.dtype = model.device, model.dtype


def draft_with(model, library, temperatures, texts, budgets, cut=(), races=False, **filters):
    """A draft, what the cache then holds, and a second draft behind what was kept of it."""
    drafter = ModelDrafter(model)
    drafter.start(model, model.new_cache(4, model.context_length))
    slots = [3, 0, 2][: len(texts)]
    params = [SamplingParams(temperature=t, max_new_tokens=9, **filters) for t in temperatures]
    warp = Warp(params, model.vocab_size, torch.device("cpu"), library)
    uniforms = torch.rand(len(texts), 5, generator=torch.Generator().manual_seed(1)).double()
    keys = Keys(torch.tensor([5, -(2**63), 2**60]), torch.tensor([9, 2**33, 3]))
    noise = DraftNoise(keys=keys.select(slice(len(texts)))) if races else DraftNoise(uniforms)
    for slot, ids in zip(slots, texts, strict=True):
        drafter.open(Context(slot, ids))
    made = []
    for _ in range(2):
        contexts = [Context(s, ids) for s, ids in zip(slots, texts, strict=True)]
        draft = drafter.draft(contexts, budgets, warp, noise)
        made.append((draft, [drafter._cache.lengths[s] for s in slots]))
        kept = [min(b, c) for b, c in zip(budgets, cut, strict=True)]
        texts = [[*ids, *draft.tokens[i, : kept[i]].tolist(), 7] for i, ids in enumerate(texts)]
        drafter.observe([Commit(s, range(k)) for s, k in zip(slots, kept, strict=True)])
    return made


@pytest.mark.parametrize("temperatures", [(0.0,), (0.8,), (0.0, 0.9, 1.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("budgets", [(5, 5, 5), (1, 5, 3), (2, 1, 1)])
@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}])
def test_a_rollout_is_its_steps(saved, temperatures, budgets, races, filters):
    """After full acceptance the cache lacks a token: then the first pass has two rows."""
    model = saved("llama-tied-gqa").load()
    texts = [text(20), text(60, seed=1), text(33, seed=2)][: len(temperatures)]
    given = model.library, temperatures, texts, budgets[: len(texts)], (5, 2, 0)[: len(texts)]
    rolled = draft_with(model, *given, races=races, **filters)
    stepped = draft_with(StepByStep(model), *given, races=races, **filters)
    for (a, held), (b, also_held) in zip(rolled, stepped, strict=True):
        assert held == also_held
        for i, tree in enumerate(a.trees):
            assert torch.equal(a.tokens[i, : len(tree)], b.tokens[i, : len(tree)])
        assert type(a.law) is type(b.law)
        if isinstance(a.law, Rows):
            for i, tree in enumerate(a.trees):
                assert torch.equal(a.law.q[i, : len(tree)], b.law.q[i, : len(tree)])


@pytest.mark.parametrize("start", [250, 120, 124])
def test_a_rollout_where_the_cache_grows_and_where_the_context_ends(saved, start):
    ends = {"max_position_embeddings": 512 if start > 128 else 128}
    kind, options = LEAN["llama-tied-gqa"]
    model = saved(f"llama-tied-gqa-{start}", kind, options | ends).load()
    given = model.library, (0.8,), [text(start)], (5,), (5,)
    rolled, stepped = draft_with(model, *given), draft_with(StepByStep(model), *given)
    for (a, held), (b, also_held) in zip(rolled, stepped, strict=True):
        assert (held, a.trees) == (also_held, b.trees)
        assert torch.equal(a.tokens, b.tokens)


def test_a_rollout_is_used_and_can_differ(saved, monkeypatch):
    """The control: with other noise the steps draw other tokens."""
    model = saved("llama-tied-gqa").load()
    calls, rollout = [], type(model).rollout

    def shifted(self, *args):
        calls.append(args)
        *others, noise, states = args
        return rollout(self, *others, DraftNoise(noise.uniforms.flip(1)), states)

    monkeypatch.setattr(type(model), "rollout", shifted)
    given = model.library, (1.0,), [text(20)], (5,), (5,)
    rolled, stepped = draft_with(model, *given), draft_with(StepByStep(model), *given)
    assert len(calls) == 2
    assert not torch.equal(rolled[0][0].tokens, stepped[0][0].tokens)


def test_a_rollout_goes_through_filters(saved):
    model = saved("llama-tied-gqa").load()
    drafter = ModelDrafter(model)
    drafter.start(model, model.new_cache(1, 128))
    drafter.open(Context(0, text(9)))
    params = SamplingParams(temperature=1.0, top_k=1)
    warp = Warp([params], model.vocab_size, torch.device("cpu"), model.library)
    draft = drafter.draft([Context(0, text(9))], [4], warp, DraftNoise(torch.rand(1, 4).double()))
    assert draft.tokens[0].tolist() == greedy(model, text(9), 4)
