"""The kernels' draws and rule give the indices of the tensor code; their softmax is a softmax."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import kernels
from outpace.errors import CompilerError
from outpace.kernels import rows as kernel_rows
from outpace.sampling import Keys, Warp, categorical, exponentials, race
from outpace.sampling.noise import Stream, uniform_bits
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, SamplingParams, Shape, Tree
from outpace.verifiers import (
    BlockVerifier,
    CoupledVerifier,
    KSeqVerifier,
    MatchVerifier,
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


def uneven(generator, n):
    """Rows of which a race could be wrong: `[1, 8, n]`."""
    x = torch.randn(n, generator=generator)
    heights = 10 ** -torch.linspace(0, 45, n)  # to the smallest numbers there are
    p = torch.stack(
        [
            (3 * x / 0.8).softmax(-1),
            (30 * x).softmax(-1),
            torch.full((n,), 1 / n),
            torch.full((n,), 1e-42),
            torch.where(torch.rand(n, generator=generator) < 0.05, x.abs(), 0.0),
            heights,
            heights.flip(0),
            heights[torch.randperm(n, generator=generator)],
        ]
    )
    return p.unsqueeze(0)


WIDTHS = [1, 2, 15, 16, 17, 33, 250, 1023, 4096, 5000]


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 12345])
@pytest.mark.parametrize("first", [0, 2**32 - 3, 2**45])
def test_races_of_uneven_rows_are_those_of_the_tensor_code(n, seed, first):
    p, depths = uneven(seeded(n), n), torch.arange(8).unsqueeze(0)
    keys = Keys(torch.tensor([seed]), torch.tensor([first]))
    assert torch.equal(race(p, keys, depths), tensors(race, p, keys, depths))


def test_a_race_that_nobody_is_in_goes_to_the_first():
    p = torch.tensor([[[0.0, 0, 0], [0, torch.nan, 0], [-1, 0, -2], [torch.nan, 0, 1]]])
    keys, depths = Keys(torch.tensor([1]), torch.tensor([2])), torch.arange(4).unsqueeze(0)
    for run in (race, lambda *a: tensors(race, *a)):
        assert run(p, keys, depths).tolist() == [[0, 0, 0, 2]]


def equal_times(times):
    """Pairs of tokens with masses for which they finish at the same time, to the last bit."""
    n = len(times)
    for k in range(n):
        i, j = k % (n // 2), n // 2 + 7 * k % (n // 2)
        ratio = Fraction(times[i]) / Fraction(times[j])
        if ratio > 1:
            ratio = 1 / (1 / ratio).limit_denominator(2**24)
        else:
            ratio = ratio.limit_denominator(2**24)
        masses = ratio.numerator * 2.0**-25, ratio.denominator * 2.0**-25
        if masses[0] and masses[1] and times[i] / masses[0] == times[j] / masses[1]:
            yield (i, j), masses


def test_of_equal_times_the_first_wins():
    keys, depths, n = Keys(torch.tensor([3]), torch.tensor([2**40])), torch.zeros(1, 1).long(), 999
    times = exponentials(keys, depths, n)[0, 0].tolist()
    bits = uniform_bits(keys.seeds, keys.first, int(Stream.RACE), torch.arange(n))
    found = 0
    for pair, masses in equal_times(times):
        if any(times[x] != -math.log1p(-int(bits[x]) * 2.0**-53) for x in pair):
            continue  # logarithms of two libraries
        p = torch.zeros(1, 1, n)
        p[0, 0, list(pair)] = torch.tensor(masses)
        assert int(race(p, keys, depths)) == int(tensors(race, p, keys, depths)) == pair[0]
        p[0, 0, pair[1]] = p[0, 0, pair[1]].nextafter(torch.tensor(2.0))
        assert int(race(p, keys, depths)) == int(tensors(race, p, keys, depths)) == pair[1]
        found += 1
    assert found > 5


def raced(p, bits, slack):
    """A race as the kernels run it: tokens are passed over by 24 bits of their noise."""
    best, winner = math.inf, 0
    for token, mass in enumerate(p):
        if mass > 0 and bits[token] >> 29 <= best * mass * 2**24 * slack:
            time = -math.log1p(-bits[token] * 2.0**-53) / mass
            if time < best:
                best, winner = time, token
    return winner


@pytest.mark.parametrize("slack", [1 + 2**-20, 0.5])
def test_a_race_that_passes_over_too_many_is_noticed(slack):
    """With half the bound, the control."""
    rows, n = 40, 250
    keys, depths = Keys(torch.tensor([-9]), torch.tensor([5])), torch.arange(rows).unsqueeze(0)
    p = uneven(seeded(1), n).repeat(1, rows // 8, 1)
    position = (keys.first + depths).unsqueeze(-1)
    bits = uniform_bits(keys.seeds, position, int(Stream.RACE), torch.arange(n))[0].tolist()
    found = [raced(*of, slack) for of in zip(p[0].tolist(), bits, strict=True)]
    assert (found == race(p, keys, depths)[0].tolist()) == (slack > 1)


@given(SIZES, st.integers(1, 9), st.integers(0, 999))
def test_children_that_race_come_in_the_order_of_their_times(library, n, count, seed):
    p, keys = laws(seeded(seed), 2, 3, n), Keys(torch.tensor([seed, -seed]), torch.tensor([7, 0]))
    many = min(count, n)
    tokens, _ = kernels.children(library, p, p, many, seeds=keys.seeds, positions=keys.first)
    times = exponentials(keys, torch.zeros(2, 3).long(), n) / p.double()
    order = torch.where(p > 0, times, torch.inf).argsort(dim=-1, stable=True)[..., :many]
    there = p.gather(-1, order) > 0
    assert torch.equal(tokens[there], order[there])


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
    keys = Keys(torch.arange(batch) - 3, torch.arange(batch) + 2**33)
    return p, Draft(tokens, law, trees), Noise(*noise, keys)


RULES = [
    TokenVerifier(),
    BlockVerifier(),
    KSeqVerifier(),
    TraversalVerifier(),
    MultiPathVerifier(),
    MatchVerifier(),
    CoupledVerifier(),
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

    def broken(library, which, p, q, tokens, parents, accept, target, *keys):
        other = target * 0 if which is kernels.Rule.MATCH else target, *(k + 1 for k in keys)
        return verify(library, which, p, q, tokens, parents, accept * 0, *other)

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
                keys = noise.keys.select(one)
                alone = Noise(noise.accept[one, :n], noise.target[one, : n + 1], keys)
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
