"""Coupled draws: their law, how often they agree, and that no drafter shows in the text."""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outpace import SamplingParams
from outpace.audit.enumeration import worst_error
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.sampling import DraftNoise, Keys, exponentials, race, races
from outpace.trees import chain
from outpace.types import Draft, PointMass, Tree
from outpace.verifiers import CoupledVerifier, MatchVerifier, Noise

EXACT = 1e-12
V = 4
TARGET = MarkovModel.random(V, 2, 0)
OTHER = MarkovModel.random(V, 2, 1)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * OTHER.table)
KEYS = Keys(torch.tensor([7]), torch.tensor([0]))
FIRST = torch.zeros(1, 1, dtype=torch.int64)


def row(*weights: float) -> torch.Tensor:
    w = torch.tensor(weights, dtype=torch.float64)
    return w / w.sum()


laws = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any).map(lambda w: row(*w))


@contextmanager
def races_at():
    """A race as a function of p and given times."""
    with pytest.MonkeyPatch.context() as patch:
        given_times: list[torch.Tensor] = []
        patch.setattr(races, "exponentials", lambda *args: given_times[-1].view(1, 1, -1))

        def winner(p: torch.Tensor, times: torch.Tensor) -> int:
            given_times.append(times)
            return int(race(p.view(1, 1, -1), KEYS, FIRST))

        yield winner


def chance(wins, size: int, token: int) -> float:
    """P(`wins`) over independent Exp(1) times, from calls of it alone.

    Holds for what is so exactly while every other time exceeds the token's own by
    some factor: 1 / (1 + the sum of the factors). They are found by bisection.
    """
    slow = torch.full((size,), 1e300, dtype=torch.float64)
    slow[token] = 1.0
    if not wins(slow):
        return 0.0
    factors = []
    for own in (0.1, 1.7):
        found = []
        for other in sorted(set(range(size)) - {token}):
            low, high = -60.0, 60.0  # the factor's logarithm
            for _ in range(64):
                middle = (low + high) / 2
                times = slow.clone()
                times[token], times[other] = own, own * math.exp(middle)
                low, high = (low, middle) if wins(times) else (middle, high)
            found.append(math.exp(high) if high > -59 else 0.0)
        factors.append(found)
    assert factors[0] == pytest.approx(factors[1])  # whatever the own time is
    return 1 / (1 + sum(factors[0]))


@settings(max_examples=25)
@given(laws)
def test_the_winner_has_the_law(p):
    with races_at() as winner:
        for token in range(3):
            got = chance(lambda t, x=token: winner(p, t) == x, 3, token)
            assert got == pytest.approx(float(p[token]), abs=EXACT)


def test_a_race_at_half_speed_is_caught():
    """The control: times divided by the root of p."""
    p = row(5, 3, 2)
    with races_at() as winner:
        got = chance(lambda t: winner(p.sqrt(), t) == 0, 3, 0)
    assert abs(got - float(p[0])) > 0.05


@settings(max_examples=25)
@given(laws, laws)
def test_two_laws_agree_as_often_as_is_promised(p, q):
    """Theorem 2 of Daliri et al.: at least (1 - TV) / (1 + TV)."""
    with races_at() as winner:
        agree = sum(
            chance(lambda t, x=token: winner(p, t) == winner(q, t) == x, 3, token)
            for token in range(3)
        )
    tv = 0.5 * float((p - q).abs().sum())
    assert (1 - tv) / (1 + tv) - EXACT <= agree <= 1 - tv + EXACT


def test_times_are_exponential_and_independent():
    """Of positions, tokens and seeds."""
    keys = Keys(torch.tensor([3, -5]), torch.tensor([9, 2**40]))
    times = exponentials(keys, torch.arange(20).expand(2, 20), 200)
    assert times.shape == (2, 20, 200)
    assert stats.kstest(times.flatten().numpy(), "expon").pvalue > 1e-6
    along = (times[0], times[1]), (times[:, 1:], times[:, :-1]), (times[..., 1:], times[..., :-1])
    for a, b in along:
        assert abs(stats.pearsonr(a.flatten(), b.flatten()).statistic) < 0.05


