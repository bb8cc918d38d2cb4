"""Formulas are held against rounds that are played, and so are the widespread wrong ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outpace import OptionError, Stats
from outpace.audit.enumeration import Drafted, round_law
from outpace.models.cache import KVCache
from outpace.planner import (
    ModelShape,
    RoundTimes,
    acceptance_rate,
    alpha_for,
    alpha_iid,
    alpha_of_rate,
    alpha_of_rows,
    alphas_of,
    best_k,
    break_even,
    break_even_any,
    constant_price,
    interval,
    match_alpha_of_rows,
    memory,
    most_speedup,
    operations_ratio,
    speedup,
    speedup_iid,
    step_by_step,
    tokens_block,
    tokens_by_depth,
    tokens_counted,
    tokens_iid,
    tokens_over_texts,
    wasted_flops,
)
from outpace.planner.intervals import t_quantile
from outpace.planner.simulation import emitted, texts, verified, verified_tree
from outpace.trees import PassTimes, chain, expected_tokens, k_ary
from outpace.verifiers import BlockVerifier, MatchVerifier, TokenVerifier

ROUNDS = 40_000
EXACT = 1e-12
P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
EASY_AND_HARD = (0.9, 0.6, 0.3)


def agrees(played, value: float) -> bool:
    """Within 4 standard errors of what was played."""
    error = np.std(played) / math.sqrt(len(played))
    return bool(abs(np.mean(played) - value) <= 4 * error)


def overcounted(alpha: float, k: int) -> float:
    """Wrong, and widespread: tried tokens and one more, not accepted ones and one more."""
    return (1 - alpha**k) / (1 - alpha) + 1


# --- tokens per round ------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "k"), [(0.7, 5), (0.4, 5), (0.2, 4), (0.8, 4), (0.6, 2)])
def test_tokens_of_equal_chances(alpha, k):
    played = emitted([alpha], k, ROUNDS)
    assert agrees(played, tokens_iid(alpha, k))
    assert tokens_iid(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), abs=EXACT)
    assert not agrees(played, overcounted(alpha, k))
    assert not agrees(played, 1 + k * alpha)


def test_tokens_at_the_ends():
    assert tokens_iid(1, 7) == 8
    assert tokens_iid(0, 7) == tokens_iid(0.9, 0) == 1
    assert tokens_iid(1 - 1e-12, 7) == pytest.approx(8, abs=1e-9)


def test_figures_that_are_quoted():
    """What popular texts say of the same α, K and c, and what is right."""
    assert overcounted(0.7, 5) == pytest.approx(3.77, abs=0.005)
    assert tokens_iid(0.7, 5) == pytest.approx(2.94, abs=0.005)
    quoted = {(0.7, 5, 0.2): (1.89, 1.47), (0.4, 5, 0.2): (1.32, 0.83), (0.2, 4, 0.5): (0.75, 0.42)}
    for (alpha, k, c), (said, right) in quoted.items():
        played = emitted([alpha], k, ROUNDS) / (k * c + 1)
        assert overcounted(alpha, k) / (k * c + 1) == pytest.approx(said, abs=0.005)
        assert speedup_iid(alpha, k, c) == pytest.approx(right, abs=0.005)
        assert agrees(played, speedup_iid(alpha, k, c))
        assert not agrees(played, said)
    for alpha, right in ((0.8, 2.40), (0.6, 1.65), (0.4, 1.18), (0.2, 0.89)):
        played = emitted([alpha], 4, ROUNDS) / 1.4
        assert speedup_iid(alpha, 4, 0.1) == pytest.approx(right, abs=0.005)
        assert agrees(played, speedup_iid(alpha, 4, 0.1))
        assert not agrees(played, (1 + 4 * alpha) / 1.4)


def test_tokens_by_depth():
    alphas = (0.9, 0.5, 0.8)
    assert tokens_by_depth(alphas) == pytest.approx(1 + 0.9 + 0.45 + 0.36, abs=EXACT)
    assert tokens_by_depth(alphas, 2) == pytest.approx(1 + 0.9 + 0.45, abs=EXACT)
    assert tokens_by_depth(alphas, 4) == pytest.approx(1 + 0.9 + 0.45 + 0.36 + 0.288, abs=EXACT)
    assert tokens_by_depth([]) == tokens_by_depth([], 0) == 1
    played = emitted(alphas, 5, ROUNDS)
    assert agrees(played, tokens_by_depth(alphas, 5))
    assert not agrees(played, tokens_iid(float(np.mean(alphas)), 5))


@pytest.mark.parametrize("tree", [k_ary([2, 2]), k_ary([3]), chain(3)])
def test_trees_have_their_formula_beside_them(tree):
    """Of children that are certain the one of rank b is accepted with p of its token."""
    p, ranks = (0.45, 0.35, 0.2), max(1, tree.parents.count(-1))
    tokens = [i - tree.parents.index(parent) for i, parent in enumerate(tree.parents)]
    played = verified_tree(TokenVerifier(), p, tokens, tree, 20_000)
    assert agrees(played, expected_tokens(tree, [p[:ranks]]))
    if ranks > 1:  # as if siblings did not exclude each other
        level = 1 - math.prod(1 - x for x in p[:ranks])
        assert not agrees(played, tokens_iid(level, tree.depth))


# --- block verification ----------------------------------------------------------------------


def enumerated(p, q, k: int) -> float:
    """The twin: tokens per round of the rule itself, over every draft and every outcome."""
    total = 0.0
    rows = torch.tensor(p, dtype=torch.float64).expand(1, k + 1, -1).contiguous()
    law = torch.tensor(q, dtype=torch.float64).expand(1, k, -1).contiguous()
    for draft in itertools.product([x for x in range(len(q)) if q[x]], repeat=k):
        mass = math.prod(q[x] for x in draft)
        drafted = Drafted(torch.ones(1).double(), torch.tensor([draft]), law, rows, chain(k))
        found = round_law(BlockVerifier(), [drafted])
        total += mass * sum(len(said) * chance for said, chance in found.items())
    return total


@pytest.mark.parametrize(
    ("p", "q", "k"),
    [
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 3),
        ((0.6, 0.0, 0.4), (0.1, 0.5, 0.4), 2),
        ((0.3, 0.7), (1.0, 0.0), 3),
        (P, Q, 3),
        (P, P, 2),
    ],
)
def test_tokens_of_block_verification_are_those_of_the_rule(p, q, k):
    assert tokens_block(p, q, k) == pytest.approx(enumerated(p, q, k), abs=1e-9)


def test_tokens_of_block_verification_are_played():
    played = verified(BlockVerifier(), P, Q, 4, ROUNDS)
    assert agrees(played, tokens_block(P, Q, 4))
    assert not agrees(played, tokens_iid(alpha_of_rows(P, Q), 4))
    assert not agrees(verified(TokenVerifier(), P, Q, 4, ROUNDS), tokens_block(P, Q, 4))


def test_alpha_does_not_determine_block_verification():
    """The papers' pair, 11/9 accepted instead of 10/9, and one of the same α that gains nothing."""
    pairs = (((1 / 3, 2 / 3), (2 / 3, 1 / 3)), ((2 / 3, 1 / 3), (1.0, 0.0)))
    assert [alpha_of_rows(*pair) for pair in pairs] == pytest.approx([2 / 3, 2 / 3])
    assert [tokens_block(*pair, 2) for pair in pairs] == pytest.approx([20 / 9, 19 / 9])
    assert tokens_iid(2 / 3, 2) == pytest.approx(19 / 9)


