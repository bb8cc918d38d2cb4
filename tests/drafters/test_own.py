"""Drafting with the target's own layers: nothing runs twice, nothing is left behind, same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outpace
from checkpoints import build
from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    Context,
    EarlyExitDrafter,
    NgramDrafter,
    QuantizedDrafter,
    Setting,
    SkipDrafter,
)
from outpace.drafters.early_exit import read_adapter
from outpace.engine import Engine
from outpace.engine.control import Controller, Pick
from outpace.models import MarkovModel
from outpace.models.base import Adapter
from outpace.models.compiled import CompiledDecoder
from outpace.models.config import LeanConfig
from outpace.models.graphs import GraphedDecoder
from outpace.models.lean import LeanDecoder
from outpace.models.loading import inspect_checkpoint, load_tokenizer
from outpace.models.quantize import QUANTIZATIONS
from outpace.training.exits import write_adapter
from outpace.trees import block_positions, chain
from outpace.types import Resume
from tape import Recorder

LAYERS = 5
MODEL = build("Qwen3", {"num_key_value_heads": 2, "head_dim": 24, "num_hidden_layers": LAYERS})
for layer in MODEL.model.layers[1:]:  # so that a part agrees with the whole, often and not always
    layer.self_attn.o_proj.weight.data *= 0.1
    layer.mlp.down_proj.weight.data *= 0.1
WEIGHTS = dict(MODEL.state_dict())
CONFIG = LeanConfig.read(MODEL.config.to_dict())


@pytest.fixture(autouse=True)
def _argmax_that_a_tape_hears(monkeypatch):
    monkeypatch.setattr("outpace.models.base.argmax", lambda x: x.argmax(-1))


def decoder(kind: str):
    if kind == "compiled":
        return CompiledDecoder(CONFIG, WEIGHTS.__getitem__)
    lean = LeanDecoder(CONFIG, WEIGHTS.__getitem__)
    return GraphedDecoder(lean, Recorder()) if kind == "graphed" else lean


KINDS = ["compiled", "lean"]
ALL = [*KINDS, "graphed"]
PROMPTS = [[(7 * i * n + 3) % 97 for i in range(n)] for n in (1, 4, 9, 2, 30, 17, 6, 3)]


def params(**options) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 24, "eos_token_ids": ()} | options))


def run(engine: Engine, **options) -> list[list[int]]:
    requests = [
        engine.submit(p, params(seed=i, **options) if i % 3 else params(seed=i, max_new_tokens=9))
        for i, p in enumerate(PROMPTS)
    ]
    while engine.busy:
        engine.step()
    return [r.emitted for r in requests]


def adapter(scale: float = 0.05) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    hidden = CONFIG.hidden_size
    return Adapter(
        1 + 0.1 * torch.randn(hidden, generator=generator),
        scale * torch.randn(hidden, hidden, generator=generator),
    )


class Seen:
    """A target, and what its passes resumed from."""

    def __init__(self, target):
        self.target, self.resumed, self.whole = target, [], 0

    def __getattr__(self, name):
        return getattr(self.target, name)

    def forward(self, tokens, *args, logits=True, resume=None, **more):
        if resume is not None:
            self.resumed.append((resume.layer, tokens.shape))
        elif logits:
            self.whole += 1
        return self.target.forward(tokens, *args, logits=logits, resume=resume, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exit_", [1, 3])
def test_the_target_goes_on_behind_the_exit(kind, exit_):
    """Every pass over a draft begins there, with one row per drafted token and the root."""
    target = Seen(decoder(kind))
    engine = Engine(target, EarlyExitDrafter(exit_), 4, max_batch=1)
    plain = run(Engine(decoder(kind), max_batch=1))
    assert run(engine) == plain
    drafted = [shape for layer, shape in target.resumed if layer == exit_]
    assert len(drafted) == len(target.resumed) == engine.stats.drafted_rounds > 10
    assert sum(rows - 1 for _, rows in drafted) == engine.stats.draft_steps
    assert target.whole == engine.stats.rounds - engine.stats.drafted_rounds


@pytest.mark.parametrize("kind", ALL)
def test_an_exit_keeps_states_where_they_are_taken_up(kind):
    """A recorded pass is whole, so there the last drafted token need not be fed."""
    drafter = EarlyExitDrafter(3)
    target = Seen(decoder(kind))
    part, fed = target.part, []

    def counted(*args):
        made = part(*args)
        forward = made.forward

        def run(tokens, *more, **given):
            fed.append(tokens.shape[1])
            return forward(tokens, *more, **given)

        made.forward = run
        if hasattr(made, "rollout"):
            rollout = made.rollout

            def roll(*more):
                fed.extend([1] * (max(more[5]) + more[-1]))
                return rollout(*more)

            made.rollout = roll
        return made

    target.part = counted
    engine = Engine(target, drafter, 2, max_batch=1)
    run(engine)
    steps = engine.stats.draft_steps + (engine.stats.drafted_rounds if kind != "graphed" else 0)
    assert sum(fed) == steps
    assert bool(target.resumed) == (kind != "graphed")
    assert drafter.begun == (0.6 if kind != "graphed" else 0.0)


@pytest.mark.parametrize("kind", ALL)
def test_a_pass_that_goes_on_is_the_whole_pass(kind):
    """Logits, and the rows that it leaves in the cache; other states give others."""
    target, ids = decoder(kind), PROMPTS[4]
    cache = target.new_cache(1, 64)
    positions = block_positions([0], [chain(11)], 12)
    block = torch.tensor([ids[:12]])
    whole = target.forward(block, positions, cache, [0], taps=[2]).logits.clone()
    part = target.part(range(3))
    fresh = target.new_cache(1, 64)
    states = part.forward(block, positions, fresh, [0], taps=[2]).taps[0].clone()
    rest = target.forward(block, positions, fresh, [0], resume=Resume(3, states)).logits.clone()
    close = {"rtol": 0, "atol": 0 if kind == "compiled" else 1e-5}
    torch.testing.assert_close(rest, whole, **close)
    for cache_ in (cache, fresh):
        cache_.commit(0, range(12))
    after = [
        target.forward(torch.tensor([[5]]), torch.tensor([[12]]), c, [0]).logits.clone()
        for c in (cache, fresh)
    ]
    torch.testing.assert_close(*after, **close)
    wrong = target.forward(block, positions, fresh, [0], resume=Resume(3, states.flip(1))).logits
    assert (wrong - whole).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "drafter",
    [
        lambda: EarlyExitDrafter(2),
        lambda: SkipDrafter("1.3"),
        lambda: QuantizedDrafter("int8"),
        lambda: QuantizedDrafter("int4"),
    ],
    ids=["early exit", "skip", "int8", "int4"],
)
def test_texts_are_plain_decodings(kind, drafter):
    """Greedy and by match, under penalties as well, in ragged batches whose neighbours end."""
    made = drafter()
    if kind != "compiled" and isinstance(made, QuantizedDrafter):
        with pytest.raises(outpace.IncompatibleError, match="compiled kernels"):
            Engine(decoder(kind), made)
        return
    target = decoder(kind)
    rule = outpace.verifiers.MatchVerifier
    accepted = 0
    for options in ({}, {"temperature": 0.7}, {"temperature": 0.7, "repetition_penalty": 1.3}):
        for max_batch in (1, 5):
            engine = Engine(target, drafter(), 4, rule(), max_batch)
            plain = Engine(target, verifier=rule(), max_batch=1)
            assert run(engine, **options) == run(plain, **options)
            accepted += engine.stats.accepted
    assert accepted > 60


class Some(Controller):
    """Drafts for every second sequence."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.controller.members)
        engine.controller = engine._drafting.controller = self
        self.drafts = 0

    def rests(self, batch):
        return False

    def again(self, slots, budgets, late=()):
        each = zip(slots, budgets, strict=True)
        picks = [Pick(0, min(2, b)) if b and slot % 2 else None for slot, b in each]
        self.drafts += any(picks)
        return picks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_is_not_drafted_for_runs_along(kind, temperature, monkeypatch):
    """Else the pass would have begun for some, and be run as a whole for all of them."""
    plain = run(Engine(decoder(kind), max_batch=1), temperature=temperature)

    def begun() -> float:
        """In what share of the rounds in which somebody drafted."""
        target = Seen(decoder(kind))
        engine = Engine(target, EarlyExitDrafter(3), max_batch=4)
        control = Some(engine)
        assert run(engine, temperature=temperature) == plain
        assert control.drafts > 10
        return len(target.resumed) / control.drafts

    assert begun() == 1.0
    monkeypatch.setattr("outpace.engine.drafting.Drafting._for_all", lambda self, picks: None)
    assert begun() < 0.5


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("k", [4, 30])
@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_a_cache_that_grows_in_a_round_loses_no_layer(kind, k, penalty):
    """Ragged budgets, and texts beyond what a cache begins with."""
    long = [(7 * i) % 97 for i in range(233)]
    said = []
    for drafter in (None, EarlyExitDrafter(2)):
        engine = Engine(decoder(kind), drafter, k if drafter else 0, max_batch=2)
        requests = [
            engine.submit(prompt, params(max_new_tokens=new, repetition_penalty=penalty))
            for prompt, new in ((long, 3), (long[:4], 60), (long[:220], 50))
        ]
        while engine.busy:
            engine.step()
        said.append([r.emitted for r in requests])
    assert said[0] == said[1]
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("within", [False, True])
def test_a_drafter_serves_one_engine(within):
    """What it drafts for another would be of the wrong cache; a part of a cascade, too."""
    drafter = EarlyExitDrafter(2)
    Engine(decoder("compiled"), drafter, 3)
    second = CascadeDrafter([NgramDrafter(), drafter]) if within else drafter
    with pytest.raises(outpace.IncompatibleError, match="given to an engine already: make one"):
        Engine(decoder("compiled"), second, 3)


