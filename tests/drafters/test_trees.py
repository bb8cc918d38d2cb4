"""Trees of draft models: their caches after every outcome, and texts that no tree shows in."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

import outpace
from checkpoints import build
from conformance_cases import growing, tli
from outpace import SamplingParams
from outpace.drafters import (
    CascadeDrafter,
    Commit,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    QuantizedDrafter,
    SkipDrafter,
)
from outpace.engine import Engine
from outpace.errors import CompilerError
from outpace.kernels import load_library
from outpace.models import MarkovModel
from outpace.models.compiled import CompiledDecoder
from outpace.models.config import LeanConfig
from outpace.models.lean import LeanDecoder
from outpace.trees import parse_tree
from outpace.types import Shape
from outpace.verifiers import make_verifier

V = 12
MARKOV = MarkovModel.random(V, 2, 0, sharpness=2)
NEAR = MarkovModel(0.7 * MARKOV.table + 0.3 * MarkovModel.random(V, 2, 1).table)
LLAMA = build("Llama", {"vocab_size": V, "num_key_value_heads": 2, "num_hidden_layers": 3})
NOISY = copy.deepcopy(LLAMA)
torch.manual_seed(1)
with torch.no_grad():
    for parameter in NOISY.parameters():
        parameter.mul_(1 + 0.1 * torch.randn_like(parameter))

TREES = ["2x2x1", "[[0,0,0],[0,1],[1],[2]]", "chains:2,3,with", "2x2:draw=top", "dynamic:6,2,3,3"]
REQUESTS = [
    ([(5 * i + j) % V for j in range(1 + 7 * i)], {"max_new_tokens": 24 - 3 * i}) for i in range(5)
]


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    try:
        load_library()
    except CompilerError as error:
        pytest.skip(str(error))


def decoder(model, kind: str):
    config, weights = LeanConfig.read(model.config.to_dict()), dict(model.state_dict())
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    runner = LeanDecoder if kind == "lean" else CompiledDecoder
    return runner(config, lambda name: weights[name].to(dtype))


def pairs(kind: str):
    """A target, and a draft near it."""
    if kind == "markov":
        return MARKOV, NEAR
    return decoder(LLAMA, kind), decoder(NOISY, kind)


def run(engine: Engine, requests=REQUESTS, **options) -> list[list[int]]:
    submitted = [
        engine.submit(prompt, SamplingParams(**({"seed": i, "eos_token_ids": ()} | options | own)))
        for i, (prompt, own) in enumerate(requests)
    ]
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


def plainly(target) -> Engine:
    """Plain decoding, whose seeded texts are those by match."""
    return Engine(target, verifier=make_verifier("match"))


# --- the cache --------------------------------------------------------------------------------


class Watch:
    """Holds what a drafter reads behind each context against a fresh read of the whole.

    Attributes:
        outcomes: what rounds kept, and whether the path ended at a leaf.
    """

    def __init__(self, engine: Engine, exact: bool = True) -> None:
        self.drafter, self.target, self.exact = engine.drafter, engine.target, exact
        self.outcomes: Counter[tuple[int, bool]] = Counter()
        self._texts: list[list[int]] = []
        self._catch_up, self._grow = self.drafter._catch_up, self.drafter._grow
        self._observe = self.drafter.observe
        self._missing: dict[int, int] = {}
        self._own = self.drafter._cache is not engine._cache
        self.drafter._catch_up, self.drafter._grow = self.catch_up, self.grow
        self.drafter.observe = self.observe
        self._open, self.drafter.open = self.drafter.open, self.open

    def fresh(self, ids: list[int]) -> torch.Tensor:
        """Logits behind a text, by a cache of its own."""
        reads = self.drafter.model if self._own else self.target
        cache = reads.new_cache(1, 512)
        for at, token in enumerate(ids[:-1]):
            reads.forward(torch.tensor([[token]]), torch.tensor([[at]]), cache, [0])
            cache.commit(0, (0,))
        last = torch.tensor([ids[-1:]]), torch.tensor([[len(ids) - 1]])
        return self.drafter.model.forward(*last, cache, [0]).logits[0, 0].clone()

    def open(self, context, *args):
        self._missing.pop(context.slot, None)
        self._open(context, *args)

    def grow(self, contexts, *args):
        self._texts = [list(c.tokens) for c in contexts]
        return self._grow(contexts, *args)

    def catch_up(self, missing, block, positions, slots):
        out = self._catch_up(missing, block, positions, slots)
        for b, (slot, ids) in enumerate(zip(slots, self._texts, strict=True)):
            assert len(missing[b]) == self._missing.pop(slot, len(missing[b]))
            near = {"rtol": 0, "atol": 0 if self.exact else 1e-4}
            torch.testing.assert_close(out.logits[b, 0], self.fresh(ids), **near)
        return out

    def observe(self, commits):
        read = {c.slot: self.drafter._grown.get(c.slot) for c in commits}
        self._observe(commits)
        for c in commits:
            leaf = bool(c.path) and read[c.slot] is not None and read[c.slot][c.path[-1]] < 0
            self.outcomes[len(c.path), leaf] += 1
            if self._own:
                self._missing[c.slot] = 1 + leaf


def watched(drafter, target, verifier: str, exact: bool = True) -> Watch:
    engine = Engine(target, drafter, None, make_verifier(verifier), 3)
    watch = Watch(engine, exact)
    requests = [(prompt, {"max_new_tokens": 60 - 9 * i}) for i, (prompt, _) in enumerate(REQUESTS)]
    run(engine, requests, temperature=1.0)
    return watch


@pytest.mark.parametrize(
    ("kind", "tree"), [*itertools.product(["markov", "fp32", "bf16"], TREES), ("lean", "2x2x1")]
)
def test_the_cache_is_that_of_a_drafter_that_has_just_read_the_text(kind, tree):
    """After every outcome, in ragged batches; nothing is read twice but a leaf that was kept."""
    target, draft = pairs(kind)
    verifier = "kseq" if "with" in tree else "traversal"
    watch = watched(ModelDrafter(draft, tree=parse_tree(tree)), target, verifier, kind != "lean")
    kept = {count for count, _ in watch.outcomes}
    assert len(kept) > 2
    assert {leaf for _, leaf in watch.outcomes} == {True, False}


OWN = {
    "early exit": lambda: EarlyExitDrafter(2),
    "skip": lambda: SkipDrafter("1"),
    "int4": lambda: QuantizedDrafter("int4"),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("tree", ["2x2x1", "dynamic:6,3,3,3"])
def test_drafts_on_the_targets_own_cache_leave_it_as_it_was(name, tree):
    """What a tree has written behind it is never seen again."""
    target = decoder(LLAMA, "fp32")
    drafter = growing(OWN[name](), parse_tree(tree))
    watch = watched(drafter, target, "token")
    assert watch.outcomes.total() > 10


def keeps_a_row_more(monkeypatch):
    honest = ModelDrafter._kept

    def broken(self, commit):
        rows = honest(self, commit)
        return [*rows, rows[-1] + 1] if rows else [0]

    monkeypatch.setattr(ModelDrafter, "_kept", broken)


def keeps_a_row_less(monkeypatch):
    honest = ModelDrafter._kept
    monkeypatch.setattr(ModelDrafter, "_kept", lambda self, commit: honest(self, commit)[:-1])


def keeps_the_first_rows(monkeypatch):
    honest = ModelDrafter._kept

    def broken(self, commit):
        return list(range(len(honest(self, commit))))

    monkeypatch.setattr(ModelDrafter, "_kept", broken)


def positions_by_number(monkeypatch):
    honest = ModelDrafter._read

    def broken(self, block, slots):
        numbers = torch.arange(1, block.depths.shape[1] + 1).expand_as(block.depths)
        return honest(self, replace(block, depths=numbers), slots)

    monkeypatch.setattr(ModelDrafter, "_read", broken)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("markov", keeps_a_row_more),
        ("markov", keeps_a_row_less),
        ("markov", keeps_the_first_rows),
        ("fp32", keeps_a_row_more),
        ("fp32", keeps_the_first_rows),
        ("fp32", positions_by_number),
    ],
)
def test_a_cache_that_is_wrong_in_one_place_is_found(monkeypatch, kind, broken):
    target, draft = pairs(kind)
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        watched(ModelDrafter(draft, tree=parse_tree("2x2x1")), target, "token")


def test_a_round_that_is_dropped_leaves_no_trace():
    engine = Engine(MARKOV, ModelDrafter(NEAR, tree=parse_tree("2x2x1")), None, max_batch=2)
    watch = Watch(engine)
    requests = [
        engine.submit(prompt, SamplingParams(temperature=1.0, seed=i, max_new_tokens=9))
        for i, (prompt, _) in enumerate(REQUESTS[:2])
    ]
    engine.step()
    first = engine.draft(requests)
    engine.drafter.observe([Commit(r.place, ()) for r in requests])
    again = engine.draft(requests)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.law.q, again.law.q)
    engine.drafter.observe([Commit(r.place, ()) for r in requests])
    while engine.busy:
        engine.step()
    assert watch.outcomes[0, False] >= 4


# --- texts ------------------------------------------------------------------------------------

DRAFTERS = {
    "near": lambda: ModelDrafter(NEAR),
    "narrow": lambda: ModelDrafter(MarkovModel.random(V - 3, 1, 2)),
    "wide": lambda: ModelDrafter(MarkovModel.random(V + 3, 1, 2)),
    "cascade": lambda: CascadeDrafter([NgramDrafter(1, 2), ModelDrafter(NEAR)]),
}
SHAPED = [
    {},
    {"repetition_penalty": 1.5, "no_repeat_ngram": 3},
    {"top_k": 2, "presence_penalty": 0.5, "transform_draft": False},
    {"bad_words": [(3,), (1, 4)], "logit_bias": {0: 1.0}, "top_p": 0.9},
    {"min_new_tokens": 5, "eos_token_ids": (2,)},
]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("tree", [*TREES, "14x2"])
def test_texts_are_plain_decodings(drafter, tree):
    """By match and at temperature 0, in ragged batches, behind every transform; a level may be
    wider than a vocabulary."""
    for options in SHAPED:
        for temperature in (0.0, 1.0):
            plain = run(plainly(MARKOV), temperature=temperature, **options)
            made = growing(DRAFTERS[drafter](), parse_tree(tree, "top"))
            engine = Engine(MARKOV, made, None, make_verifier("match"), 3)
            assert run(engine, temperature=temperature, **options) == plain
            assert engine.stats.accepted > 0


def test_texts_by_coupled_draws_do_not_depend_on_the_tree():
    plain = run(Engine(MARKOV, None, 0, make_verifier("coupled")), temperature=1.0)
    for drafter in DRAFTERS:
        for tree in [None, *(t for t in TREES if "with" not in t)]:
            made = DRAFTERS[drafter]()
            if tree is not None:
                growing(made, parse_tree(tree))
            engine = Engine(MARKOV, made, None, make_verifier("coupled"), 3)
            assert run(engine, temperature=1.0) == plain
            assert engine.stats.accepted > 0


def test_common_tokens_grow_trees_in_the_drafts_own_words():
    """By intersection; its cache holds what was kept, in its own tokens."""
    target = MarkovModel.random(4, 2, 0)
    prompts = [([1, 0, 2, 3][: 1 + i % 4], {"max_new_tokens": 20 - i}) for i in range(6)]
    plain = run(plainly(target), prompts, temperature=1.0)
    for tree in ("2x2x1", "chains:2,2,with", "dynamic:5,3,2,2", "chain:3"):
        drafter = growing(tli(), parse_tree(tree))
        engine = Engine(target, drafter, None, make_verifier("match"), 3)
        step = engine.step

        def checked(drafter=drafter, step=step, engine=engine):
            ran = step()
            for request in engine.running:
                held = drafter._held[request.place]
                length = drafter._cache.lengths[request.place]
                assert drafter._cache.storage[0][request.place, :length].tolist() == held[:length]
            return ran

        engine.step = checked
        assert run(engine, prompts, temperature=1.0) == plain
        assert engine.stats.accepted > 0


@pytest.mark.parametrize("tree", TREES)
def test_a_context_that_is_nearly_full_cuts_trees(tree):
    """The target's, and the draft's, which then stays silent."""
    for own, other in ((32, 4096), (4096, 20)):
        target = MarkovModel(MARKOV.table, own)
        drafter = ModelDrafter(MarkovModel(NEAR.table, other), tree=parse_tree(tree))
        options = {"temperature": 1.0, "on_context_full": "stop"}
        requests = [(prompt, {"max_new_tokens": 40}) for prompt, _ in REQUESTS]
        engine = Engine(target, drafter, None, make_verifier("match"), 3)
        steps = []
        draft = drafter.draft

        def seen(contexts, budgets, *rest, draft=draft, steps=steps):
            made = draft(contexts, budgets, *rest)
            for budget, shape in zip(budgets, made.trees, strict=True):
                steps.append(shape.depth)
                assert steps[-1] <= budget
            return made

        drafter.draft = seen
        assert run(engine, requests, **options) == run(plainly(target), requests, **options)
        assert {0, 1} <= set(steps) if other < own else {1, 2} <= set(steps)


def test_constraints_hold_and_texts_are_plain_decodings(pair):
    """Of JSON and by a regular expression, whose states follow the tree."""
    target, draft = str(pair / "target"), str(pair / "draft")
    plain = outpace.load(target, None, verifier="match", dtype="float32")
    constraints = ({"regex": "(ab|cd)+[0-9]{2}"}, {"json_schema": {"type": "object"}})
    for tree in ("3x2", "dynamic:8,3,3,3"):
        fast = outpace.load(target, draft, tree=tree, verifier="match", dtype="float32")
        for options in constraints:
            for temperature in (0.0, 1.0):
                given = {"temperature": temperature, "max_new_tokens": 16, "seed": [1, 2]} | options
                texts = [g.generate(["x", "def f"], **given) for g in (plain, fast)]
                assert [r.token_ids for r in texts[0]] == [r.token_ids for r in texts[1]]
                if "regex" in options:
                    assert all(re.match("(ab|cd)", r.text) for r in texts[1])
        assert fast.engine.stats.accepted > 0


def test_a_tree_of_one_branch_is_drawn_as_a_chain():
    """Whatever it is called; by the law that the drafter has declared."""
    chain = run(Engine(MARKOV, ModelDrafter(NEAR), 3, make_verifier("token")), temperature=1.0)
    for tree in ("chain:3", "1x1x1", "chains:1,3", "chain:3,with"):
        drafter = ModelDrafter(NEAR, tree=parse_tree(tree))
        assert drafter.proposes is Shape.CHAIN
        engine = Engine(MARKOV, drafter, None, make_verifier("token"))
        assert run(engine, temperature=1.0) == chain


def test_a_slot_that_is_opened_anew_knows_nothing_of_the_tree_before():
    for make in (lambda: ModelDrafter(NEAR), tli):
        drafter = growing(make())
        engine = Engine(MARKOV if make is not tli else MarkovModel.random(4, 2, 0), drafter, None)
        request = engine.submit([1], SamplingParams(temperature=1.0, seed=0, max_new_tokens=3))
        engine.step()
        if request.finish_reason is None:
            engine.draft([request])
            assert drafter._grown
        engine.cancel(request)
        assert not drafter._grown
