"""What is measured of a draft's children: their chances by rank, and what follows for any tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from growing import rank_paths
from outpace import SamplingParams
from outpace.audit.enumeration import Drafted, round_law
from outpace.drafters import ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.errors import ContextLengthError, OptionError
from outpace.models import MarkovModel
from outpace.planner import acceptance
from outpace.planner.acceptance import Acceptance, accepted_by_rank, measure_acceptance
from outpace.trees import StaticBuilder, from_ranks, k_ary, paths_tree
from outpace.types import Draft, PointMass, Rows, Tree
from outpace.verifiers import TokenVerifier

EXACT = 1e-12
V = 5
TARGET = MarkovModel.random(V, 2, 0, sharpness=2)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * MarkovModel.random(V, 2, 1).table)
weights = st.lists(st.integers(0, 4), min_size=V, max_size=V).filter(any)


def row(given_weights) -> torch.Tensor:
    w = torch.tensor(given_weights, dtype=torch.float64)
    return w / w.sum()


def struck(q: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Rows of children that were drawn without replacement."""
    rows = []
    for j in range(len(tokens)):
        left = q.clone()
        left[tokens[:j]] = 0
        rows.append(left / left.sum() if left.any() else torch.eye(V).double()[tokens[j]])
    return torch.stack(rows)


def enumerated(p: torch.Tensor, tokens: list[int], q: torch.Tensor | None) -> list[float]:
    """The twin: how often token verification goes on behind each child."""
    tree = k_ary([len(tokens)])
    behind = torch.full((1, len(tokens) + 1, V), 1 / V, dtype=torch.float64)
    behind[0, 0] = p
    drafted = Drafted(
        torch.ones(1).double(), torch.tensor([tokens]), None if q is None else q[None], behind, tree
    )
    law = round_law(TokenVerifier(), [drafted])
    kept = {said[0]: 0.0 for said in law}
    for said, mass in law.items():
        kept[said[0]] += mass * (len(said) == 2)
    return [kept.get(token, 0.0) for token in tokens]


def check(p, q, order, drawn) -> None:
    tokens = order[:3]
    law = struck(q, tokens) if drawn else None
    draft = Draft(torch.tensor([tokens]), Rows(law[None]) if drawn else PointMass(), (k_ary([3]),))
    found = accepted_by_rank(p[None], draft)[0].tolist()
    assert found == pytest.approx(enumerated(p, tokens, law), abs=EXACT)


@settings(max_examples=25)
@given(weights, weights, st.permutations(range(V)), st.booleans())
def test_chances_by_rank_are_those_of_token_verification(p, q, order, drawn):
    check(row(p), row(q), order, drawn)


def test_chances_that_forget_what_was_rejected_are_found(monkeypatch):
    """The control: every child is held against p itself."""
    monkeypatch.setattr(acceptance, "residual", lambda left, q: left)
    with pytest.raises(AssertionError):
        check(row([3, 1, 2, 2, 1]), row([1, 2, 3, 1, 1]), [0, 1, 2, 3, 4], False)


# --- any tree on texts that were measured ----------------------------------------------------

TREES = [k_ary([1, 1]), k_ary([2, 2]), paths_tree(3, 2), from_ranks([[0, 0, 0], [0, 1], [2], [1]])]


@st.composite
def texts(draw, most=6):
    """Chances by rank along a text."""
    count = draw(st.integers(3, most))
    parts = [draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)) for _ in range(count)]
    return np.array([[x / max(1.0, sum(row)) for x in row] for row in parts])


def outcomes(text, tree: Tree, start: int) -> list[float]:
    """The twin: P(exactly so many are accepted) of a round, node by node."""
    depth = tree.depth
    law = [0.0] * (depth + 1)

    def go(node: int, at: int, mass: float, deep: int) -> None:
        family = [i for i, parent in enumerate(tree.parents) if parent == node]
        rest = mass
        for rank, child in enumerate(family):
            if at < len(text) and rank < text.shape[1]:
                here = mass * text[at][rank]
                rest -= here
                go(child, at + 1, here, deep + 1)
        law[deep] += rest

    go(-1, start, 1.0, 0)
    return law


def begins(text, tree: Tree) -> list[float]:
    """The twin: the chance that a round begins at each position."""
    found = [1.0, *[0.0] * (len(text) - 1)]
    for t in range(len(text)):
        for count, mass in enumerate(outcomes(text, tree, t)):
            if t + 1 + count < len(text):
                found[t + 1 + count] += found[t] * mass
    return found


@given(st.lists(texts(), min_size=1, max_size=2), st.sampled_from(TREES))
def test_expected_tokens_are_those_of_rounds_one_by_one(measured, tree):
    emitted = rounds = 0.0
    for text in measured:
        whole = [t for t in range(len(text)) if t + tree.depth <= len(text)]
        chances = begins(text, tree)
        for t in whole:
            law = outcomes(text, tree, t)
            emitted += chances[t] * sum((1 + n) * mass for n, mass in enumerate(law))
            rounds += chances[t]
    if not rounds:
        with pytest.raises(OptionError, match="no text was measured that is as long"):
            Acceptance(measured).expected_tokens(tree)
        return
    assert Acceptance(measured).expected_tokens(tree) == pytest.approx(emitted / rounds)


