"""The law of one round equals the target's to 1e-12, for any p and q, and broken rules do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broken_rules import (
    WRONG_BLOCKS,
    WRONG_LAW,
    WRONG_TREES,
    AcceptsImpossible,
    InvertedRatio,
    NaNAtZeroMass,
    NoResidual,
    NotRenormalised,
    SharedNoise,
    Sound,
    SoundBlock,
    SoundTree,
    StopsAtTheFirst,
)
from outpace.audit.enumeration import (
    Drafted,
    NotEnumerableError,
    certain,
    chains,
    drawn,
    impossible_at_zero,
    round_law,
    worst_error,
)
from outpace.sampling import Warp, categorical, residual, without
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, SamplingParams, Tree
from outpace.verifiers import (
    BlockVerifier,
    GreedyVerifier,
    MatchVerifier,
    Noise,
    TokenVerifier,
    TypicalVerifier,
)

EXACT = 1e-12
BY_RATIO = [TokenVerifier, BlockVerifier]
LENGTHS = [1, 2, 3, 4]


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
def rounds(draw, k: int):
    vocab = draw(st.integers(2, {1: 5, 2: 4, 3: 3, 4: 2}[k]))
    return vocab, draw(tables(vocab)), draw(tables(vocab))


def error(verifier, p, drafted: list[Drafted]) -> float:
    longest = max(d.tree.depth for d in drafted) + 1
    return worst_error(round_law(verifier, drafted), p, longest)


def expected_length(verifier, drafted: list[Drafted]) -> float:
    return sum(mass * len(said) for said, mass in round_law(verifier, drafted).items())


@pytest.mark.parametrize("rule", BY_RATIO)
@pytest.mark.parametrize("k", LENGTHS)
@settings(max_examples=40)
@given(st.data())
def test_rules_by_ratio_keep_the_law_for_drawn_drafts(rule, k, data):
    _, p, q = data.draw(rounds(k))
    assert error(rule(), p, chains(q, p, k)) < EXACT


@pytest.mark.parametrize("rule", BY_RATIO)
@pytest.mark.parametrize("k", [0, *LENGTHS])
@settings(max_examples=40)
@given(st.data())
def test_rules_by_ratio_keep_the_law_for_point_masses(rule, k, data):
    vocab, p, _ = data.draw(rounds(max(k, 1)))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=k, max_size=k))
    assert error(rule(), p, certain(p, tokens)) < EXACT


@pytest.mark.parametrize("twin", [Sound, SoundBlock, SoundTree])
@settings(max_examples=15)
@given(st.data())
def test_the_twins_agree(twin, data):
    _, p, q = data.draw(rounds(2))
    tree = Tree((-1, -1, 0)) if twin is SoundTree else chain(2)
    assert error(twin(), p, drawn(q, p, tree)) < EXACT


@settings(max_examples=60)
@given(st.data(), st.sampled_from(LENGTHS))
def test_block_verification_never_emits_less_than_token_verification(data, k):
    _, p, q = data.draw(rounds(k))
    drafted = chains(q, p, k)
    block, token = (expected_length(rule(), drafted) for rule in (BlockVerifier, TokenVerifier))
    assert block >= token - EXACT


def test_block_verification_emits_more_where_a_ratio_is_lost_by_token_verification():
    """The example of the paper's section 2: 10/9 tokens accepted, and 11/9."""
    drafted = chains(lambda _: row(2, 1), lambda _: row(1, 2), 2)
    accepted = [expected_length(rule(), drafted) - 1 for rule in (TokenVerifier, BlockVerifier)]
    assert accepted == pytest.approx([10 / 9, 11 / 9], abs=EXACT)


@pytest.mark.parametrize("k", LENGTHS)
@settings(max_examples=15)
@given(st.data())
def test_match_keeps_the_law_of_drawn_drafts(k, data):
    _, p, q = data.draw(rounds(k))
    assert error(MatchVerifier(), p, chains(q, p, k)) < EXACT