rows_of_four = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)


@given(rows_of_four, rows_of_four, st.integers(0, 6))
def test_block_lies_between_token_verification_and_the_line(p, q, k):
    p, q = ([x / sum(row) for x in row] for row in (p, q))
    alpha, tokens = alpha_of_rows(p, q), tokens_block(p, q, k)
    assert tokens_iid(alpha, k) - 1e-9 <= tokens <= 1 + k * alpha + 1e-9
    assert k > 1 or tokens == pytest.approx(tokens_iid(alpha, k))


# --- α ---------------------------------------------------------------------------------------


def test_which_chance_belongs_to_which_rule():
    by_token = verified(TokenVerifier(), P, Q, 4, ROUNDS)
    by_match = verified(MatchVerifier(), P, Q, 4, ROUNDS)
    least, product = tokens_iid(alpha_of_rows(P, Q), 4), tokens_iid(match_alpha_of_rows(P, Q), 4)
    assert agrees(by_token, least)
    assert agrees(by_match, product)
    assert not agrees(by_token, product)
    assert not agrees(by_match, least)


def test_the_acceptance_rate_is_not_alpha():
    """What stands behind a rejection was proposed, and counts as rejected."""
    alpha, k = 0.7, 5
    (counts,) = texts([alpha], k, ROUNDS)
    assert alpha_iid([counts]) == pytest.approx(alpha, abs=4 * 0.5 / math.sqrt(ROUNDS))
    assert counts.acceptance_rate == pytest.approx(acceptance_rate(tokens_iid(alpha, k), k), 0.02)
    assert counts.acceptance_rate < 0.4
    played = emitted([alpha], k, ROUNDS)
    rate = acceptance_rate(float(played.mean()), k)
    assert agrees(played, tokens_iid(alpha_of_rate(rate, k), k))
    assert agrees(played, 1 + k * rate)  # of the rate the line is true
    assert not agrees(played, tokens_iid(rate, k))


