"""The law of one round equals the target's to 1e-12, for any p and q, and broken rules do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broken_rules import (
    WRONG_LAW,
    AcceptsImpossible,
    InvertedRatio,
    NaNAtZeroMass,
    NoResidual,
    NotRenormalised,
    SharedNoise,
    Sound,
)
from enumeration import (
    Drafted,
    NotIndependent,
    drafts_of,
    error_of,
    impossible_at_zero,
    law_by_depth,
    worst_error,
)
from outpace.sampling import Warp, categorical, residual, without
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, SamplingParams, Tree
from outpace.verifiers import GreedyVerifier, MatchVerifier, Noise, TokenVerifier

EXACT = 1e-12


def row(*weights: float) -> torch.Tensor:
    w = torch.tensor(weights, dtype=torch.float64)
    return w / w.sum()


@st.composite
def tables(draw, vocab: int, sparse: bool = True):
    """A random row per prefix; small whole weights make zeros and ties common."""
    weights = st.lists(st.integers(0 if sparse else 1, 4), min_size=vocab, max_size=vocab)
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    data = draw(st.data())

    def table(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in rows:
            rows[prefix] = row(*data.draw(weights.filter(any)))
        return rows[prefix]

    return table


@st.composite
def rounds(draw):
    vocab = draw(st.integers(2, 5))
    k = draw(st.integers(0, 3 if vocab <= 3 else 2))
    return vocab, k, draw(tables(vocab)), draw(tables(vocab))


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_token_rule_keeps_the_law_for_drawn_drafts(case):
    vocab, k, p, q = case
    assert worst_error(TokenVerifier(), p, drafts_of(q, k, vocab), vocab) < EXACT


@settings(max_examples=150, deadline=None)
@given(rounds(), st.data())
def test_token_rule_keeps_the_law_for_point_masses(case, data):
    vocab, k, p, _ = case
    tokens = tuple(data.draw(st.lists(st.integers(0, vocab - 1), min_size=k, max_size=k)))
    assert worst_error(TokenVerifier(), p, [Drafted(1.0, tokens, None)], vocab) < EXACT


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_the_twin_agrees(case):
    vocab, k, p, q = case
    assert worst_error(Sound(), p, drafts_of(q, k, vocab), vocab) < EXACT


@settings(max_examples=25, deadline=None)
@given(rounds(), st.data())
def test_match_keeps_the_law_whatever_was_drafted(case, data):
    """Of chains and trees; how the draft was drawn does not matter to it."""
    vocab, _, p, _ = case
    size = data.draw(st.integers(0, 4))
    tree = Tree(tuple(data.draw(st.integers(-1, i - 1)) for i in range(size)))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    length = max(tree.depths, default=0) + 1
    law = law_by_depth(MatchVerifier(), p, tokens, tree, vocab)
    assert error_of(law, p, length, vocab) < EXACT


class OneNoise(MatchVerifier):
    """Every depth is drawn with the first depth's uniform."""

    def __call__(self, p, draft, noise):
        first = noise.target[:, :1].expand_as(noise.target)
        return super().__call__(p, draft, Noise(noise.accept, first))


class NextRow(MatchVerifier):
    """Every token is drawn from the row after the one that scores it."""

    def __call__(self, p, draft, noise):
        return super().__call__(p.roll(-1, 1), draft, noise)


@pytest.mark.parametrize("rule", [OneNoise, NextRow])
def test_broken_matching_is_caught(rule):
    tree = Tree((-1, -1, 0, 1))
    law = law_by_depth(rule(), p_table, [0, 1, 1, 2], tree, 3)
    assert error_of(law, p_table, 3, 3) > 1e-2


P = {(): row(5, 3, 2), (0,): row(1, 6, 3), (1,): row(4, 4, 2), (2,): row(1, 1, 8)}
Q = {(): row(2, 5, 3), (0,): row(5, 4, 1), (1,): row(1, 2, 7), (2,): row(4, 3, 3)}


def p_table(prefix):
    return P.get(prefix[-1:], P[()])


