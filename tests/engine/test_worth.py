"""What tokens are worth of sequences that run together, beside rounds that are played."""

from __future__ import annotations

import math

import numpy as np
import pytest
from simulation import Machine, Run, World

from outpace.engine.control import Ask, Controller, Profile, options
from outpace.engine.control.survival import variances
from outpace.engine.control.worth import Promises, Worth

PLAIN, ALONE = 1.3, 1.0


def asks(*left: int) -> list[Ask]:
    return [Ask(slot, 8, rest) for slot, rest in enumerate(left)]


def linear(self: Worth, tokens: np.ndarray, varies: np.ndarray) -> np.ndarray:
    """Each token is worth what the first one of its sequence is."""
    return self.each @ tokens


def played(alpha: float | list[float], k: int, left: int, batch: int, texts: int = 400) -> float:
    """Rounds that drafts of K take until all sequences have ended."""
    alphas = np.broadcast_to(alpha, batch)[:, None]
    rng, rounds = np.random.default_rng(0), []
    for _ in range(texts):
        rest, count = np.full(batch, left), 0
        while rest.max() > 0:
            accepted = (rng.random((batch, k)) < alphas).cumprod(axis=1).sum(axis=1)
            rest, count = rest - accepted - 1, count + 1
        rounds.append(count)
    return float(np.mean(rounds))


def promised(alpha: float, k: int, left: int, batch: int, saved=Worth.saved) -> float:  # type: ignore[no-untyped-def]
    """What is promised of them: all sequences are as far as it is expected of them."""
    gains = np.array([sum(alpha**d for d in range(j + 1)) for j in range(k + 1)])
    tokens, varies = np.tile(gains, (batch, 1)), np.tile(variances(gains), (batch, 1))
    count, done = 0.0, 0.0
    while done < left:
        worth = Worth(1.0, 1.0, asks(*[int(left - done)] * batch))
        more = float(saved(worth, tokens, varies)[k])
        count, done = count + min(1.0, (left - done) / more), done + more
    return count


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("left", [(5,), (100, 100), (100, 60, 20, 1)])
def test_a_token_for_each_is_worth_a_plain_round(left, crowded):
    worth = Worth(PLAIN, ALONE, asks(*left), crowded)
    one = np.ones((len(left), 3))
    assert worth.saved(one, 0 * one) == pytest.approx(PLAIN)
    assert worth.each.sum() == pytest.approx(PLAIN)
    assert worth.emitted(dict.fromkeys(range(len(left)), 1)) == pytest.approx(PLAIN)


def test_where_others_wait_all_tokens_are_worth_the_same():
    worth = Worth(PLAIN, ALONE, asks(100, 10), crowded=True)
    assert worth.each == pytest.approx([PLAIN / 2] * 2)
    assert worth.emitted({0: 1, 1: 5}) == pytest.approx(3 * PLAIN)


def test_the_last_sequence_is_worth_a_round_alone_and_others_a_row():
    worth = Worth(PLAIN, ALONE, asks(200, 20))
    assert worth.each == pytest.approx([ALONE, PLAIN - ALONE], rel=1e-3)
    assert worth.emitted({0: 1, 1: 5}) == pytest.approx(ALONE + 5 * (PLAIN - ALONE))


def test_rounds_save_what_the_text_takes_in_all():
    """However tokens fall to sequences, what their rounds have saved is in all what plain decoding
    takes for them."""
    rng, left = np.random.default_rng(1), [40, 64, 64]
    worth, saved = Worth(PLAIN, PLAIN, asks(*left)), 0.0
    rest = np.array(left)
    while rest.max() > 0:
        tokens = np.minimum(rng.integers(1, 6, 3), rest)
        rest = rest - tokens
        saved += worth.emitted(dict(enumerate(tokens.tolist())))
    assert saved == pytest.approx(64 * PLAIN)


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 4), (0.7, 4), (0.8, 8)])
@pytest.mark.parametrize("left", [64, 128, 512])
def test_drafts_save_as_much_as_is_promised(alpha, k, left):
    rounds = played(alpha, k, left, 4)
    assert promised(alpha, k, left, 4) == pytest.approx(rounds, rel=0.05)
    assert promised(alpha, k, left, 4, linear) < 0.97 * rounds  # as if none were ever the last


