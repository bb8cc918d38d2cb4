"""α by depth: what is estimated, how it fades, and what stands in for what was never seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from outpace.engine.control import Profile, Told
from outpace.engine.control.estimates import Estimates
from outpace.engine.control.survival import (
    FIRST,
    LASTING,
    LONG,
    PASSED,
    STATES,
    Likeness,
    Outlook,
    Policy,
    Survival,
    variances,
)
from outpace.planner.formulas import tokens_by_depth


def seen(alphas, rounds: int = 400, seed: int = 0, memory: float = 1e9) -> Survival:
    """Rounds of a text whose α by depth these are."""
    random, found = np.random.default_rng(seed), Survival(len(alphas), memory)
    for _ in range(rounds):
        accepted = 0
        while accepted < len(alphas) and random.random() < alphas[accepted]:
            accepted += 1
        found.add(accepted + (accepted < len(alphas)), accepted)
        found.pass_by(accepted + 1)
    return found


def test_it_is_accepted_over_reached():
    alphas = (0.8, 0.6, 0.9)
    assert seen(alphas, 4000).alpha() == pytest.approx(alphas, abs=0.04)


def test_depths_that_nobody_reached_are_as_the_one_before():
    found = Survival(4, 1e9)
    assert found.alpha() == pytest.approx([FIRST] * 4)
    for _ in range(200):
        found.add(1, 1)
    first, *others = found.alpha()
    assert first > 0.95
    assert others == pytest.approx([first] * 3)


def test_what_was_not_judged_counts_as_neither():
    """A round whose text ended behind two accepted tokens says nothing of the third."""
    found = Survival(4, 1e9)
    found.add(2, 2)
    assert (found.reached, found.accepted) == ([1, 1, 0, 0], [1, 1, 0, 0])
    found.add(9, 9)  # deeper than is asked about
    assert found.reached == [2, 2, 1, 1]


def test_counts_together_are_those_of_all_rounds():
    """What one has counted, by what another one counted some text ago, at any age of either."""
    for far in (0, 50, 5000):
        whole, early, late = (Survival(2, memory=100) for _ in range(3))
        for one in (whole, early):
            one.add(2, 1)
            one.add(1, 0)
            one.pass_by(30)
            one.add(2, 2)
        whole.pass_by(70 + far)
        early.pass_by(70)
        late.pass_by(far)
        for one in (whole, late):
            one.add(2, 2)
        late.gain(early, far)
        assert late.alpha() == pytest.approx(whole.alpha())
        unfaded = Survival(2, memory=100)
        unfaded.add(2, 2)
        unfaded.gain(early, 0)
        assert (unfaded.alpha() == pytest.approx(whole.alpha())) == (far == 0)


def test_evidence_fades_with_the_text():
    found = Survival(1, memory=100)
    for accepted in [1] * 100 + [0] * 100:
        found.add(1, accepted)
        found.pass_by(2)
    assert found.alpha()[0] < 0.2
    kept = Survival(1, memory=1e9)
    for accepted in [1] * 100 + [0] * 100:
        kept.add(1, accepted)
        kept.pass_by(2)
    assert 0.45 < kept.alpha()[0] < 0.55


def test_very_long_texts_do_not_overflow():
    found = seen((0.5,), 20_000, memory=10)
    assert found.weight < 1e10
    assert 0 < found.reached[0] / found.weight < 20
    assert 0.1 < found.alpha()[0] < 0.9


def test_what_others_show_is_a_beginning():
    """And who does better than they at one depth is expected to at the next."""
    prior = [0.5, 0.4, 0.3]
    assert Survival(3, 1e9).alpha(prior) == pytest.approx(prior)
    better = Survival(3, 1e9)
    for _ in range(30):
        better.add(1, 1)
    found = better.alpha(prior, trust=8.0)
    assert found[0] > 0.85
    assert all(own > other for own, other in zip(found, prior, strict=True))


def chains(alphas: Sequence[float], rounds: int = 30) -> Likeness:
    """Of sequences with these α, which are all drawn anew."""
    rng, found = np.random.default_rng(0), Likeness(1e9)
    for alpha in alphas:
        accepted = (rng.random(rounds) < alpha).astype(int).tolist()
        for before, now in itertools.pairwise(accepted):
            found.add(before, now)
    return found


def test_where_sequences_are_all_alike_others_are_trusted_for_longer():
    """Of Beta(a, b) distributed α the best weight of all others is a + b rounds."""
    rng = np.random.default_rng(1)
    alike, apart = chains([0.6] * 200), chains(rng.choice([0.02, 0.98], 200))
    beta = chains(rng.beta(12.0, 6.0, 2000))
    assert alike.rho == pytest.approx(0, abs=0.05)
    assert apart.rho > 0.85
    assert beta.trust(0, 96.0) == pytest.approx(18.0, rel=0.2)
    assert apart.trust(0, 96.0) == 12.0 < beta.trust(0, 96.0) < alike.trust(0, 96.0) == 24.0
    assert alike.trust(500, 96.0) < alike.trust(0, 96.0)
    assert Likeness(1e9).trust(0, 96.0) == 12.0  # before anything is known


def test_expected_tokens_are_the_sum_of_products():
    for tokens in Outlook.of([[0.5, 0.4]] * STATES, 2).apart:
        assert tokens.tolist() == pytest.approx([1, 1.5, 1.7])


# --- easy and hard stretches ------------------------------------------------------------------


class Played(NamedTuple):
    """Rounds of a text: K and what was emitted of each, and what those of each kind have shown."""

    lengths: list[int]
    emitted: list[int]
    apart: tuple[Survival, ...]

    @property
    def tokens(self) -> float:
        return float(np.mean(self.emitted))

    @property
    def outlook(self) -> Outlook:
        return Outlook.of([s.alpha() for s in self.apart], 16)

    def together(self, *kinds: int) -> Outlook:
        """If these kinds were not told apart."""
        both = Survival(16, 1e9)
        for kind in kinds:
            both.gain(self.apart[kind], 0)
        alphas = [both if kind in kinds else self.apart[kind] for kind in range(STATES)]
        return Outlook.of([s.alpha() for s in alphas], 16)


def play(*ks: int, rounds: int = 60_000, seed: int = 0) -> Played:
    """A text that is hard behind a draft that failed, easy behind others, and easier where nothing
    was refused for long: K for each. Every 96 tokens, on average, another one begins."""
    rng, kind, run = np.random.default_rng(seed), 0, 0
    found = Played([], [], tuple(Survival(16, 1e9) for _ in range(STATES)))
    for _ in range(rounds):
        k, accepted = ks[kind], 0
        while accepted < k and rng.random() < (0.8, 0.9, 0.99)[kind]:
            accepted += 1
        found.lengths.append(k)
        found.emitted.append(accepted + 1)
        found.apart[kind].add(accepted + (accepted < k), accepted)
        goes_on = accepted == k and rng.random() < math.exp(-(accepted + 1) / 96)
        run = run + accepted + 1 if goes_on else 0
        kind = (LASTING if run >= LONG else PASSED) if run else 0
    return found


@pytest.mark.parametrize("ks", [(8, 8, 8), (3, 6, 6), (5, 10, 14), (2, 4, 16)])
def test_what_another_k_would_emit_is_told_by_kinds_of_rounds(ks):
    """By those of K = 4; by all together, as by one chance per depth, it is not, nor by two kinds
    where it goes farther in long stretches."""
    seen, true = play(4, 4, 4), play(*ks, seed=1).tokens

    def error(outlook: Outlook) -> float:
        means = [gains[k] for gains, k in zip(outlook.apart, ks, strict=True)]
        return abs(math.log(float(outlook.shares(*ks) @ means) / true))

    assert error(seen.outlook) < 0.02
    assert error(seen.together(0, PASSED, LASTING)) > 0.04
    assert error(seen.together(PASSED, LASTING)) > 0.03 or ks[1] == ks[2]
    if len({*ks}) == 1:
        assert seen.outlook.tokens[ks[0]] == pytest.approx(true, rel=0.02)


def test_where_rounds_are_independent_all_kinds_are_alike():
    alpha = [0.9, 0.8, 0.7, 0.6]
    outlook = Outlook.of([alpha] * STATES, 6)
    tokens = [tokens_by_depth(alpha, min(k, 4)) for k in range(7)]
    for found in (outlook.tokens, *outlook.apart):
        assert found == pytest.approx(tokens)
    policy = outlook.policy(1.0 + 0.3 * np.arange(7), 6)
    rates = np.array(tokens) / (1.0 + 0.3 * np.arange(7))
    k = int((policy.tokens / policy.seconds).argmax())
    assert k == policy.passed[k] == policy.long[k] == rates.argmax()


def test_how_much_a_round_varies_is_that_of_all_kinds():
    played = play(2, 4, 8)
    outlook, varies = played.outlook, np.var(played.emitted)
    assert outlook.moments(2, 4, 8)[1] == pytest.approx(varies, rel=0.05)
    for gains, k in zip(outlook.apart, (2, 4, 8), strict=True):
        assert variances(gains)[k] < 0.6 * varies  # of one kind


def test_the_three_k_of_most_tokens_per_second_are_found():
    """Each as long as the one before or longer, and behind a draft that passed no more than twice
    as long."""
    outlook = Outlook.of([[0.5] * 16, [0.9] * 16, [0.98] * 16], 16)
    seconds = 4.0 + np.arange(17.0)
    policy = outlook.policy(seconds, 16)
    assert all(
        k <= p <= min(2 * k, q)
        for k, (p, q) in enumerate(zip(policy.passed, policy.long, strict=True))
    )

    def rate(*ks: int) -> float:
        shares = outlook.shares(*ks)
        tokens = [gains[k] for gains, k in zip(outlook.apart, ks, strict=True)]
        return float(shares @ tokens / (shares @ seconds[[*ks]]))

    rates = {
        (k, p, q): rate(k, p, q)
        for k in range(1, 17)
        for p in range(k, min(2 * k, 16) + 1)
        for q in range(p, 17)
    }
    best = max(rates, key=rates.__getitem__)
    k = best[0]
    assert int((policy.tokens / policy.seconds).argmax()) == k
    assert (k, policy.passed[k], policy.long[k]) == best
    assert k < best[1] < best[2]
    for other in range(1, 17):
        found = rates[other, int(policy.passed[other]), int(policy.long[other])]
        assert policy.tokens[other] / policy.seconds[other] == pytest.approx(found)
    kept = outlook.policy(seconds, 16, (3, 4, 9), 0.5)
    assert (kept.passed[3], kept.long[3]) == (4, 9)
    assert kept.passed[6] == policy.passed[6]
    for others in ((3, 4, 9), (0, 0, 0)):  # that promises too little, and nothing that was chosen
        unlike = outlook.policy(seconds, 16, others, 0.9999 if any(others) else 0.1)
        for found, expected in zip(unlike, policy, strict=True):
            assert found.tolist() == expected.tolist()
    less = outlook.policy(seconds, 2, (3, 4, 9), 0.5)
    assert max(less.passed[:3].max(), less.long[:3].max()) <= 2
    assert less.tokens[3:].tolist() == [1.0] * 14  # longer ones are not asked for


def fastest(policy: Policy) -> tuple[int, int, int]:
    """The three K of the best rate."""
    k = int((policy.tokens / policy.seconds).argmax())
    return k, int(policy.passed[k]), int(policy.long[k])


def test_what_it_takes_to_change_k_is_part_of_the_price_of_three_k():
    """Where it takes much, it is changed in long stretches only."""
    seconds, rises = 4.0 + np.arange(17.0), np.full(17, 1.2)
    outlook = play(4, 4, 4).outlook
    free = outlook.policy(seconds, 16)
    ks = k, passed, _ = fastest(free)
    assert k < passed
    played = play(*ks, seed=1)
    lengths = np.array(played.lengths)
    takes = seconds[lengths].mean() + 1.2 * (np.diff(lengths) > 0).mean()
    dear = outlook.policy(seconds, 16, ks, 0.5, rises)  # the same, at that price
    assert (dear.passed[k], dear.long[k]) == ks[1:]
    assert dear.seconds[k] == pytest.approx(takes, rel=0.02)
    assert free.seconds[k] < 0.97 * takes
    k, passed, long = fastest(outlook.policy(seconds, 16, rises=np.full(17, 12.0)))
    assert k == passed < long


def test_what_rounds_take_longer_where_k_changes_is_part_of_the_price_of_three_k():
    seconds, early = 4.0 + np.arange(17.0), np.full(17, 0.1)
    outlook = play(4, 4, 4).outlook
    free = outlook.policy(seconds, 16)
    ks = k, passed, _ = fastest(free)
    assert k < passed
    dear = outlook.policy(seconds, 16, ks, 0.5, early=early)
    assert (dear.passed[k], dear.long[k]) == ks[1:]
    assert dear.seconds[k] == pytest.approx(free.seconds[k] + 0.1)
    one = outlook.policy(seconds, 16, early=20 * early)
    k, passed, long = fastest(one)
    assert k == passed == long
    assert one.seconds[k] == seconds[k]  # it does not change
    kept = outlook.policy(seconds, 16, (k, k, k), 0.999, early=20 * early)
    assert (kept.passed[k], kept.long[k], kept.seconds[k]) == (k, k, seconds[k])


# --- of many sequences ------------------------------------------------------------------------

MEMBERS = [Profile("model", False, 4)]


def told(estimates: Estimates, slot: int, accepted: int, rounds: int, kind: int = 0) -> None:
    for _ in range(rounds):
        estimates.add(Told(slot, 0, kind, accepted + (accepted < 4), accepted))
        estimates.emitted(slot, accepted + 1)


def test_a_new_sequence_begins_with_what_others_have_shown_at_its_temperature():
    estimates = Estimates(MEMBERS, 4)
    estimates.open(0, 0.0)
    told(estimates, 0, 4, 100)
    for slot, key in ((1, 0.0), (2, 1.0)):
        estimates.open(slot, key)
    alike, other = (estimates.tokens(slot, 0, 0)[4] for slot in (1, 2))
    assert alike > 4.5
    assert other == pytest.approx(tokens_by_depth([FIRST] * 4))


def test_what_it_shows_itself_soon_outweighs_that():
    estimates = Estimates(MEMBERS, 4)
    for slot in (0, 1):
        estimates.open(slot, 0.0)
    told(estimates, 0, 4, 200)
    told(estimates, 1, 0, 60)
    one_of_many = estimates.tokens(1, 0, 0)[4]
    for slot in (0, 1):
        assert estimates.alike(slot)
        estimates.part(slot)
    assert estimates.tokens(1, 0, 0)[4] < 1.7 < 2.5 < one_of_many
    assert estimates.tokens(0, 0, 0)[4] > 4


def test_who_runs_no_model_is_known_by_all_rounds_alike():
    """Nobody says in which state the text was."""
    found = {}
    for instant in (True, False):
        estimates = Estimates([Profile("drafter", instant, 16)], 16)
        for slot, reached, accepted in ((0, 2, 1), (1, 16, 16)):
            estimates.open(slot, 0.0)
            for _ in range(40):
                estimates.add(Told(slot, 0, 0, reached, accepted))
                estimates.emitted(slot, accepted + 1)
        estimates.part(1)
        outlook = estimates.outlook(1, 0, 0)
        found[instant] = outlook.tokens[16] / outlook.apart[0][16]
    assert found[True] == pytest.approx(1)
    assert found[False] < 0.97


def test_kinds_of_rounds_are_told_apart():
    """Where others propose much, it is right more often, too."""
    estimates = Estimates(MEMBERS, 4)
    estimates.open(0, 0.0)
    for _ in range(50):
        told(estimates, 0, 4, 1, kind=3)
        told(estimates, 0, 0, 1, kind=0)
    assert estimates.tokens(0, 0, 3)[4] > 4 > 1.6 > estimates.tokens(0, 0, 0)[4]


def test_what_texts_show_at_their_beginning_is_expected_there():
    """Whenever it is told; by what they had emitted by then."""
    starts = {}
    for late in (False, True):
        estimates = Estimates(MEMBERS, 4)
        estimates.open(0, 0.0)
        estimates.emitted(0, 300)
        for _ in range(50):
            estimates.add(Told(0, 0, 0, 1, 0), None if late else 1)
            estimates.add(Told(0, 0, 0, 1, 0), None if late else 10)
            estimates.add(Told(0, 0, 0, 4, 4), None if late else 200)
            estimates.add(Told(0, 0, 0, 4, 4), None if late else 35)  # proposed at 30
        estimates.open(1, 0.0)
        found = []
        for emitted in (0, 10, 60):
            estimates.emitted(1, emitted)
            found.append(float(estimates.tokens(1, 0, 0)[4]))
        starts[late] = found
    first, young, old = starts[False]
    assert first < 1.5 < 2 < young < 3.5 < 4 < old
    assert min(starts[True]) > 2.5  # all of it is said to be of old ones
    assert estimates.length(1) == 70
    assert estimates.length(7) == 0


def test_it_is_said_when_a_sequence_comes_to_another_age():
    estimates = Estimates(MEMBERS, 4)
    estimates.open(0, 0.8)
    ages = [estimates.age(0)]
    changes = []
    for emitted in range(1, 60):
        if estimates.emitted(0, 1):
            changes.append(emitted)
            ages.append(estimates.age(0))
    assert changes == [4, 32]
    assert ages == [2, 1, 0]
    assert not estimates.emitted(7, 40)  # which has ended