def come(text, tree: Tree | None, start: int, depth: int) -> float:
    """The twin: the chance that a round gets to where children of that depth are tried."""
    if tree is None:
        return float(np.prod([sum(text[start + d]) for d in range(depth)]))
    total = 0.0
    for node, path in [(-1, ()), *enumerate(rank_paths(tree))]:
        if len(path) == depth and node in tree.parents:
            total += float(np.prod([text[start + d][rank] for d, rank in enumerate(path)]))
    return total


@given(st.lists(texts(), min_size=1, max_size=2), st.sampled_from([None, *TREES]))
def test_rates_are_means_over_the_rounds_that_get_so_far(measured, tree):
    depth = 3
    weight, hits = np.zeros(depth), np.zeros((depth, 3))
    for text in measured:
        chances = [1.0] * len(text) if tree is None else begins(text, tree)
        for start, d in itertools.product(range(len(text)), range(depth)):
            if start + d < len(text):
                mass = chances[start] * come(text, tree, start, d)
                weight[d] += mass
                hits[d] += mass * text[start + d]
    known = list(itertools.takewhile(lambda d: weight[d] > 1e-300, range(depth)))
    found = Acceptance(measured).rates(depth, tree)
    for d in known:
        assert found[d] == pytest.approx((hits[d] / weight[d]).tolist())


def test_rates_from_where_no_round_begins_are_others():
    """The control."""
    text = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]] * 3)
    measured, tree = Acceptance([text]), k_ary([1])
    assert measured.rates(1) == [[0.5, 0.0]]
    assert measured.rates(1, tree) == [[1.0, 0.0]]


# --- engines ---------------------------------------------------------------------------------


def by_rounds(tree: Tree, prompt: list[int], count: int) -> list[tuple[int, int]]:
    """Where each round of a greedy request begins, and what it emits."""
    drafter = ModelDrafter(NEAR, tree=StaticBuilder(tree, "top"))
    engine = Engine(TARGET, drafter, None)
    request = engine.submit(prompt, SamplingParams(max_new_tokens=count, eos_token_ids=()))
    found = []
    while engine.busy:
        before = len(request.emitted)
        engine.step()
        found.append((before, len(request.emitted) - before))
    return found


@pytest.mark.parametrize("tree", TREES)
def test_a_greedy_text_is_replayed_round_by_round(tree):
    """Tokens per pass of a real run, without running it."""
    count, prompts = 60, [[1], [2, 0], [3, 3, 1]]
    engine = Engine(TARGET, ModelDrafter(NEAR), max_batch=2)
    measured = measure_acceptance(
        engine, prompts, temperature=0.0, draw="top", tokens=count, count=3
    )
    emitted = rounds = 0
    for prompt in prompts:
        for start, tokens in by_rounds(tree, prompt, count + 1):
            if start + tree.depth <= count:
                emitted, rounds = emitted + tokens, rounds + 1
    assert measured.expected_tokens(tree) == pytest.approx(emitted / rounds, abs=EXACT)
    assert emitted / rounds > 1.2


def test_what_is_measured_are_the_targets_own_texts():
    """One token per round by the target's own noise, and nothing stays behind."""
    engine = Engine(TARGET, ModelDrafter(NEAR), max_batch=2)
    drafter, rule, k = engine.drafter, engine.verifier, engine.k
    held = dict(vars(drafter))
    for draw in ("without", "top", "with"):
        measured = measure_acceptance(
            engine, [[1], [2, 0]], temperature=0.7, draw=draw, tokens=30, count=9
        )
        assert [t.shape for t in measured.texts] == [(30, V)] * 2
        assert all(((t >= 0).all() and (t.sum(1) <= 1 + EXACT).all()) for t in measured.texts)
    assert (engine.drafter, engine.verifier, engine.k) == (drafter, rule, k)
    assert (drafter.builder, drafter.laws) == (None, held.get("laws", ModelDrafter.laws))
    assert not engine.busy


def test_who_cannot_be_measured_is_told():
    options = {"temperature": 0.0, "draw": "top"}
    busy = Engine(TARGET, ModelDrafter(NEAR))
    busy.submit([1], SamplingParams())
    with pytest.raises(OptionError, match="the engine is busy: measure when"):
        measure_acceptance(busy, [[1]], **options)
    for drafter in (None, NgramDrafter(1)):
        with pytest.raises(OptionError, match="with a drafter that runs a model: give one"):
            measure_acceptance(Engine(TARGET, drafter), [[1]], **options)
    with pytest.raises(OptionError, match="there is no prompt to measure on"):
        measure_acceptance(Engine(TARGET, ModelDrafter(NEAR)), [], **options)
    narrow = MarkovModel(NEAR.table, 4)
    with pytest.raises(
        ContextLengthError, match="nothing was drafted for these prompts: give shorter"
    ):
        measure_acceptance(Engine(TARGET, ModelDrafter(narrow)), [[1] * 9], **options)