def test_fewer_bits_are_those_of_the_target_that_is_drafted_for():
    """Though weights were made of another one before."""
    drafter = QuantizedDrafter("int8")
    weights = {name: tensor.flip(0) for name, tensor in WEIGHTS.items()}
    drafter.build(CompiledDecoder(CONFIG, weights.__getitem__), lambda what, done, total: None)
    engine = Engine(decoder("compiled"), drafter, 3)
    assert run(engine) == run(Engine(decoder("compiled")))
    assert engine.stats.acceptance_rate > 0.8


def test_parts_share_what_they_can():
    target = decoder("compiled")
    for part in (target.part([0, 2]), target.part(range(2), adapter())):
        assert part._embedding is target._embedding
        assert {t.data_ptr() for t in target._kept} <= {t.data_ptr() for t in part._kept}
    small = target.quantized(QUANTIZATIONS["int4"])
    assert small._embedding is target._embedding
    assert small._model.norm == target._model.norm
    for mine, theirs in zip(small._layers, target._layers, strict=True):
        assert (mine.input_norm, mine.q_norm) == (theirs.input_norm, theirs.q_norm)
        assert mine.qkv.data != theirs.qkv.data
    assert small.weight_bytes < target.weight_bytes


def test_a_part_is_the_model_without_those_layers():
    """Against transformers with the layers taken out."""
    import copy

    ids = torch.tensor([PROMPTS[4]])
    for layers in ([0, 1, 2], [0, 2, 4], [3]):
        hf = copy.deepcopy(MODEL)
        hf.model.layers = torch.nn.ModuleList(MODEL.model.layers[i] for i in layers)
        with torch.inference_mode():
            expected = hf(input_ids=ids, use_cache=False).logits
        for kind in ALL:
            target = decoder(kind)
            part, cache = target.part(layers), target.new_cache(1, 64)
            got = part.forward(ids, torch.arange(30)[None], cache, [0]).logits
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ALL)
def test_an_adapter_adds_what_it_says(kind):
    target, made = decoder(kind), adapter()
    ids, positions = torch.tensor([PROMPTS[4]]), torch.arange(30)[None]
    part = target.part(range(2), made)
    out = part.forward(ids, positions, target.new_cache(1, 64), [0], taps=[1])
    h = out.taps[0]
    norm = torch.nn.functional.rms_norm
    bent = h + norm(h, h.shape[-1:], made.norm, CONFIG.norm_eps) @ made.weight.T
    last = norm(bent, h.shape[-1:], WEIGHTS["model.norm.weight"], CONFIG.norm_eps)
    torch.testing.assert_close(out.logits, last @ WEIGHTS["lm_head.weight"].T, rtol=0, atol=2e-4)
    without = target.part(range(2)).forward(ids, positions, target.new_cache(1, 64), [0]).logits
    assert (out.logits - without).abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_changes_drafts_and_no_text(kind, tmp_path):
    write_adapter(adapter(), tmp_path)
    plain = run(Engine(decoder(kind), max_batch=4))
    rates = []
    for folder in (None, str(tmp_path)):
        engine = Engine(decoder(kind), EarlyExitDrafter(2, folder), 3, max_batch=4)
        assert run(engine) == plain
        rates.append(engine.stats.acceptance_rate)
    assert rates[0] != rates[1]