@given(st.floats(0, 1), st.integers(1, 12))
def test_alpha_is_found_again(alpha, k):
    assert tokens_iid(alpha_for(tokens_iid(alpha, k), k), k) == pytest.approx(tokens_iid(alpha, k))
    rate = acceptance_rate(tokens_iid(alpha, k), k)
    assert 0 <= rate <= alpha + EXACT
    assert alpha_of_rate(rate, k) == pytest.approx(alpha, abs=1e-6)


def test_counts_of_drafts_that_differ_in_length():
    """Every other round drafts one token, always right; the others three, which never are."""
    counts = Stats()
    for _ in range(10):
        counts.count(1, 1, 2, 1, ended=True)
        counts.count(3, 0, 1, 3)
        counts.count(0, 0, 1, 0)
    assert alphas_of([counts]) == (0.5,)
    assert tokens_counted([counts]) == pytest.approx(counts.tokens_per_pass)
    assert tokens_by_depth(counts.alpha) > tokens_counted([counts])  # all would be drafted for


def test_counts_of_one_length_are_the_product():
    counts = texts(EASY_AND_HARD, 4, 500)
    alphas = alphas_of(counts)
    assert tokens_by_depth(alphas) == pytest.approx(tokens_counted(counts), abs=EXACT)
    assert list(alphas) == sorted(alphas)  # what is easy gets deep
    assert alphas_of([Stats(rounds=3)]) == ()


# --- texts that differ -----------------------------------------------------------------------


def test_texts_that_differ():
    runs = [texts(EASY_AND_HARD, 8, 2000, seed) for seed in range(40)]
    played = [tokens_counted(run) for run in runs]
    each = [tokens_iid(alpha, 8) for alpha in EASY_AND_HARD]
    assert agrees(played, tokens_over_texts(each))
    assert agrees(played, tokens_over_texts(each, [7, 7, 7]))
    assert not agrees(played, float(np.mean(each)))
    assert not agrees(played, tokens_iid(float(np.mean(EASY_AND_HARD)), 8))
    price = constant_price(0.1)(8)
    took = [sum(price * text.rounds / text.emitted for text in run) for run in runs]
    ratios = [3 / seconds for seconds in took]  # all plain passes over all rounds
    assert agrees(ratios, speedup(tokens_over_texts(each), price))
    assert not agrees(ratios, float(np.mean([tokens / price for tokens in each])))


def test_another_k_follows_from_each_text_and_not_from_all():
    played = [tokens_counted(texts(EASY_AND_HARD, 8, 2000, seed)) for seed in range(40)]
    shorter = [text for seed in range(40) for text in texts(EASY_AND_HARD, 4, 2000, 100 + seed)]
    each = [tokens_by_depth(alphas_of([text]), 8) for text in shorter]
    assert agrees(played, tokens_over_texts(each))
    assert not agrees(played, tokens_by_depth(alphas_of(shorter), 8))


# --- speedup ---------------------------------------------------------------------------------


def roofline(rows: float, batch: float) -> float:
    return max(1.0, rows * batch / 32)


MACHINE = RoundTimes(roofline, step_by_step(lambda rows, batch: 0.1 * roofline(rows, batch)))


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_rows_and_batch_cost_time(batch):
    """Sequences emit each their own number of tokens, and pay one pass together."""
    alphas, k = [(0.9, 0.7)[i % 2] for i in range(batch)], 4
    tokens = np.sum([emitted([alpha], k, 4000, i) for i, alpha in enumerate(alphas)], 0)
    seconds = sum(0.1 * max(1, batch / 32) for _ in range(k)) + max(1, (k + 1) * batch / 32)
    played = tokens / seconds / (batch / max(1, batch / 32))
    each = [tokens_iid(alpha, k) for alpha in alphas]
    assert agrees(played, speedup(each, MACHINE.price(batch)(k)))
    assert not agrees(played, speedup(each, constant_price(0.1)(k)))


