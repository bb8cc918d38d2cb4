"""The kernels' draws and rule give the indices of the tensor code; their softmax is a softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import kernels
from outpace.errors import CompilerError
from outpace.kernels import rows as kernel_rows
from outpace.sampling import Keys, Warp, categorical, race
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, SamplingParams, Shape, Tree
from outpace.verifiers import (
    BlockVerifier,
    KSeqVerifier,
    MultiPathVerifier,
    Noise,
    TokenVerifier,
    TraversalVerifier,
)

SIZES = st.sampled_from([1, 2, 7, 16, 17, 64, 333])


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        return kernels.load_library()
    except CompilerError as error:
        pytest.skip(str(error))


def tensors(f, *args):
    """The same without the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "loaded", lambda *x: None)
        return f(*args)


def laws(generator, *shape, sparse=True):
    """Random rows, some of their elements 0, one row of each kind certain."""
    p = torch.rand(shape, generator=generator) ** 4
    if sparse:
        p *= torch.rand(shape, generator=generator) < 0.7
    p[..., 0] += p.sum(-1) == 0
    return p / p.sum(-1, keepdim=True)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@given(SIZES, st.sampled_from([1e-30, 0.05, 0.8, 1.0, 3.0, 1e30]), st.integers(0, 99))
def test_a_softmax_is_one(library, n, temperature, seed):
    logits = 9 * torch.randn(3, 2, n, generator=seeded(seed))
    logits[1, 0, : n // 2] = -torch.inf
    heat = torch.tensor([temperature, 0.0, 1.0])
    p = kernels.warp(library, logits, heat)
    x = logits.double()
    x = x - x.amax(-1, keepdim=True)
    for b, t in ((0, temperature), (2, 1.0)):
        assert torch.allclose(p[b].double(), (x[b] / t).softmax(-1), rtol=1e-5, atol=1e-30)
    assert torch.equal(p[1].argmax(-1), logits[1].argmax(-1))
    assert p[1].sum(-1).tolist() == [1, 1]
    assert torch.equal(p[0, 1], kernels.warp(library, logits[:1, 1:], heat[:1])[0, 0])


def test_what_is_no_number_stays_none(library):
    logits = torch.tensor([[[1.0, torch.nan, 2.0], [torch.inf, 0.0, 1.0]]])
    assert kernels.warp(library, logits, torch.ones(1)).isnan().any(-1).all()


@given(SIZES, st.integers(0, 10_000))
def test_draws_are_those_of_the_tensor_code(n, seed):
    g = seeded(seed)
    p, u = laws(g, 4, 3, n), torch.rand(4, 3, generator=g).double()
    u[0, :2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    drawn = categorical(p, u)
    assert torch.equal(drawn, tensors(categorical, p, u))
    assert (p.gather(-1, drawn.unsqueeze(-1)) > 0).all()


@given(SIZES, st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_races_are_those_of_the_tensor_code(n, seed, first):
    p = laws(seeded(seed % 1000), 2, 5, n)
    keys = Keys(torch.tensor([seed - 2**63, seed % 99]), torch.tensor([first, first + 7]))
    depths = torch.tensor([[0, 1, 1, 2, 3], [4, 0, 0, 0, 9]])
    won = race(p, keys, depths)
    assert torch.equal(won, tensors(race, p, keys, depths))
    assert (p.gather(-1, won.unsqueeze(-1)) > 0).all()


def test_a_race_at_another_position_is_another(library):
    p, depths = laws(seeded(0), 1, 50, 64), torch.arange(50).unsqueeze(0)
    one, other = (race(p, Keys(torch.tensor([5]), torch.tensor([x])), depths) for x in (0, 1))
    assert not torch.equal(one, other)


def tree_of(shape, n, generator):
    """A random one of up to n nodes."""
    n = int(torch.randint(0, n + 1, (), generator=generator))
    if shape is Shape.CHAIN:
        return chain(n)
    parents = [int(torch.randint(-1, i, (), generator=generator)) for i in range(n)]
    if shape is Shape.PATHS:
        for i, parent in enumerate(parents):
            parents[i] = -1 if parent in parents[:i] else parent
    return Tree(tuple(parents))


def round_of(generator, n, nodes, sampled, shape=Shape.CHAIN):
    """Of five sequences, ragged; tokens are any, or drawn where they can be."""
    batch = 5
    p, q = (laws(generator, batch, rows, n) for rows in (nodes + 1, nodes))
    p[0, :-1] = q[0]  # all are accepted, and where one is not, nothing is left over
    p[1:3, 1:], q[1:3] = p[1:3, :1], q[1:3, :1]  # the same row everywhere
    tokens = torch.randint(0, n, (batch, nodes), generator=generator)
    drawn = torch.multinomial(q[2:].flatten(0, 1), 1, generator=generator)
    tokens[2:] = drawn.view(batch - 2, nodes)
    law = Rows(q) if sampled else PointMass()
    noise = [torch.rand(batch, k, generator=generator).double() for k in (nodes, nodes + 1)]
    trees = tuple(tree_of(shape, nodes, generator) for _ in range(batch))
    return p, Draft(tokens, law, trees), Noise(*noise)


RULES = [
    TokenVerifier(),
    BlockVerifier(),
    KSeqVerifier(),
    TraversalVerifier(),
    MultiPathVerifier(),
]


def parts(verdict):
    return verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampled", [True, False])
@given(n=SIZES, nodes=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_the_rule_decides_as_the_tensor_code_does(rule, sampled, n, nodes, seed):
    generator = seeded(seed)
    for shape in {Shape.CHAIN, rule.takes}:
        given_round = round_of(generator, n, nodes, sampled, shape)
        assert parts(rule(*given_round)) == parts(tensors(rule, *given_round))


@pytest.mark.parametrize("rule", RULES)
def test_another_rule_would_be_noticed(monkeypatch, rule):
    """The control: with other noise some verdict is another."""
    verify = kernels.verify

    def broken(library, which, p, q, tokens, parents, accept, target):
        return verify(library, which, p, q, tokens, parents, accept * 0, target)

    monkeypatch.setattr(kernels, "verify", broken)
    rounds = [round_of(seeded(seed), 16, 4, True, rule.takes) for seed in range(20)]
    found = [parts(rule(*r)) == parts(tensors(rule, *r)) for r in rounds]
    assert not all(found)


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_decides_alone_as_in_company(rule):
    """In the kernels and in tensors, padded or not."""
    for seed in range(20):
        p, draft, noise = round_of(seeded(seed), 16, 9, True, rule.takes)
        for decide in (lambda *a: rule(*a), lambda *a: tensors(rule, *a)):
            path, accepted, token = parts(decide(p, draft, noise))
            for b, tree in enumerate(draft.trees):
                one, n = slice(b, b + 1), len(tree)
                law = Rows(draft.law.q[one, :n])
                small = Draft(draft.tokens[one, :n], law, (tree,))
                alone = Noise(noise.accept[one, :n], noise.target[one, : n + 1])
                said = parts(decide(p[one, : n + 1], small, alone))
                assert said == ([path[b][:n]], [accepted[b]], [token[b]])


def test_other_types_and_shapes_take_the_tensor_code(monkeypatch):
    monkeypatch.setattr(kernel_rows, "loaded_library", lambda: pytest.fail("was called"))
    p = laws(seeded(0), 2, 9).double()
    categorical(p, torch.rand(2).double())
    p, draft, noise = round_of(seeded(1), 9, 3, True)
    TokenVerifier()(p.double(), draft, noise)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0},
    ],
)
@given(n=st.sampled_from([1, 40, 333]), seed=st.integers(0, 999), tied=st.booleans())
def test_a_warp_by_the_kernels_is_one_by_tensors(library, options, n, seed, tied):
    kinds = [{"temperature": t} | options for t in (0.0, 0.7, 1.0, 1e-12)] + [{"temperature": 1.3}]
    params = [SamplingParams(**k) for k in kinds]
    logits = 3 * torch.randn(5, 3, n, generator=seeded(seed))
    if tied:
        logits = logits.round()
    logits[1, 0, n // 2 + 1 :] = -torch.inf
    ours, theirs = (Warp(params, n, torch.device("cpu"), lib) for lib in (library, None))
    assert torch.allclose(ours(logits), theirs(logits), rtol=1e-5, atol=1e-7)
    assert torch.equal(ours(logits) > 0, theirs(logits) > 0)
    assert ours.by_kernels
    assert not theirs.by_kernels