def test_wrong_states_would_be_seen(monkeypatch):
    """Negative control: states of another layer."""
    honest = EarlyExitDrafter.draft

    def wrong(self, *args):
        draft = honest(self, *args)
        resume = draft.resume and replace(draft.resume, layer=draft.resume.layer + 1)
        return replace(draft, resume=resume)

    monkeypatch.setattr(EarlyExitDrafter, "draft", wrong)
    plain = run(Engine(decoder("compiled")))
    assert run(Engine(decoder("compiled"), EarlyExitDrafter(2), 3)) != plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_leaves_the_committed_cache_as_it_was(kind):
    target = decoder(kind)
    engine = Engine(target, EarlyExitDrafter(2), 4, max_batch=2)
    request = engine.submit(PROMPTS[4], params())
    engine.step()
    before = engine._cache.lengths.copy()
    held = [t.clone() for t in engine._cache.storage]
    context = Context(request.place, request.tokens)
    engine.drafter.draft([context], [4], engine.warp_of([request]), None)
    assert engine._cache.lengths == before
    n = before[request.place]
    if kind == "compiled":  # keys of 16 positions lie side by side
        n = n // 16 * 16
    for a, b in zip(held, engine._cache.storage, strict=True):
        if kind == "compiled":
            some = n // 16 if a.dim() == 5 else n
            assert torch.equal(a[request.place, :, :some], b[request.place, :, :some])
        else:
            assert torch.equal(a[request.place, :n], b[request.place, :n])