def test_the_best_length_shrinks_with_the_batch():
    found = [best_k(lambda k: tokens_iid(0.8, k), MACHINE.price(b), 16)[0] for b in (1, 8, 16, 32)]
    assert found == [6, 3, 1, 0]
    price = MACHINE.price(8)
    by_hand = [speedup(tokens_iid(0.8, k), price(k)) for k in range(17)]
    assert best_k(lambda k: tokens_iid(0.8, k), price, 16) == (3, pytest.approx(max(by_hand)))
    assert by_hand[0] == 1
    assert best_k(lambda k: tokens_iid(0.05, k), constant_price(0.1), 8) == (0, 1.0)
    assert best_k(lambda k: 1.0 + k, constant_price(0.1), 0) == (0, 1.0)


def played_speedups(alpha: float, price) -> list[np.ndarray]:
    """By K from 0, of rounds that are played."""
    return [emitted([alpha], k, ROUNDS, seed=k) / price(k) for k in range(17)]


def is_best(played, k: int) -> bool:
    """Whether none is faster than this K by more than 4 standard errors."""
    gaps = [(np.mean(p) - np.mean(played[k]), np.var(p) + np.var(played[k])) for p in played]
    return all(gap <= 4 * math.sqrt(var / ROUNDS) for gap, var in gaps)