def q_table(prefix):
    return Q.get(prefix[-1:], Q[()])


@pytest.mark.parametrize("rule", WRONG_LAW)
def test_broken_rules_are_caught(rule):
    assert worst_error(rule(), p_table, drafts_of(q_table, 2, 3), 3) > 1e-3


@pytest.mark.parametrize("rule", [NoResidual, NotRenormalised, InvertedRatio])
def test_broken_rules_are_caught_on_point_masses(rule):
    assert worst_error(rule(), p_table, [Drafted(1.0, (0, 1), None)], 3) > 1e-2


def test_accepting_the_second_best_token_is_caught():
    """Negative control of the greedy rule: a draft token that is not the argmax is kept."""

    class SecondBest(GreedyVerifier):
        def __call__(self, p, draft, noise):
            return super().__call__(-(p - p.median(-1, keepdim=True).values).abs(), draft, noise)

    differing = 0
    for d in drafts_of(q_table, 2, 3):
        logits = torch.stack([p_table(d.tokens[:i]) for i in range(3)]).log().unsqueeze(0)
        draft = Draft(torch.tensor([d.tokens]), PointMass(), (chain(2),))
        nothing = Noise(torch.zeros(1, 2).double(), torch.zeros(1, 3).double())
        verdicts = [rule(logits, draft, nothing) for rule in (GreedyVerifier(), SecondBest())]
        differing += not torch.equal(verdicts[0].token, verdicts[1].token)
    assert differing > 0


def test_shared_noise_is_caught():
    with pytest.raises(NotIndependent):
        worst_error(SharedNoise(), p_table, drafts_of(q_table, 2, 3), 3)


def test_a_misreported_law_is_caught():
    """Drawn at one temperature, reported at another; and an argmax draft with softmax rows."""

    def hot(prefix):
        return row(*(q_table(prefix) ** 0.5).tolist())

    assert worst_error(TokenVerifier(), p_table, drafts_of(hot, 2, 3, q_table), 3) > 1e-3

    def argmax(prefix):
        return torch.nn.functional.one_hot(q_table(prefix).argmax(), 3).double()

    assert worst_error(TokenVerifier(), p_table, drafts_of(argmax, 2, 3, q_table), 3) > 1e-3
    assert worst_error(TokenVerifier(), p_table, drafts_of(argmax, 2, 3), 3) < EXACT


def test_dropping_an_unlikely_token_is_caught_and_keeping_it_is_exact():
    """A stop by confidence is exact only if the token it looked at stays in the draft."""

    def stopped(drop: bool) -> list[Drafted]:
        found: dict[tuple[int, ...], Drafted] = {}
        for d in drafts_of(q_table, 2, 3):
            length = 2
            for i in range(2):
                if float(d.rows[i][d.tokens[i]]) < 0.35:
                    length = i if drop else i + 1
                    break
            tokens = d.tokens[:length]
            mass = found[tokens].probability if tokens in found else 0.0
            found[tokens] = Drafted(mass + d.probability, tokens, d.rows[:length])
        return list(found.values())

    assert worst_error(TokenVerifier(), p_table, stopped(drop=False), 3) < EXACT
    assert worst_error(TokenVerifier(), p_table, stopped(drop=True), 3) > 1e-2


def test_impossible_tokens_never_pass_even_at_zero_noise():
    def p(prefix):
        return row(0, 0, 1, 1)

    drafts = drafts_of(lambda prefix: row(1, 1, 1, 1), 2, 4)
    assert impossible_at_zero(TokenVerifier(), p, drafts, 4) == []
    assert impossible_at_zero(AcceptsImpossible(), p, drafts, 4) != []


def test_a_token_that_its_law_excludes_is_never_accepted():
    """q = 0 at the drafted token divides by zero in the ratio; a guard must say no."""
    p = row(1, 1).view(1, 1, 2).repeat(1, 2, 1)
    draft = Draft(torch.tensor([[1]]), Rows(row(1, 0).view(1, 1, 2)), (chain(1),))
    noise = Noise(torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 2), 0.5).double())
    verdict = TokenVerifier()(p, draft, noise)
    assert verdict.accepted.tolist() == [0]
    assert verdict.token.tolist() == [1]  # what is left of p