@pytest.mark.parametrize(
    "drafter", [EarlyExitDrafter(1), SkipDrafter("0"), QuantizedDrafter("int8")]
)
def test_a_model_without_layers_is_refused(drafter):
    with pytest.raises(outpace.IncompatibleError, match="'ngram', 'suffix' and 'recycling'"):
        Engine(MarkovModel.random(4, 1, 0), drafter)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_fewer_bits_are_refused_where_they_save_no_time(kind, pair):
    source = inspect_checkpoint(pair / "target")
    setting = Setting(source, load_tokenizer(source), torch.device("cuda"))
    with pytest.raises(outpace.IncompatibleError, match="no faster than the target itself on cuda"):
        QuantizedDrafter(kind).check(setting)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "has no adapter that can be read"),
        ({"norm.weight": torch.ones(4)}, "has no adapter that can be read"),
        (
            {"norm.weight": torch.ones(4), "proj.weight": torch.ones(4, 5)},
            r"proj.weight \[4, 5\] beside norm.weight \[4\]",
        ),
    ],
)
def test_what_is_no_adapter_is_refused(tmp_path, tensors, message):
    from safetensors.torch import save_file

    if tensors:
        save_file(tensors, tmp_path / "adapter.safetensors")
    with pytest.raises(outpace.CheckpointError, match=message):
        read_adapter(tmp_path)


def test_an_adapter_of_another_target_is_refused(tmp_path, pair):
    write_adapter(Adapter(torch.ones(7), torch.zeros(7, 7)), tmp_path)
    with pytest.raises(outpace.IncompatibleError, match="states of 7 numbers, the target's have"):
        outpace.load(str(pair / "target"), f"early-exit:1,{tmp_path}")