@pytest.mark.parametrize("alpha", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("price", [constant_price(0.1), MACHINE.price(8), MACHINE.price(16)])
def test_the_best_length_is_that_of_rounds_that_are_played(alpha, price):
    played = played_speedups(alpha, price)
    k, promised = best_k(lambda k: tokens_iid(alpha, k), price, 16)
    assert is_best(played, k)
    assert agrees(played[k], promised) or k == 0


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_the_best_length_is_another_where_tokens_do_not_depend_on_those_before(alpha):
    price = constant_price(0.1)
    wrong = best_k(lambda k: 1 + k * alpha, price, 16)[0]
    assert not is_best(played_speedups(alpha, price), wrong)


def test_the_best_length_for_one_sequence_is_not_that_of_many():
    played = played_speedups(0.8, MACHINE.price(16))
    assert not is_best(played, best_k(lambda k: tokens_iid(0.8, k), MACHINE.price(1), 16)[0])


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("price", [constant_price(0.1), MACHINE.price(8)])
def test_rounds_that_are_played_at_break_even_gain_nothing(k, price):
    alpha = break_even(price, k)
    assert agrees(emitted([alpha], k, ROUNDS) / price(k), 1.0)
    for other in (alpha - 0.05, alpha + 0.05):
        assert not agrees(emitted([other], k, ROUNDS) / price(k), 1.0)
    if k > 1:  # c is break-even for K = 1 alone
        assert not agrees(emitted([0.1], k, ROUNDS) / price(k), 1.0)


@pytest.mark.parametrize("c", [0.05, 0.2, 0.9])
def test_break_even_of_constant_costs_is_c(c):
    price = constant_price(c)
    assert break_even(price, 1) == pytest.approx(c)
    assert break_even_any(price, 12) == (1, pytest.approx(c))
    for k in (2, 5):
        alpha = break_even(price, k)
        assert alpha > c
        assert speedup_iid(alpha, k, c) == pytest.approx(1)
        assert speedup_iid(alpha - 0.01, k, c) < 1 < speedup_iid(min(1, alpha + 0.01), k, c)
    assert speedup_iid(c + 0.05, 1, c) >= (1 + c + 0.05) / (1 + c)  # corollary 3.9's bound


def test_break_even_of_measured_costs_is_not_c():
    price = MACHINE.price(16)  # c is 0.1
    assert break_even(price, 1) == pytest.approx(0.1)
    assert break_even(price, 4) == pytest.approx(0.7236, abs=1e-3)
    assert break_even(MACHINE.price(32), 1) is None
    assert break_even_any(MACHINE.price(32), 16) is None
    jump = RoundTimes(lambda rows, batch: 1.0 if rows == 1 else 2.2, lambda k, batch: 0.1)
    assert break_even(jump.price(), 1) is None
    k, alpha = break_even_any(jump.price(), 16)
    assert k > 1
    assert speedup(tokens_iid(alpha, k), jump.price()(k)) == pytest.approx(1)
    assert break_even(constant_price(0.0, begun=0.5), 2) == 0.0


@given(st.floats(0, 1), st.integers(0, 10), st.floats(0, 2))
def test_nothing_exceeds_the_bound(alpha, k, c):
    assert speedup_iid(alpha, k, c) <= most_speedup(k, constant_price(c)) * (1 + EXACT)
    assert most_speedup(k, constant_price(c)) * c <= max(1, c) * (1 + EXACT)


def test_the_bound_is_reached_and_rises_to_one_over_c():
    price = constant_price(0.1)
    assert most_speedup(4, price) == pytest.approx(5 / 1.4)
    assert speedup(emitted([1.0], 4, 10).tolist(), price(4)) == pytest.approx(5 / 1.4)
    assert most_speedup(10_000, price) == pytest.approx(10, rel=1e-2)


# --- measured passes -------------------------------------------------------------------------


def test_passes_lie_on_lines_between_what_was_measured():
    times = PassTimes({(1, 1): 1.0, (5, 1): 2.0, (1, 9): 3.0, (5, 9): 8.0})
    assert times(1) == 1.0
    assert times(3) == 1.5
    assert times(5, 9) == 8.0
    assert times(3, 5) == pytest.approx((1.5 + 5.5) / 2)
    assert times(9) == 3.0  # on with the last slope
    assert times(1, 17) == 5.0
    assert PassTimes({(1, 1): 2.0})(40, 8) == 2.0
    falls = PassTimes({(1, 1): 2.0, (4, 1): 1.0})
    assert falls(9) == 1.0


def test_rounds_take_what_their_passes_do():
    target = PassTimes({(1, 1): 1.0, (5, 1): 1.4, (1, 8): 1.5, (5, 8): 4.0})
    draft = PassTimes({(1, 1): 0.1, (1, 8): 0.2})
    times = RoundTimes(target, step_by_step(draft), around=0.05)
    assert times.seconds(4) == pytest.approx(0.4 + 1.4 + 0.05)
    assert times.seconds(4, 8) == pytest.approx(0.8 + 4.0 + 0.05)
    assert times.seconds(0, 8) == 1.5
    assert times.price(8)(4) == pytest.approx(4.85 / 1.5)
    assert times.price(8)(0) == 1.0
    at_once = RoundTimes(target, lambda k, batch: draft(1, batch))  # heads, one pass
    assert at_once.seconds(4) == pytest.approx(1.5)


# --- memory and arithmetic -------------------------------------------------------------------

SMALL = ModelShape(parameters=1000, layers=2, heads=4, kv_heads=2, head_dim=8, weight_bytes=1.0)
LARGE = ModelShape(parameters=9000, layers=4, heads=8, kv_heads=2, head_dim=8, lookup=1000)


def test_memory_is_that_of_tensors():
    keys = torch.empty(LARGE.layers, 2, 3, 100, LARGE.kv_heads, LARGE.head_dim, dtype=torch.half)
    found = memory(LARGE, SMALL, 100, 3)
    assert found.target_cache == keys.nbytes
    assert (found.target_weights, found.draft_weights) == (18_000, 1000)
    assert found.draft_cache == keys.nbytes / 2
    assert found.total == 18_000 + 1000 + 1.5 * keys.nbytes
    assert found.added == (1000 + keys.nbytes / 2) / (18_000 + keys.nbytes)
    assert memory(LARGE, None, 100).added == 0
    heads = 4 * 2 * 8 * 8 * 100 * 2 * 3  # of query heads, as if keys were not shared
    assert found.target_cache != heads


def test_memory_is_that_of_a_cache_that_is_held():
    cache = KVCache(
        3, 200, LARGE.layers, LARGE.kv_heads, LARGE.head_dim, torch.half, torch.device("cpu")
    )
    cache.reserve([0, 1, 2], 100)
    held = sum(layer.nbytes for layer in cache.storage)
    assert cache.capacity >= 100
    assert memory(LARGE, None, cache.capacity, 3).target_cache == held


def test_flops_are_those_that_a_counter_sees():
    """A row of one attention layer and one matrix, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    heads, dim, context = 4, 8, 50
    shape = ModelShape(16 * 32, layers=1, heads=heads, kv_heads=heads, head_dim=dim)
    q, kv = torch.randn(heads, 1, dim), torch.randn(heads, context, dim)
    with FlopCounterMode(display=False) as counter:
        torch.randn(1, 16) @ torch.randn(16, 32)
        (q @ kv.transpose(1, 2)).softmax(-1) @ kv
    assert shape.flops(context) == counter.get_total_flops()
    assert LARGE.flops(0) == 2 * 8000


def test_arithmetic_that_is_done_for_nothing():
    alpha, k, target, draft = 0.8, 4, 100.0, 15.0
    tokens = emitted([alpha], k, ROUNDS)
    mean = tokens_iid(alpha, k)
    assert agrees(
        (k + 1 - tokens) * target + (k - (tokens - 1)) * draft, wasted_flops(mean, k, target, draft)
    )
    done = np.full(ROUNDS, k * draft + (k + 1) * target) / target
    ratio = done.sum() / tokens.sum()
    spread = (done - ratio * tokens) / tokens.mean() + ratio
    assert agrees(spread, operations_ratio(mean, k, draft / target))
    assert operations_ratio(mean, k, 0.15) == pytest.approx(0.2 * (4 * 0.15 + 5) / (1 - 0.8**5))
    assert not agrees(spread, 1 + k * draft / target)  # as if scoring more rows were free


# --- intervals -------------------------------------------------------------------------------

RUNS = 500


@pytest.fixture(scope="module")
def held() -> dict[str, float]:
    """How often 95 % intervals from ten prompts hold what they say."""
    truth = tokens_counted(texts(EASY_AND_HARD * 5000, 4, 60, 1))
    rng, hits = np.random.default_rng(0), {"mean": 0, "coming": 0, "rounds": 0}
    for run in range(RUNS):
        seen, later = (texts(rng.choice(EASY_AND_HARD, 10), 4, 60, 2 * run + i) for i in (2, 3))
        found = interval(seen)
        assert found.value == tokens_counted(seen)
        hits["mean"] += found.low <= truth <= found.high
        coming = interval(seen, coming=10)
        hits["coming"] += coming.low <= tokens_counted(later) <= coming.high
        low, high = as_if_independent(seen)
        hits["rounds"] += low <= truth <= high
    return {name: count / RUNS for name, count in hits.items()}


def as_if_independent(counts) -> tuple[float, float]:
    """Wrong, and widespread: rounds of one text are counted as if they were of any."""
    rounds = sum(count.rounds for count in counts)
    at = [sum(count.accepted_at[d] for count in counts) / rounds for d in range(4)]
    variance = sum((2 * d + 1) * share for d, share in enumerate(at)) - sum(at) ** 2
    half = 1.96 * math.sqrt(variance / rounds)
    return 1 + sum(at) - half, 1 + sum(at) + half


def test_intervals_hold_the_truth_as_often_as_they_say(held):
    error = math.sqrt(0.95 * 0.05 / RUNS)
    assert held["mean"] == pytest.approx(0.95, abs=4 * error)
    assert held["coming"] == pytest.approx(0.95, abs=4 * error)
    assert held["rounds"] < 0.6


def test_intervals_of_other_figures_and_levels():
    seen = texts(EASY_AND_HARD * 3, 4, 60)
    price = constant_price(0.1)(4)
    plain, fast = interval(seen), interval(seen, lambda c: speedup(tokens_counted(c), price))
    assert fast == pytest.approx([x / price for x in plain])
    wide = interval(seen, level=0.99)
    assert wide.low < plain.low < plain.value < plain.high < wide.high
    assert interval(seen[:1] * 4)[1:] == pytest.approx((tokens_counted(seen[:1]),) * 2)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_students_quantiles(level):
    for freedom in (1, 2, 3, 4, 9, 10, 63, 500):
        expected = stats.t.ppf((1 + level) / 2, freedom)
        assert t_quantile(level, freedom) == pytest.approx(expected, rel=1e-9)


# --- what cannot be --------------------------------------------------------------------------

SOME = texts(EASY_AND_HARD, 2, 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokens_iid(1.1, 3), "α must be a probability from 0 to 1, not 1.1"),
        (lambda: tokens_iid(math.nan, 3), "α must be a probability"),
        (lambda: tokens_iid("0.5", 3), "α must be a probability"),
        (lambda: tokens_iid(0.5, -1), "k must be a whole number >= 0"),
        (lambda: tokens_iid(0.5, 2.5), "k must be a whole number >= 0"),
        (lambda: tokens_by_depth([], 2), "there is no α to go by"),
        (lambda: tokens_block([0.5, 0.6], [1, 0], 2), "p is no row of probabilities"),
        (lambda: tokens_block([1.0], [0.5, 0.5], 2), "p has 1 tokens and q 2"),
        (lambda: alpha_of_rows([1.0], [[1.0]]), "q is no row of probabilities"),
        (lambda: match_alpha_of_rows([-1.0, 2.0], [1, 0]), "p is no row of probabilities"),
        (lambda: tokens_over_texts([]), "give tokens per round of one text or more"),
        (lambda: tokens_over_texts([2.0], [1, 2]), "and a length for each"),
        (lambda: tokens_over_texts([0.5]), "a round emits at least one token"),
        (lambda: tokens_over_texts([2.0], [0]), "a text's length must be above 0"),
        (lambda: tokens_counted([Stats()]), "no round was counted"),
        (lambda: alpha_iid([Stats(rounds=3)]), "no round with a draft was counted"),
        (lambda: alpha_for(3.5, 2), "a round with k=2 emits 1 to 3 tokens, not 3.5"),
        (lambda: acceptance_rate(2, 0), "k must be a whole number >= 1"),
        (lambda: alpha_of_rate(-0.1, 3), "an acceptance rate must be a probability"),
        (lambda: constant_price(-0.1), "c must be a cost of 0 or more"),
        (lambda: constant_price(0.1, 1.0), "begun must be a share of the pass"),
        (lambda: speedup([], 1.0), "tokens per round must be finite numbers"),
        (lambda: speedup(2.0, 0.0), "a round's price must be above 0"),
        (lambda: best_k(lambda k: 1.0, constant_price(0.1), -1), "k_max must be a whole number"),
        (lambda: break_even(constant_price(0.1), 0), "k must be a whole number >= 1"),
        (lambda: break_even_any(constant_price(0.1), 0), "k_max must be a whole number >= 1"),
        (lambda: MACHINE.price(0), "batch must be a whole number >= 1"),
        (lambda: RoundTimes(roofline, roofline, -1.0), "around must be a cost of 0 or more"),
        (lambda: RoundTimes(lambda r, b: 0.0, roofline).price(), "a plain pass cannot take 0.0"),
        (lambda: PassTimes({}), "no timed pass was measured"),
        (lambda: PassTimes({(1, 0): 1.0}), "the batch of a pass must be a whole number >= 1"),
        (lambda: PassTimes({(0, 1): 1.0}), "rows of a timed pass must be a whole number >= 1"),
        (lambda: PassTimes({(1, 1): 0.0}), "a timed pass takes no time"),
        (lambda: PassTimes({(1, 1): 1.0, (5, 1): 1.0, (1, 8): 1.0}), "5 rows are missing for b"),
        (lambda: ModelShape(0, 1, 1, 1, 1), "parameters must be a whole number >= 1"),
        (lambda: ModelShape(9, 1, 1, 1, 1, lookup=9), "all parameters are looked up"),
        (lambda: ModelShape(9, 1, 1, 1, 1, cache_bytes=0), "cache_bytes must be above 0"),
        (lambda: memory(SMALL, None, -1), "positions must be a whole number >= 0"),
        (lambda: wasted_flops(9.0, 4, 1.0, 1.0), "a round with k=4 emits 1 to 5 tokens"),
        (lambda: operations_ratio(2.0, 4, -1.0), "the ratio of operations must be 0 or more"),
        (lambda: interval(SOME[:1]), "an interval needs two prompts or more"),
        (lambda: interval(SOME, level=95), "level must lie between 0 and 1"),
        (lambda: interval(SOME, coming=0), "coming must be a whole number >= 1"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(OptionError, match=message):
        call()


def test_too_many_joint_ratios_are_refused():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(3000)), rng.dirichlet(np.ones(3000))
    with pytest.raises(OptionError, match="joint ratios are too many to follow: give rows of"):
        tokens_block(p, q, 3)
