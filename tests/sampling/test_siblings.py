"""Children of one node: drawn without replacement they have the law that their rows report."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import kernels
from outpace.audit.enumeration import inside, intervals
from outpace.errors import CompilerError
from outpace.sampling import DraftNoise, Keys, categorical, draws, exponentials
from outpace.sampling.draws import without_replacement

EXACT = 1e-12
weights = st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any)
Draws = tuple[int, ...]


def row(given_weights) -> torch.Tensor:
    w = torch.tensor(given_weights, dtype=torch.float64)
    return w / w.sum()


def scores(p: torch.Tensor) -> torch.Tensor:
    """Of tokens that p lacks as well."""
    return p - 0.01 * torch.arange(p.shape[-1])


def plackett_luce(p: torch.Tensor, count: int) -> dict[Draws, float]:
    """The twin: each draw from what is left; then what scores most, which is certain."""
    law = {(): 1.0}
    for _ in range(count):
        further: dict[Draws, float] = {}
        for said, mass in law.items():
            left = [0.0 if t in said else float(x) for t, x in enumerate(p)]
            if not any(left):
                rest = [t for t in range(len(left)) if t not in said]
                left = [float(t == min(rest)) for t in range(len(left))]
            for token, x in enumerate(left):
                if x:
                    further[(*said, token)] = mass * x / sum(left)
        law = further
    return law


def enumerated(p: torch.Tensor, count: int, children) -> dict[Draws, float]:
    """The law of the order, by inverting the noise: one draw after the other."""
    law: dict[Draws, float] = {}
    open_: list[tuple[float, tuple[float, ...], Draws]] = [(1.0, (), ())]
    for j in range(count):

        def decide(which, u, open_=tuple(open_), j=j):
            noise = [
                [*open_[i][1], x, *[0.5] * (count - 1 - j)] for i, x in zip(which, u, strict=True)
            ]
            return children(p, torch.tensor(noise, dtype=torch.float64))[0][:, j].tolist()

        found = intervals(decide, len(open_))
        open_ = [
            (mass * (high - low), (*noise, inside(low, high)), (*said, token))
            for (mass, noise, said), parts in zip(open_, found, strict=True)
            for low, high, token in parts
        ]
    for mass, _, said in open_:
        law[said] = law.get(said, 0.0) + mass
    return law


def by_uniforms(p: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[M, m]` and rows `[M, m, V]` of as many draws as there is noise for."""
    rows = p.expand(1, len(u), -1)
    nodes = torch.arange(u.numel()).view(1, *u.shape)
    noise = DraftNoise(u.reshape(1, -1))
    tokens, q = noise.children(rows, scores(p).expand_as(rows), nodes, 0, replace=False)
    return tokens[0], q[0]


def worst(found: dict[Draws, float], wanted: dict[Draws, float]) -> float:
    keys = found.keys() | wanted.keys()
    return max(abs(found.get(k, 0.0) - wanted.get(k, 0.0)) for k in keys)


@settings(max_examples=25)
@given(weights, st.integers(1, 4))
def test_the_order_has_its_law(given_weights, count):
    p = row(given_weights)
    assert worst(enumerated(p, count, by_uniforms), plackett_luce(p, count)) < EXACT


@given(weights, st.integers(0, 999))
def test_rows_are_those_that_were_drawn_from(given_weights, seed):
    """Each is p without what is taken; the noise of each draws its token, and no other."""
    p, count = row(given_weights), 4
    u = torch.rand(3, count, generator=torch.Generator().manual_seed(seed)).double()
    tokens, rows = by_uniforms(p, u)
    for said, own, noise in zip(tokens.tolist(), rows, u, strict=True):
        for j in range(count):
            left = p.clone()
            left[said[:j]] = 0
            if left.any():
                torch.testing.assert_close(own[j], left / left.sum(), rtol=0, atol=EXACT)
            assert said[j] == int(categorical(own[j], noise[j]))


@given(weights)
def test_what_is_left_when_nothing_is_left_is_certain_and_distinct(given_weights):
    p = row(given_weights)
    tokens, rows = by_uniforms(p, torch.rand(2, 4).double())
    possible = int((p > 0).sum())
    for said, own in zip(tokens.tolist(), rows, strict=True):
        assert sorted(said) == [0, 1, 2, 3]
        assert set(said[:possible]) == set(p.nonzero().flatten().tolist())
        assert said[possible:] == sorted(said[possible:])  # by score
        for token, certain in zip(said[possible:], own[possible:], strict=True):
            assert certain.tolist() == [float(t == token) for t in range(4)]