def together(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P(q's winner is x and p's is w) `[x, w]` of two tokens, by calls of the race."""
    with races_at() as winner:
        both = [chance(lambda t, x=x: winner(p, t) == winner(q, t) == x, 2, x) for x in range(2)]
    return torch.tensor(
        [[both[0], float(q[0]) - both[0]], [float(q[1]) - both[1], both[1]]], dtype=torch.float64
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("drawn", [True, False])
@settings(max_examples=6)
@given(data=st.data())
def test_rounds_keep_the_law(k, drawn, data):
    """Over all that draft and target can win, coupled as they are, for chains of every length."""
    weights = st.lists(st.integers(0, 4), min_size=2, max_size=2).filter(any)
    tables: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(prefix):
        if prefix not in tables:
            tables[prefix] = row(*data.draw(weights)), row(*data.draw(weights))
        return tables[prefix]

    fixed = data.draw(st.lists(st.integers(0, 1), min_size=k, max_size=k))
    law: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(2), repeat=k) if drawn else [tuple(fixed)]:
        laws = [rows(tokens[:i]) for i in range(k + 1)]
        joint = [together(p, q) if drawn else p.expand(2, 2) for p, q in laws[:k]]
        for winners in itertools.product(range(2), repeat=k + 1):
            mass = float(laws[k][0][winners[k]])
            for x, w, j in zip(tokens, winners, joint, strict=False):
                mass *= float(j[x, w])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("outpace.verifiers.coupled.race", lambda *a: torch.tensor([winners]))  # noqa: B023
                p = torch.stack([p for p, _ in laws]).unsqueeze(0)
                draft = Draft(torch.tensor([tokens]), PointMass(), (chain(k),))
                u = torch.zeros(1, k + 1).double()
                verdict = CoupledVerifier()(p, draft, Noise(u[:, :k], u, KEYS))
            said = (*tokens[: int(verdict.accepted)], int(verdict.token))
            law[said] = law.get(said, 0.0) + mass
    assert worst_error(law, lambda prefix: rows(prefix)[0], k + 1) < EXACT


def test_a_tree_is_followed_as_far_as_it_holds_the_winners():
    p = torch.stack([row(5, 3, 2), row(1, 6, 3), row(4, 4, 2), row(1, 1, 8)]).unsqueeze(0)
    tree, keys = Tree((-1, -1, 1)), Keys(torch.tensor([11]), torch.tensor([5]))
    uniforms = torch.rand(1, 4).double()
    for first in range(3):
        tokens = torch.tensor([[(first + 1) % 3, first, 0]])
        noise = Noise(uniforms[:, :3], uniforms, keys)
        verdict = CoupledVerifier()(p, Draft(tokens, PointMass(), (tree,)), noise)
        won = int(race(p[:, :1], keys, FIRST))
        path = verdict.path[0, : int(verdict.accepted)].tolist()
        assert ([int(tokens[0, n]) for n in path[:1]] or [int(verdict.token)]) == [won]


# --- the engine --------------------------------------------------------------------------------

DRAFTERS = {
    "the target itself": lambda: ModelDrafter(TARGET),
    "near": lambda: ModelDrafter(NEAR),
    "unrelated": lambda: ModelDrafter(OTHER),
    "narrow": lambda: ModelDrafter(MarkovModel.random(V - 1, 1, 2)),
    "wide": lambda: ModelDrafter(MarkovModel.random(V + 2, 3, 3)),
}
REQUESTS = [
    ([i % V] * (1 + i % 5), SamplingParams(temperature=1.0, seed=i, max_new_tokens=12 + i % 5))
    for i in range(12)
]


def texts(engine: Engine) -> list[list[int]]:
    submitted = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_depends_on_target_and_seed_alone(drafter):
    plain = texts(Engine(TARGET, None, 0, CoupledVerifier(), max_batch=5))
    for k in (1, 3, 4):
        engine = Engine(TARGET, DRAFTERS[drafter](), k, CoupledVerifier(), max_batch=k)
        assert texts(engine) == plain
        assert 0 < engine.stats.acceptance_rate <= 1
    assert texts(Engine(OTHER, DRAFTERS[drafter](), 2, CoupledVerifier())) != plain


def test_noise_keyed_by_the_round_is_caught(monkeypatch):
    """The control: races keyed by where the round began, as draft noise is, show K."""
    plain = texts(Engine(TARGET, None, 0, CoupledVerifier()))
    honest = races.exponentials
    monkeypatch.setattr(races, "exponentials", lambda keys, d, v: honest(keys, d + 9 * (d > 0), v))
    assert texts(Engine(TARGET, DRAFTERS["near"](), 2, CoupledVerifier())) != plain


def test_drafts_that_race_agree_more_often_than_drafts_that_do_not(monkeypatch):
    """The same laws: coupled, by two draws (`match`), and coupled with noise of the draft's own."""

    def rate(verifier) -> float:
        engine = Engine(TARGET, DRAFTERS["near"](), 1, verifier)
        texts(engine)
        return engine.stats.acceptance_rate

    coupled, match = rate(CoupledVerifier()), rate(MatchVerifier())
    p, q = TARGET.table.flatten(0, 1), NEAR.table.flatten(0, 1)
    tv = 0.5 * (p - q).abs().sum(-1)
    assert coupled > float(((1 - tv) / (1 + tv)).min()) - 0.05
    assert coupled > match + 0.1
    honest = DraftNoise.draw

    def alone(self, p, node, depth):
        return honest(DraftNoise(keys=Keys(self.keys.seeds + 1, self.keys.first)), p, node, depth)

    monkeypatch.setattr(DraftNoise, "draw", alone)
    assert rate(CoupledVerifier()) < coupled - 0.1