@pytest.mark.parametrize("left", [64, 128])
@pytest.mark.parametrize("slow", [0.2, 0.6])
def test_the_first_round_is_promised_what_the_slowest_sequence_goes_by(slow, left, monkeypatch):
    """Seven sequences go well: what rounds save is, to the end, what they save of the eighth."""
    alphas, k = [0.9] * 7 + [slow], 8
    gains = np.array([[sum(a**d for d in range(j + 1)) for j in range(k + 1)] for a in alphas])
    pace = left / played(alphas, k, left, 8)
    worth = Worth(1.0, 1.0, asks(*[left] * 8))
    assert float(worth.saved(gains, variances(gains))[k]) == pytest.approx(pace, rel=0.1)
    monkeypatch.setattr(Worth, "_ends_last", lambda self, tokens: self._shares[:, None])
    assert float(worth.saved(gains, variances(gains))[k]) > 1.3 * pace  # any may be the last


def test_what_became_of_promises_is_believed_and_forgotten():
    now = 0
    promises = Promises(lambda: now)
    assert promises.kept(0, 8) == 1
    for _ in range(40):
        promises.add(0, 8, 2.0, 0.5)
    assert 0.25 < promises.kept(0, 8) < 0.3
    assert promises.kept(0, 4) == promises.kept(1, 8) == 1  # of other rounds that says nothing
    now = 4096
    assert promises.kept(0, 8) > 0.6
    for _ in range(40):
        promises.add(0, 8, 2.0, 3.0)
    assert promises.kept(0, 8) == 1  # what brings more is chosen anyway


def test_variances_are_those_of_rounds():
    rng, alpha, k = np.random.default_rng(2), 0.6, 5
    accepted = (rng.random((200_000, k)) < alpha).cumprod(axis=1)
    gains = np.array([sum(alpha**d for d in range(j + 1)) for j in range(k + 1)])
    seen = [0.0, *(accepted[:, :j].sum(axis=1).var() for j in range(1, k + 1))]
    assert variances(gains) == pytest.approx(seen, rel=0.02)


def pace() -> float:
    """Of batches of eight, that of plain decoding being 1, whose drafts promise a sixth more
    tokens than their rounds take longer."""
    members = [Profile("draft", False, 8)]
    machine = Machine(
        target=lambda rows: 1.0 if rows <= 8 else 1.7, draft=[0.02], reading=[0.0], noise=0.03
    )
    spent, plain = 0.0, 0.0
    for seed in range(6):
        world = World(machine, members, [lambda at, depth: 0.5], batch=8, seed=seed)
        controller = Controller(members, clock=lambda: 0.0)
        for text in range(24):
            run = Run()
            world.generate(controller, 64, run)
            if text >= 8:
                spent, plain = spent + sum(run.seconds), plain + 64
    return plain / spent


def test_batches_are_not_drafted_at_a_loss(monkeypatch):
    assert pace() > 0.98
    monkeypatch.setattr(Promises, "kept", lambda self, member, batch: 1.0)
    assert pace() > 0.98
    monkeypatch.setattr(Worth, "saved", linear)
    monkeypatch.setattr(
        Worth,
        "emitted",
        lambda self, tokens: float(self.each @ [tokens[slot] for slot in self._left]),
    )
    monkeypatch.setattr(options, "HOPE", 0.5 * math.sqrt(8))  # of eight half a deviation
    assert pace() < 0.96


def dear() -> float:
    """The share of rounds that took more than five plain ones, where sixteen sequences always go
    well, once it is known what rounds take."""
    machine = Machine(lambda rows: 5 + 0.3 * rows, draft=[0.01], reading=[0.0])
    members = [Profile("draft", False, 16)]
    world = World(machine, members, [lambda at, depth: 1.0], batch=16, seed=0)
    controller, run = Controller(members, clock=lambda: 0.0), Run()
    for _ in range(32):
        world.generate(controller, 64, run)
    late = np.array(run.seconds[len(run.seconds) // 2 :])
    return float((late > 5.5 * machine.target(16)).mean())


def test_no_more_is_at_stake_than_the_purse_counts(monkeypatch):
    assert dear() < 0.05
    monkeypatch.setattr(options, "HOPE", 2.0)  # of sixteen sequences half a deviation
    assert dear() < 0.05
    monkeypatch.setattr(options, "ONCE", 100.0)
    assert dear() > 0.3