@settings(max_examples=40)
@given(st.data())
def test_match_keeps_the_law_whatever_was_drafted(data):
    """Of chains and trees; how the draft was drawn does not matter to it."""
    vocab, p, _ = data.draw(rounds(2))
    size = data.draw(st.integers(0, 4))
    tree = Tree(tuple(data.draw(st.integers(-1, i - 1)) for i in range(size)))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    assert error(MatchVerifier(), p, certain(p, tokens, tree)) < EXACT


TREES = [Tree((-1, -1)), Tree((-1, 0, -1)), Tree((-1, -1, 0)), Tree((-1, 0, 0)), Tree((-1,) * 3)]


@pytest.mark.parametrize("tree", TREES)
@settings(max_examples=15)
@given(st.data())
def test_token_verification_keeps_the_law_of_drawn_trees(tree, data):
    """Of children that are drawn independently, with doubles among them."""
    table = tables(3 if len(tree) < 3 else 2)
    p, q = data.draw(table), data.draw(table)
    assert error(TokenVerifier(), p, drawn(q, p, tree)) < EXACT


@settings(max_examples=40)
@given(st.data())
def test_token_verification_keeps_the_law_of_trees_that_are_certain(data):
    vocab, p, _ = data.draw(rounds(2))
    size = data.draw(st.integers(0, 4))
    tree = Tree(tuple(data.draw(st.integers(-1, i - 1)) for i in range(size)))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    assert error(TokenVerifier(), p, certain(p, tokens, tree)) < EXACT


@pytest.mark.parametrize("tokens", [[0, 1], [2, 0, 1], [1, 1]])
def test_of_children_that_are_certain_as_many_pass_as_the_target_wants(tokens):
    """By token verification and by match: the sum of p over the children."""
    for rule in (TokenVerifier(), MatchVerifier()):
        emitted = round_law(rule, certain(p_table, tokens, Tree((-1,) * len(tokens))))
        accepted = sum(mass for said, mass in emitted.items() if len(said) == 2)
        assert accepted == pytest.approx(sum(float(P[()][t]) for t in set(tokens)), abs=EXACT)


@pytest.mark.parametrize("rule", WRONG_TREES)
def test_broken_rules_are_caught_on_trees(rule):
    tree = Tree((-1, -1, 0))
    drafts = [drawn(q_table, p_table, tree), certain(p_table, (0, 1, 2), tree)]
    worst = max(error(rule(), p_table, drafted) for drafted in drafts)
    assert worst > 1e-2


@settings(max_examples=40)
@given(st.data())
def test_match_accepts_as_often_as_two_draws_agree(data):
    _, p, q = data.draw(rounds(1))
    emitted = round_law(MatchVerifier(), chains(q, p, 1))
    accepted = sum(mass for said, mass in emitted.items() if len(said) == 2)
    assert accepted == pytest.approx(float((p(()) * q(())).sum()), abs=EXACT)


@pytest.mark.parametrize("rule", [*BY_RATIO, MatchVerifier])
@pytest.mark.parametrize("certainly", [False, True])
def test_tokens_of_hardly_any_probability_are_enumerated_as_others(rule, certainly):
    """Down to cells that are one number wide."""
    p = row(1e-17, 1, 2, 1e-9, 1e-12, 1e-15, 5e-16)
    q = row(1e-8, 2, 1, 1e-15, 1e-16, 1e-12, 1)
    drafted = certain(lambda _: p, [3, 4]) if certainly else chains(lambda _: q, lambda _: p, 2)
    assert error(rule(), lambda _: p, drafted) < EXACT


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
    assert error(rule(), p_table, certain(p_table, [0, 1, 1, 2], Tree((-1, -1, 0, 1)))) > 1e-2


P = {(): row(5, 3, 2), (0,): row(1, 6, 3), (1,): row(4, 4, 2), (2,): row(1, 1, 8)}
Q = {(): row(2, 5, 3), (0,): row(5, 4, 1), (1,): row(1, 2, 7), (2,): row(4, 3, 3)}


def p_table(prefix):
    return P.get(prefix[-1:], P[()])


def q_table(prefix):
    return Q.get(prefix[-1:], Q[()])