def test_residual_without_mass_is_the_target():
    p = row(1, 2, 3)
    assert torch.equal(residual(p, p), p)
    assert torch.equal(without(row(0, 1, 0), torch.tensor(1)), row(0, 1, 0))
    rejected = Noise(torch.ones(1, 1).double(), torch.full((1, 2), 0.4).double())
    draft = Draft(torch.tensor([[0]]), Rows(p.reshape(1, 1, 3)), (chain(1),))
    rows = p.expand(1, 2, 3)
    assert int(TokenVerifier()(rows, draft, rejected).token) == 1
    broken = NaNAtZeroMass()
    row_of = broken.rest(p, p)
    assert torch.isnan(row_of).all()


def test_worked_examples():
    """The acceptance 0.75, the residual (1, 0, 0), and 0.6 / 0.3 / 0.1 recovered exactly."""
    target, draft = row(6, 3, 1), row(4, 4, 2)
    one = Draft(torch.tensor([[1]]), Rows(draft.reshape(1, 1, 3)), (chain(1),))
    for u, kept in ((0.7499999, 1), (0.7500001, 0)):
        noise = Noise(torch.tensor([[u]]).double(), torch.zeros(1, 2).double())
        assert int(TokenVerifier()(target.expand(1, 2, 3), one, noise).accepted) == kept
    for p, q, left in ((row(5, 3, 2), row(2, 5, 3), 0), (row(4, 5, 1), row(6, 3, 1), 1)):
        assert residual(p, q).nonzero().flatten().tolist() == [left]
    error = worst_error(TokenVerifier(), lambda _: target, drafts_of(lambda _: draft, 1, 3), 3)
    assert error < EXACT


def test_acceptance_is_one_minus_total_variation():
    from enumeration import RoundLaw

    p, q = row(5, 3, 2), row(2, 5, 3)
    law = RoundLaw(TokenVerifier(), lambda _: p, drafts_of(lambda _: q, 1, 3), 3).emitted
    accepted = sum(mass for tokens, mass in law.items() if len(tokens) == 2)
    assert accepted == pytest.approx(1 - 0.5 * (p - q).abs().sum().item(), abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_greedy_rule_is_the_token_rule_at_temperature_zero(case):
    vocab, k, p, q = case
    warp = Warp([SamplingParams()], vocab, torch.device("cpu"))
    for d in drafts_of(q, k, vocab)[:20]:
        logits = torch.stack([p(d.tokens[:i]) for i in range(k + 1)]).log().unsqueeze(0)
        law = Rows(torch.stack(d.rows).unsqueeze(0)) if k else PointMass()
        draft = Draft(torch.tensor([d.tokens]).reshape(1, k), law, (chain(k),))
        noise = Noise(torch.rand(1, k).double(), torch.rand(1, k + 1).double())
        greedy = GreedyVerifier()(logits, draft, noise)
        point = Draft(draft.tokens, PointMass(), draft.trees)
        token = TokenVerifier()(warp(logits), point, noise)
        assert torch.equal(greedy.accepted, token.accepted)
        assert torch.equal(greedy.token, token.token)
        assert torch.equal(greedy.path, token.path)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any))
def test_categorical_has_its_law(weights):
    """The measure of noise that draws each index is its probability, to 1e-15."""
    p = row(*weights)
    edges = []
    for y in range(len(weights)):
        low, high = 0.0, 1.0
        for _ in range(60):
            mid = (low + high) / 2
            if mid < 1 and int(categorical(p, torch.tensor(mid).double())) <= y:
                low = mid
            else:
                high = mid
        edges.append(high)
    measures = torch.tensor(edges).double().diff(prepend=torch.zeros(1).double())
    assert torch.allclose(measures, p, atol=1e-15)
    for u in (0.0, 1 - 2.0**-53):
        assert p[int(categorical(p, torch.tensor(u).double()))] > 0