@given(weights, st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_a_race_is_won_in_the_order_of_its_times(given_weights, seed, first):
    """The children are the first in the race that the target runs, too."""
    p = row(given_weights)
    keys = Keys(torch.tensor([seed - 2**63]), torch.tensor([first]))
    rows = p.expand(1, 2, -1)
    nodes = torch.zeros(1, 2, 3, dtype=torch.int64)
    tokens, q = DraftNoise(keys=keys).children(rows, scores(p).expand_as(rows), nodes, 2, False)
    times = exponentials(keys, torch.tensor([[2]]), 4)[0, 0] / p
    order = times.argsort(stable=True).tolist()
    possible = min(3, int((p > 0).sum()))
    assert tokens[0, 0].tolist() == tokens[0, 1].tolist()
    assert tokens[0, 0, :possible].tolist() == order[:possible]
    for j in range(possible):
        assert q[0, 0, j, tokens[0, 0, :j]].sum() == 0
        assert float(q[0, 0, j].sum()) == pytest.approx(1)


def test_with_replacement_each_is_drawn_from_the_row_itself():
    p = row([3, 0, 1, 2]).expand(2, 1, -1)
    u = torch.rand(2, 5).double()
    nodes = torch.tensor([[[0, 3]], [[4, 1]]])
    tokens, q = DraftNoise(u).children(p, p, nodes, 0, replace=True)
    assert torch.equal(q, p.unsqueeze(2).expand(-1, -1, 2, -1))
    for b, j in itertools.product(range(2), range(2)):
        assert tokens[b, 0, j] == categorical(p[b, 0], u[b, nodes[b, 0, j]])


# --- negative controls -----------------------------------------------------------------------


def not_struck(p, scores, count, draw):
    """What was drawn stays in the rows of its siblings."""
    tokens = torch.stack([draw(p, j) for j in range(count)], -1)
    return tokens, p.unsqueeze(-2).expand(*p.shape[:-1], count, -1)


def struck_too_late(p, scores, count, draw):
    """Rows are reported of before the sibling before was drawn."""
    tokens, rows = without_replacement(p, scores, count, draw)
    return tokens, torch.cat([rows[..., :1, :], rows[..., :-1, :]], -2)


def test_rows_that_are_not_struck_are_found(monkeypatch):
    p = row([3, 1, 2, 2])
    monkeypatch.setattr(draws, "without_replacement", not_struck)
    assert worst(enumerated(p, 2, by_uniforms), plackett_luce(p, 2)) > 0.05


@pytest.mark.parametrize("broken", [not_struck, struck_too_late])
def test_rows_of_another_draw_are_found(monkeypatch, broken):
    monkeypatch.setattr(draws, "without_replacement", broken)
    with pytest.raises(AssertionError):
        test_rows_are_those_that_were_drawn_from.hypothesis.inner_test([3, 1, 2, 2], 0)


# --- kernels ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    try:
        return kernels.load_library()
    except CompilerError as error:
        pytest.skip(str(error))


def of_both(p, logits, count, noise) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By kernels, and by tensors."""
    nodes = torch.arange(p.shape[1] * count).view(1, -1, count).expand(len(p), -1, -1)
    found = [noise.children(p, logits, nodes, 3, replace=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "loaded", lambda *x: None)
        return [*found, noise.children(p, logits, nodes, 3, replace=False)]


@pytest.mark.parametrize("raced", [True, False])
@given(
    n=st.sampled_from([1, 2, 7, 16, 17, 64, 333]),
    count=st.integers(1, 6),
    seed=st.integers(0, 9999),
)
def test_kernels_draw_what_tensors_draw(library, raced, n, count, seed):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(2, 3, n, generator=g) ** 4 * (torch.rand(2, 3, n, generator=g) < 0.6)
    p[..., 0] += p.sum(-1) == 0
    p, logits = p / p.sum(-1, keepdim=True), torch.randn(2, 3, n, generator=g)
    keys = Keys(torch.tensor([seed, -seed]), torch.tensor([5, 900]))
    u = torch.rand(2, 3 * count, generator=g).double()
    (tokens, q), (others, rows) = of_both(
        p, logits, min(count, n), DraftNoise(keys=keys) if raced else DraftNoise(u)
    )
    assert torch.equal(tokens, others)
    torch.testing.assert_close(q, rows, rtol=1e-6, atol=0)


@pytest.mark.parametrize("raced", [True, False])
def test_kernels_that_draw_otherwise_are_found(library, monkeypatch, raced):
    """The control: they strike nothing, as if each were the first."""
    honest = kernels.children

    def broken(library, p, scores, count, *noise):
        u, *rest = (*noise, None, None)[:3]
        each = [
            honest(library, p, scores, 1, None if u is None else u[..., j : j + 1], *rest)
            for j in range(count)
        ]
        return torch.cat([t for t, _ in each], -1), torch.cat([q for _, q in each], -2)

    monkeypatch.setattr(kernels, "children", broken)
    p = torch.rand(2, 3, 16, generator=torch.Generator().manual_seed(0))
    p = p / p.sum(-1, keepdim=True)
    keys = Keys(torch.tensor([1, 2]), torch.tensor([5, 900]))
    noise = DraftNoise(keys=keys) if raced else DraftNoise(torch.rand(2, 9).double())
    (tokens, _), (others, _) = of_both(p, p, 3, noise)
    assert not torch.equal(tokens, others)