@pytest.mark.parametrize("rule", [*WRONG_LAW, *WRONG_BLOCKS])
def test_broken_rules_are_caught(rule):
    assert error(rule(), p_table, chains(q_table, p_table, 3)) > 1e-3


@pytest.mark.parametrize("rule", [NoResidual, NotRenormalised, InvertedRatio, StopsAtTheFirst])
def test_broken_rules_are_caught_on_point_masses(rule):
    assert error(rule(), p_table, certain(p_table, (0, 1))) > 1e-2


def test_accepting_the_second_best_token_is_caught():
    """Negative control of the greedy rule: a draft token that is not the argmax is kept."""

    class SecondBest(GreedyVerifier):
        def __call__(self, p, draft, noise):
            return super().__call__(-(p - p.median(-1, keepdim=True).values).abs(), draft, noise)

    differing = 0
    (drafted,) = chains(q_table, p_table, 2)
    for tokens, rows in zip(drafted.tokens, drafted.p, strict=True):
        logits = rows.log().unsqueeze(0)
        draft = Draft(tokens.unsqueeze(0), PointMass(), (chain(2),))
        nothing = Noise(torch.zeros(1, 2).double(), torch.zeros(1, 3).double())
        verdicts = [rule(logits, draft, nothing) for rule in (GreedyVerifier(), SecondBest())]
        differing += not torch.equal(verdicts[0].token, verdicts[1].token)
    assert differing > 0


def test_shared_noise_is_caught():
    with pytest.raises(NotEnumerableError, match="another purpose"):
        round_law(SharedNoise(), chains(q_table, p_table, 2))


def test_a_misreported_law_is_caught():
    """Drawn at one temperature, reported at another; and an argmax draft with softmax rows."""

    def hot(prefix):
        return row(*(q_table(prefix) ** 0.5).tolist())

    assert error(TokenVerifier(), p_table, chains(hot, p_table, 2, q_table)) > 1e-3

    def argmax(prefix):
        return torch.nn.functional.one_hot(q_table(prefix).argmax(), 3).double()

    assert error(TokenVerifier(), p_table, chains(argmax, p_table, 2, q_table)) > 1e-3
    assert error(TokenVerifier(), p_table, chains(argmax, p_table, 2)) < EXACT


def test_dropping_an_unlikely_token_is_caught_and_keeping_it_is_exact():
    """A stop by confidence is exact only if the token it looked at stays in the draft."""

    def stopped(drop: bool) -> list[Drafted]:
        (whole,) = chains(q_table, p_table, 3)
        by_length: dict[int, dict[tuple[int, ...], int]] = {}
        mass: dict[tuple[int, ...], float] = {}
        for c, tokens in enumerate(whole.tokens.tolist()):
            sure = [float(whole.q[c, i, t]) >= 0.35 for i, t in enumerate(tokens)]
            first = sure.index(False) if False in sure else len(tokens)
            kept = tuple(tokens[: first if drop else first + 1])
            by_length.setdefault(len(kept), {})[kept] = c
            mass[kept] = mass.get(kept, 0.0) + float(whole.probability[c])
        return [
            Drafted(
                torch.tensor([mass[t] for t in found], dtype=torch.float64),
                torch.tensor([list(t) for t in found], dtype=torch.int64).view(len(found), n),
                whole.q[list(found.values()), :n] if n else None,
                whole.p[list(found.values()), : n + 1],
                chain(n),
            )
            for n, found in by_length.items()
        ]

    for rule in BY_RATIO:
        assert error(rule(), p_table, stopped(drop=False)) < EXACT
        assert error(rule(), p_table, stopped(drop=True)) > 1e-2


def test_impossible_tokens_never_pass_even_at_zero_noise():
    def p(prefix):
        return row(0, 0, 1, 1)

    drafted = chains(lambda prefix: row(1, 1, 1, 1), p, 2)
    for rule in (TokenVerifier, BlockVerifier, MatchVerifier):
        assert impossible_at_zero(rule(), drafted) == []
    assert impossible_at_zero(AcceptsImpossible(), drafted) != []


def test_a_token_that_its_law_excludes_is_never_accepted():
    """q = 0 at the drafted token divides by zero in the ratio; a guard must say no."""
    p = row(1, 1).view(1, 1, 2).repeat(1, 2, 1)
    draft = Draft(torch.tensor([[1]]), Rows(row(1, 0).view(1, 1, 2)), (chain(1),))
    noise = Noise(torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 2), 0.5).double())
    for rule in (TokenVerifier(), BlockVerifier(), SoundBlock()):
        verdict = rule(p, draft, noise)
        assert verdict.accepted.tolist() == [0]
        assert verdict.token.tolist() == [1]  # what is left of p


def test_residual_without_mass_is_the_target():
    p = row(1, 2, 3)
    assert torch.equal(residual(p, p), p)
    assert torch.equal(without(row(0, 1, 0), torch.tensor(1)), row(0, 1, 0))
    rejected = Noise(torch.ones(1, 1).double(), torch.full((1, 2), 0.4).double())
    draft = Draft(torch.tensor([[0]]), Rows(p.reshape(1, 1, 3)), (chain(1),))
    rows = p.expand(1, 2, 3)
    for rule in BY_RATIO:
        assert int(rule()(rows, draft, rejected).token) == 1
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
    assert error(
        TokenVerifier(), lambda _: target, chains(lambda _: draft, lambda _: target, 1)
    ) < (EXACT)


@pytest.mark.parametrize("rule", BY_RATIO)
@settings(max_examples=40)
@given(st.data())
def test_acceptance_is_one_minus_total_variation(rule, data):
    _, p, q = data.draw(rounds(1))
    emitted = round_law(rule(), chains(q, p, 1))
    accepted = sum(mass for said, mass in emitted.items() if len(said) == 2)
    assert accepted == pytest.approx(1 - 0.5 * float((p(()) - q(())).abs().sum()), abs=EXACT)


@settings(max_examples=100)
@given(st.data(), st.sampled_from(LENGTHS))
def test_every_rule_is_the_greedy_one_at_temperature_zero(data, k):
    """Whatever is drafted and however, lossy rules as well."""
    vocab, p, q = data.draw(rounds(k))
    warp = Warp([SamplingParams()], vocab, torch.device("cpu"))
    (drafted,) = chains(q, p, k)
    for c in range(min(20, len(drafted))):
        logits, tokens = drafted.p[c : c + 1].log(), drafted.tokens[c : c + 1]
        noise = Noise(torch.rand(1, k).double(), torch.rand(1, k + 1).double())
        drawn = Draft(tokens, Rows(drafted.q[c : c + 1]), (chain(k),))
        point = Draft(tokens, PointMass(), (chain(k),))
        greedy = GreedyVerifier()(logits, drawn, noise)
        for rule in (TokenVerifier(), BlockVerifier(), MatchVerifier(), TypicalVerifier()):
            said = rule(warp(logits), point, noise)
            assert torch.equal(greedy.accepted, said.accepted)
            assert torch.equal(greedy.token, said.token)
            assert torch.equal(greedy.path, said.path)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 2, 3]))
def test_typical_acceptance_takes_the_likely_for_certain(data, k):
    """Its law by the definition: likely draft tokens stay, then one is drawn from p."""
    vocab, p, _ = data.draw(rounds(k))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=k, max_size=k))
    kept = []
    for token in tokens:
        likely = p(tuple(kept))
        entropy = -float((likely * likely.clamp_min(1e-300).log()).sum())
        if float(likely[token]) <= min(0.09, 0.3 * 2.718281828459045**-entropy):
            break
        kept.append(token)
    last = p(tuple(kept))
    want = {(*kept, t): float(last[t]) for t in last.nonzero().flatten().tolist()}
    got = round_law(TypicalVerifier(), certain(p, tokens))
    assert got == pytest.approx(want, abs=EXACT)


def test_typical_acceptance_is_lossy():
    assert not TypicalVerifier.lossless
    assert error(TypicalVerifier(), p_table, chains(q_table, p_table, 2)) > 0.05


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
