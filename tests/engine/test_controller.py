"""The controller: never slower than plain decoding, near the best K and drafter, cheap to be so.

Most of this is played: machines, texts and what they take are made up (`simulation`), so that
nothing depends on a clock. Every promise has a controller without the part that keeps it, which
breaks it. What an engine does with the choices is held against engines on Markov models.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from simulation import (
    CHEAP,
    LOOK,
    MODEL,
    Machine,
    Run,
    World,
    alike,
    best_pace,
    steady,
    still,
    target,
)

from conformance_cases import DRAFTERS, MARKOV, NEAR, PROMPT, V
from outpace import SamplingParams
from outpace.drafters import CascadeDrafter, ModelDrafter, NgramDrafter, SuffixDrafter
from outpace.engine import Engine
from outpace.engine.control import (
    Ask,
    Controller,
    Pick,
    Profile,
    Spent,
    Told,
    aftermath,
    controller,
    estimates,
    looks,
    options,
    prices,
    probes,
    purse,
    survival,
)
from outpace.engine.control.along import Along
from outpace.engine.control.estimates import Estimates
from outpace.engine.control.gaps import Gaps
from outpace.engine.control.held import PLAIN, Choice, Held, Question, _Book
from outpace.engine.control.looks import Looks
from outpace.engine.control.plan import late
from outpace.engine.control.prices import Prices
from outpace.engine.control.probes import Probe, Probes
from outpace.engine.control.purse import Purse
from outpace.engine.control.survival import FAILED, Survival
from outpace.engine.control.times import EARLY, MOVED
from outpace.types import Independent, Shape
from outpace.verifiers import TokenVerifier

SEEDS = range(8)
BOTH = [MODEL, LOOK]


def free(rows: int) -> float:
    return 10.0


def generate(world: World, control: Controller, tokens: int = 600, requests: int = 1) -> Run:
    run = Run()
    for _ in range(requests):
        world.generate(control, tokens, run)
    return run


PAIR = Machine(target, [1.0, 0.0], look=[0.0, 0.05], reading=[0.02, 0.0])


# --- never slower -----------------------------------------------------------------------------


HOSTILE = {
    "nothing is right": (CHEAP, MODEL, 0.02),
    "as dear as the target": (Machine(target, [10.3], reading=[0.3]), MODEL, 0.9),
    "a look of a quarter pass": (Machine(target, [0.0], look=[2.6]), LOOK, 0.02),
    "the same, not always wrong": (Machine(target, [0.0], look=[2.6]), LOOK, 0.2),
}


def hostile(name: str, batch: int, kind=Controller, seed: int = 0) -> tuple[Run, float]:
    """Three requests, and the milliseconds per token of plain decoding."""
    machine, member, alpha = HOSTILE[name]
    world = World(machine, [member], [steady(alpha)], batch=batch, seed=seed)
    run = generate(world, still(kind, [member]), 500, 3)
    return run, machine.target(batch) / batch


def slowdown(name: str, batch: int, kind=Controller) -> float:
    """Of three requests from the first token on, over plain decoding."""
    run, plain = hostile(name, batch, kind)
    return run.pace() / plain


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_never_slower_than_plain_decoding(name, batch):
    assert slowdown(name, batch) < 1.03


class NeverPlain(Controller):
    """Drafts one token at least, and looks in every round."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._looks = Looks(self.members, self._prices, always=True)

    def _best(self, options, offered, last):
        option, k = super()._best(options, offered, last)
        return (option, k) if k else (options[-1], 1)


@pytest.fixture
def bottomless(monkeypatch):
    """As if the purse were never empty."""
    monkeypatch.setattr(Purse, "empty", property(lambda self: False))


@pytest.mark.parametrize("name", HOSTILE)
def test_without_k_0_it_is_slower(name, bottomless):
    assert slowdown(name, 4, NeverPlain) > 1.06


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", [name for name in HOSTILE if "dear" not in name])
def test_with_the_worst_choices_the_purse_keeps_it_from_being_slower(name, batch, monkeypatch):
    """But for drafts that take more than some passes, which are not paid in full, and what a
    drafter reads of texts, which probes pay for. The purse counts tokens that were emitted, not
    those that were to be expected."""
    machine, member, alpha = HOSTILE[name]
    monkeypatch.setitem(HOSTILE, name, (replace(machine, reading=[0.0]), member, alpha))
    for seed in range(4):
        run, plain = hostile(name, batch, NeverPlain, seed)
        assert sum(run.seconds) / sum(run.tokens) / plain < 1.04


@pytest.mark.parametrize(("sequences", "lost", "thought"), [(1, 25, 58), (4, 25, 41), (16, 7, 11)])
def test_of_many_sequences_less_may_be_lost(sequences, lost, thought):
    """Rounds that lose as much as plain decoding takes, without and with thoughts."""

    def rounds(thought: float) -> int:
        purse, count = Purse(), 0
        while not purse.empty:
            purse.spent(20.0, 10.0, 10.0, True, thought, sequences=sequences)
            count += 1
        return count

    assert (rounds(0.0), rounds(10.0)) == (lost, thought)


def lost_first(batch: int) -> float:
    """Plain rounds that the worst choices lose in the first 300 tokens of each sequence."""
    machine, member, alpha = HOSTILE["a look of a quarter pass"]
    found = []
    for seed in range(4):
        world = World(machine, [member], [steady(alpha)], batch=batch, seed=seed)
        run = generate(world, still(NeverPlain, [member]), 300)
        plain = machine.target(batch)
        found.append((sum(run.seconds) - sum(run.tokens) * plain / batch) / plain)
    return float(np.mean(found))


def test_worst_choices_for_many_sequences_lose_less_before_they_are_known(monkeypatch):
    most = lost_first(4)
    assert lost_first(16) < most / 2
    monkeypatch.setattr(purse, "_FEW", 16)
    assert lost_first(16) > most / 2


def behind_prompts() -> tuple[float, float]:
    """Of drafts that lose a little in a batch of four, where the first rounds behind a prompt take
    up to twice as long: the mean time of four requests, and what a plain round is taken to take,
    over plain decoding's."""
    times, beliefs = [], []
    machine = Machine(
        lambda rows: 5 + 2 * rows, [4.0], reading=[0.02], behind=(2.0, 1.9, 1.6, 1.3, 1.1)
    )
    plain = machine.target(4) * (128 + sum(f - 1 for f in machine.behind)) / (4 * 128)
    for seed in SEEDS:
        world, control = World(machine, [MODEL], [steady(0.9)], batch=4, seed=seed), still()
        generate(world, control, 128)
        beliefs.append(control._prices.plain(4) / machine.target(4))
        times.append(generate(world, control, 128, 4).pace() / plain)
    return float(np.mean(times)), float(np.mean(beliefs))


def test_rounds_behind_a_prompt_are_not_taken_for_plain_decoding(monkeypatch):
    time, belief = behind_prompts()
    assert time < 1.03
    assert 0.95 < belief < 1.05
    monkeypatch.setattr(controller, "settled", lambda seconds: len(seconds) >= 3)
    assert 0.95 < behind_prompts()[1] < 1.05  # as it is timed again soon
    monkeypatch.setattr(probes, "_TIMINGS", (0, 0))
    time, belief = behind_prompts()
    assert time > 1.06
    assert belief > 1.2


def test_what_drafting_costs_the_plain_rounds_behind_it_is_paid_for_too(monkeypatch):
    """Probes are rarer for it."""
    monkeypatch.setattr(probes, "_IN_VAIN", 0)

    def loss() -> float:
        after = (3.0, 2.5, 2.0, 1.5, 1.2)
        machine = Machine(target, [1.0], reading=[0.02], after=after)
        worlds = (World(machine, [MODEL], [steady(0.02)], batch=4, seed=i) for i in SEEDS)
        return float(np.mean([generate(w, still(), 500, 6).pace(8000) for w in worlds])) / (
            target(4) / 4
        )

    assert loss() < 1.015
    monkeypatch.setattr(Purse, "read", lambda self, seconds, plain: None)  # rarer for that, too
    paid = loss()
    assert paid < 1.025
    monkeypatch.setattr(aftermath, "_BEHIND", 0)
    assert loss() > paid + 0.01


@pytest.mark.parametrize("begun", [True, False])
def test_who_begins_the_pass_is_probed_for_all_sequences(begun):
    """As it runs for all of them, whoever it drafts for. Else one is enough, where all are dear."""
    early = Profile("early exit", False, 8, 0.5, begun=begun)
    share = 0.4 if begun else 0.0
    machine = Machine(
        lambda rows: 10 + rows / 2, [2.0], reading=[0.0], begin=[0.0], per=0.5, begun=share
    )
    probed: set[int] = set()
    for seed in SEEDS:
        world = World(machine, [early], [steady(0.1)], batch=8, seed=seed)
        control = still(members=[early])
        for _ in range(4):  # a sequence alone has drafted before
            control._prices.add([Pick(0, 1)], [Spent({}, 2.0, 0.0, 11.0, 2)])
        for _ in range(4):
            run = generate(world, control, 400)
            before_the_end = run.picks[: len(run.picks) // 2]
            probed |= {sum(p is not None for p in picks) for picks in before_the_end}
    assert (probed == {0, 8}) is begun


def test_probes_for_several_sequences_become_rarer_in_vain(monkeypatch):
    """What they lose is a third of what it would be, and one sequence's stay as they are."""

    def loss(batch: int) -> float:
        machine = Machine(target, [1.0], reading=[0.02])
        worlds = (World(machine, [MODEL], [steady(0.02)], batch=batch, seed=i) for i in SEEDS)
        times = [generate(w, still(), 500, 12).pace(2000 * batch) for w in worlds]
        return float(np.mean(times)) / (target(batch) / batch) - 1

    rare, one = loss(8), loss(1)
    monkeypatch.setattr(probes, "_IN_VAIN", 0)
    assert rare < 0.6 * loss(8)
    assert one == loss(1)


def hardly_at_a_loss() -> float:
    """Drafts of one token that lose a few per cent, where the plain rounds right behind them take
    longer than plain decoding does: the time of texts over that of plain decoding."""
    machine = Machine(target, [5.0], reading=[0.02], after=(1.15, 1.1, 1.08, 1.05, 1.03, 1.02))
    worlds = [World(machine, [MODEL], [steady(a)], seed=i) for a in (0.46, 0.49) for i in SEEDS]
    return float(np.mean([generate(w, still(), 500, 6).pace() for w in worlds])) / target(1)


def test_plain_decoding_is_not_timed_by_the_first_rounds_behind_a_draft(monkeypatch):
    """Drafts seem to pay beside those."""
    assert hardly_at_a_loss() < 1.025
    monkeypatch.setattr(controller, "_MORE_TIMED", 0)
    monkeypatch.setattr(aftermath.Aftermath, "rounds", 0)
    assert hardly_at_a_loss() > 1.033


def recorded() -> float:
    """Times plain decoding, on a device where what runs for the first time takes a hundred times
    as long, as graphs are recorded."""
    machine = Machine(lambda rows: 1.3 if rows < 2 else 1.7, [0.25], reading=[0.002], cold=100.0)
    speedups = []
    for seed in SEEDS:
        world = World(machine, [MODEL], [steady(0.7)], seed=seed)
        speedups.append(machine.target(1) / generate(world, still(), 128, 12).pace())
    return float(np.mean(speedups))


def test_what_takes_long_the_first_time_is_tried_again(monkeypatch):
    assert recorded() > 1.2
    monkeypatch.setattr("outpace.engine.control.times._BEYOND", 9.0)
    assert recorded() < 1.05


@pytest.mark.parametrize(
    ("speed", "seconds", "sequences", "again"),
    [
        (4.0, 2.5, [0], False),
        (4.0, 1.5, [0], True),
        (1.0, 8.0, [0], True),
        (4.0, 2.5, [0, 1], True),
    ],
)
def test_a_probe_goes_on_if_it_was_no_slower_than_what_drafts(speed, seconds, sequences, again):
    """For a single sequence. Seven of eight tokens were right, in twice as long to read the text:
    instead of plain decoding that is enough, and so it is for several, which draft a token each."""
    probes = Probes()
    probes.spent(1.0, 1.0, 1.0)
    probes.now = Probe(0, 8, sequences, speed, False, reached=8, passed=7)
    probes.spent(3 * seconds, 8.0, 1.0, reading=2 * seconds)
    assert probes.over() is not again


def test_prompts_of_ordinary_lengths_are_much_to_read_alike():
    """By how much that is for each token of the text to come."""
    assert [late({0: lag}, 127) for lag in (40, 100, 250)] == [[(0, 0)]] * 3
    assert late({0: 250}, 32) == late({0: 1000}, 128) == [(0, 1)]
    assert late({0: 2000, 1: None, 2: 0}, 100) == [(0, 2), (1, None)]
    assert len({lag.bit_length() for lag in (40, 100, 250)}) == 3  # of which each asked for itself


def test_a_probe_loses_no_more_than_some_plain_rounds_and_all_that_it_reads():
    probes = Probes()
    probes.spent(1.0, 1.0, 1.0)
    probes.now = Probe(0, 4, [0], 1.0, False)
    probes.spent(30.0, 1.0, 1.0, reading=20.0)
    assert probes.seconds == 24.0


def test_a_round_that_is_like_no_other_is_still_one_that_drafted_and_read():
    """Though it says nothing of what drafts take, nor whether they pay."""
    control = still()
    control.open(0, 0.0)
    for _ in range(3):
        assert control.rests(1)
        control.rested(10.0)
    control._settle()
    before, purse = control._prices.seconds, control._purse
    held = purse.seconds
    control.spent([Pick(0, 2)], Spent({}, 500.0, 3.0, 500.0, 3, once=True))
    control._learn()
    assert (control._prices.seconds, purse.seconds, control._prices.rounds) == (before, held, [0])
    assert purse.owed == 3.0
    assert control._aftermath.rounds == 3


def behind_reading() -> float:
    """The time of short texts, over plain decoding's, of which the first tokens are easy to draft
    and no others: to read the prompt takes longer than is gained then."""
    machine = Machine(target, [1.0], reading=[0.2])
    paces = []
    for seed in SEEDS:
        easy = [lambda at, depth: 0.95 if at + depth < 12 else 0.05]
        world, control = World(machine, [MODEL], easy, prompt=500, seed=seed), still()
        generate(world, control, 48, 24)  # until what may be lost at first is lost
        paces.append(generate(world, control, 48, 60).pace() / target(1))
    return float(np.mean(paces))


def test_what_a_drafter_has_to_read_is_paid_for_before_more_is_tried(monkeypatch):
    assert behind_reading() < 1.015
    monkeypatch.setattr(Purse, "read", lambda self, seconds, plain: None)
    assert behind_reading() > 1.025


# --- near the best ----------------------------------------------------------------------------


def against_the_best(batch: int, machine, member, alpha, kind=Controller, fixed=None) -> float:
    """Behind a request that it has learned from; not where texts end, which are ragged."""
    paces = []
    for seed in range(6):
        world = World(machine, [member], [alpha], batch=batch, seed=seed)
        control = still(kind, [member], fixed)
        generate(world, control, 400)
        paces.append(generate(world, control).pace(0, 350 * batch))
    return float(np.mean(paces)) / best_pace(world, 0, 600)[0]


TEXTS = {
    "half": (CHEAP, MODEL, steady(0.5)),
    "most": (CHEAP, MODEL, steady(0.8)),
    "the first ones": (CHEAP, MODEL, steady(0.9, 0.8, 0.6, 0.4, 0.2, 0.1)),
    "by look-ups": (Machine(target, [0.0], look=[0.05]), LOOK, steady(0.6)),
}


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", TEXTS)
def test_it_is_near_the_best_fixed_k(name, batch):
    assert against_the_best(batch, *TEXTS[name]) < 1.05


def dips(rows: int) -> float:
    """Seven rows are computed at once, five are not."""
    return 16.0 if rows == 6 else 11.0 if rows == 7 else 10 + rows


def test_where_neighbours_of_the_best_k_take_longer_it_is_found_and_they_are_tried():
    machine, paces, drafted = Machine(dips, [0.5], reading=[0.02]), [], Counter()
    for seed in range(16):
        world = World(machine, [MODEL], [steady(0.75)], seed=seed)
        run = generate(world, thinking(2.0)[0], 2400)
        paces.append(run.pace(1600, 2400))
        drafted.update(pick.k for (pick,) in run.picks[300:] if pick)
    pace, _, best = best_pace(world, 1600, 2400)
    assert np.mean(paces) / pace < 1.05
    assert drafted.most_common(1)[0][0] == best == 6
    assert all(drafted[k] > drafted.total() / 200 for k in (5, 7))


def test_a_k_that_is_settled_late_is_tried_until_it_is(monkeypatch):
    """Of K = 6 the first four rounds behind others take 12 % longer: it seems no better than 5."""
    machine = Machine(
        lambda rows: 13.6 if rows == 7 else 10 + 0.7 * rows,
        [0.5],
        reading=[0.02],
        settles=lambda k: 1.12 if k == 6 else 1.0,
    )

    def share() -> float:
        """Of rounds that draft so far."""
        drafted = Counter()
        for seed in range(16):
            world = World(machine, [MODEL], [steady(0.75)], seed=seed)
            run = generate(world, thinking(2.0)[0], 4000)
            drafted.update(pick.k for (pick,) in run.picks[len(run.picks) // 2 :] if pick)
        assert best_pace(world, 2000, 4000)[2] == 6
        return drafted[6] / drafted.total()

    found = share()
    assert found > 0.35
    monkeypatch.setattr(controller, "SETTLES", 1)  # all but the first are counted as if they were
    assert share() < 0.75 * found
    monkeypatch.setattr(controller, "_STINT", controller._FOR)
    assert share() < 0.2 * found


class AlwaysFar(Controller):
    """Wants as much as there is."""

    def _best(self, options, offered, last):
        return max(options[1:] or options, key=lambda o: float(o.speeds[-1])), self.most


@pytest.mark.parametrize("name", TEXTS)
def test_one_k_for_all_is_not(name, bottomless):
    assert against_the_best(4, *TEXTS[name], AlwaysFar) > 1.1


class Notes(Controller):
    """Notes what is chosen."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.noted: list[tuple[int, ...]] = []

    def spent(self, picks, spent):
        super().spent(picks, spent)
        self.noted.append(self._chosen[:4])


def test_the_first_rounds_of_a_text_and_one_of_much_reading_are_said_to_be_cold():
    machine = Machine(free, [2.0], reading=[0.02])
    control, flags = still(), []
    add = control._prices.add

    def noted(picks, spents, phase, cold):
        flags.append((len(spents), cold))
        add(picks, spents, phase, cold)

    control._prices.add = noted
    generate(World(machine, [MODEL], [steady(0.8)], prompt=50), control, 120, requests=6)
    assert 3 <= sum(n for n, cold in flags if cold) <= 4 * 6
    assert sum(n for n, cold in flags if not cold) > 60


def believed(*texts: int) -> float:
    """Of a pass over five rows that takes 10 ms, and 15 in the three rounds behind a prompt: after
    40 texts of so many rounds, 40 of so many, and so on."""
    costs = Prices([MODEL], 16)
    costs.rested(1, [8.0] * 4)
    for rounds in texts:
        for n in [*range(rounds)] * 40:
            spent = Spent({}, 1.0, 0.0, 15.0 if n < 3 else 10.0, 5)
            costs.add([Pick(0, 4)], [spent], cold=n < 3)
    return float(costs.rest(costs.rows(0), 1)[4])


def test_rounds_behind_a_prompt_make_no_k_dear_but_where_texts_are_that_short(monkeypatch):
    assert believed(8) == pytest.approx(10, rel=0.03)
    assert believed(8, 3, 3) == pytest.approx(15, rel=0.03)
    monkeypatch.setattr(prices, "_LATELY", 0)  # all count
    assert believed(8) > 11
    monkeypatch.setattr(prices, "_LATELY", 10**6)  # none does
    assert believed(8, 3, 3) < 11


def test_a_round_behind_a_pause_has_more_rows_than_the_one_before():
    """Whenever both are learned of."""
    control, rises = still(), []
    control._prices.add = lambda picks, spents, phase, cold: rises.append((spents[0].rows, phase))
    control.open(0, 0.0)
    for rows in (5, 5, 7):
        control.spent([Pick(0, rows - 1)], Spent({}, 1.0, 0.0, 10.0, rows))
    for _ in range(3):
        control.rested(10.0)
    control.spent([Pick(0, 5)], Spent({}, 1.0, 0.0, 10.0, 6))
    control._learn()
    assert rises == [(5, MOVED), (5, EARLY), (7, MOVED), (6, MOVED)]


def test_of_two_that_are_equal_it_stays_with_one(monkeypatch):
    """(1 + α) / (T + d) = (1 + α + α²) / (T + 2d)."""

    monkeypatch.setattr(controller, "_VARY", (10**9, 10**9))  # what is tried is no change of choice

    def changes() -> float:
        shares = []
        for seed in range(3):
            machine = Machine(free, [2.0], reading=[0.02])
            world, control = World(machine, [MODEL], [steady(0.5)], seed=seed), still(Notes)
            generate(world, control, 300)
            control.noted.clear()
            generate(world, control, 1500)
            shares.append(np.mean(np.any(np.diff(control.noted, axis=0), axis=1)))
        return float(np.mean(shares))

    kept = changes()
    assert kept < 0.03
    monkeypatch.setattr(controller, "KEEP", 1.0)
    monkeypatch.setattr(options, "KEEP", 1.0)
    monkeypatch.setattr(survival, "_UNLIKE", 1.0)  # nor is one K for all states preferred
    assert changes() > 1.5 * kept


def test_who_has_begun_the_pass_is_held_against_plain_decoding_of_all_of_it(monkeypatch):
    """Layers that draft are not run again. K = 0 of such a drafter is a whole pass, too."""
    machine = Machine(lambda rows: 10 + 0.1 * rows, [4.0], reading=[0.0], begin=[0.0], begun=0.4)
    early = Profile("early exit", False, 8, 0.5, begun=True)
    assert against_the_best(1, machine, early, steady(0.5)) < 1.05
    rest = Prices.rest

    def less(self, rows, batch, member=-1):
        """As if that, too, had been begun."""
        found = rest(self, rows, batch, member)
        if member >= 0:
            found[rows <= 1] *= 1 - machine.begun
        return found

    monkeypatch.setattr(Prices, "rest", less)
    assert against_the_best(1, machine, early, steady(0.5)) > 1.2


@pytest.mark.parametrize("batch", [1, 4])
def test_trees_are_cut_where_their_rows_no_longer_pay(batch, monkeypatch):
    """How many nodes they have up to a depth is learned."""
    machine = Machine(
        lambda rows: 10 + rows / 2 / batch, [0.5], reading=[0.02], nodes=lambda depth: depth**2
    )
    assert against_the_best(batch, machine, MODEL, steady(0.8)) < 1.05
    monkeypatch.setattr(Prices, "rows", lambda self, member: self._ks + 1)
    assert against_the_best(batch, machine, MODEL, steady(0.8)) > 1.1


# --- what changes -----------------------------------------------------------------------------


def behind_a_change(
    within: bool, machine, members, before, after, kind=Controller, seeds=32
) -> float:
    """From 128 tokens behind a change of α on, over the best choice there."""
    paces, tokens = [], 800
    for seed in range(seeds):
        control = still(kind, members)
        earlier = World(machine, members, [steady(a) for a in before], seed=100 + seed)
        generate(earlier, control, requests=2)
        at = tokens // 2 if within else 0
        alphas = [
            lambda text, depth, a=a, b=b, at=at: a if text < at else b
            for a, b in zip(before, after, strict=True)
        ]
        world = World(machine, members, alphas, seed=seed)
        paces.append(generate(world, control, tokens).pace(at + 128, tokens))
    return float(np.mean(paces)) / best_pace(world, at + 128, tokens)[0]


CHANGES = [(0.85, 0.1), (0.1, 0.85), (0.5, 0.9)]


@pytest.mark.parametrize("within", [False, True], ids=["new requests", "within a request"])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_change_is_followed(before, after, within):
    # coming back within a request is luck: 1.08 +- 0.013 on these seeds, 1.12 +- 0.016 on 192
    # others; else +- 0.007 or less
    seeds = 96 if within and after == 0.85 else 32
    assert behind_a_change(within, CHEAP, [MODEL], [before], [after], seeds=seeds) < 1.1


@pytest.mark.parametrize("better", [0, 1])
def test_new_requests_that_suit_another_drafter_get_it(better):
    one, other = [0.8, 0.2], [0.2, 0.8]
    before, after = (other, one) if better == 0 else (one, other)
    # in one text of thirty the one that is better now waits for most of it, as it was bad before
    seeds = 96 if better else 32
    assert behind_a_change(False, PAIR, BOTH, before, after, seeds=seeds) < 1.1


class Waits(Controller):
    """Would rather decode plainly than draft at less than the pace of where look-ups are right."""

    def _best(self, options, offered, last):
        gains = [o.saved - 4 * o.seconds for o in options]
        best = max(range(len(options)), key=lambda i: float(gains[i].max()))
        return options[best], int(gains[best].argmax())


def test_a_text_that_repeats_itself_now_and_then_is_drafted_elsewhere_too():
    def look(at, depth):
        return 0.98 if at // 100 % 2 else 0.02

    def slower(kind) -> float:
        """Over the best, where it does not repeat itself."""
        paces = []
        for seed in range(24):
            world = World(PAIR, BOTH, [steady(0.6), look], seed=seed)
            run = generate(world, still(kind, BOTH), 1300)
            paces.append(run.pace(1220, 1300) / best_pace(world, 1220, 1300)[0])
        return float(np.mean(paces))

    assert slower(Controller) < 1.1
    assert slower(Waits) > 1.15


class InGaps:
    """Takes what look-ups find, and lets the model draft so many tokens where they find nothing."""

    most = 16

    def __init__(self, k: int) -> None:
        self.k = k

    def rests(self, *_):
        return False

    def again(self, *_):
        return None

    def looks(self):
        return [1]

    def choose(self, asks):
        offered = len(asks[0].offers[1]) - 1
        pick = Pick(1, offered) if offered else Pick(0, self.k)
        k = min(pick.k, asks[0].budget)
        return [pick._replace(k=k) if k else None]

    def __getattr__(self, name):
        return lambda *_: None


def between_gaps(gap: int, control) -> float:
    """Milliseconds per token of a text that look-ups find all of but gaps of so many tokens on
    average, at random, behind 6 to 14 others."""
    paces = []
    for seed in SEEDS:
        rng, left = np.random.default_rng(seed), []
        while len(left) < 6100:
            found = int(rng.integers(6, 15))
            left += [*range(found, 0, -1), *[0] * int(rng.geometric(1 / gap))]
        alphas = [steady(0.85), steady(0.98)]
        world = World(PAIR, BOTH, alphas, seed=seed, offered=left.__getitem__)
        paces.append(generate(world, control(), 6000).pace(3000, 6000))
    return float(np.mean(paces))


@pytest.mark.parametrize(("gap", "within", "wrong"), [(2, 1.1, 0.0), (60, 1.06, 1.0)])
def test_in_a_gap_between_look_ups_a_model_drafts_for_the_gap_alone(
    gap, within, wrong, monkeypatch
):
    """Tokens beyond it cost look-ups less. A long one it drafts like any text."""
    best = min(between_gaps(gap, lambda k=k: InGaps(k)) for k in (0, 1, 2, 3, 4, 6, 8, 12))

    def slower() -> float:
        return between_gaps(gap, lambda: still(members=BOTH)) / best

    assert slower() < within
    worths = Gaps.worths
    monkeypatch.setattr(
        Gaps, "worths", lambda self, most: worths(replace(self, _ends=wrong, _tokens=1.0), most)
    )
    assert slower() > 1.12  # as if none ended, or each with its first token


@pytest.mark.parametrize("hazard", [0.2, 0.5, 0.8])
def test_after_how_many_tokens_a_gap_is_over_is_told_by_rounds_of_several(hazard):
    rng, gaps, rounds = np.random.default_rng(0), Gaps(), []
    for _ in range(2000):
        left = int(rng.geometric(hazard))
        while left > 0:
            tokens = int(rng.integers(1, 7))
            gaps.went_on(tokens, over=left <= tokens)
            rounds.append((tokens, left <= tokens))
            left -= tokens
    assert gaps.hazard == pytest.approx(hazard, rel=0.15)
    ends, seen = np.sum([over for _, over in rounds]), np.sum([tokens for tokens, _ in rounds])
    assert ends / seen < 0.8 * hazard  # as if each went on to the end of its round


class NeverTries(Controller):
    """Nothing is probed."""

    def _try(self, *args):
        return False


def test_without_probes_a_drafter_that_has_become_good_is_missed():
    assert behind_a_change(True, CHEAP, [MODEL], [0.05], [0.85], seeds=100) < 1.15
    assert behind_a_change(True, CHEAP, [MODEL], [0.05], [0.85], NeverTries) > 2


def test_what_neither_fades_nor_breaks_off_is_believed_for_long(monkeypatch, bottomless):
    assert behind_a_change(True, CHEAP, [MODEL], [0.9], [0.2]) < 1.03
    monkeypatch.setattr(Survival, "pass_by", lambda self, tokens: None)
    never_changed(monkeypatch)
    assert behind_a_change(True, CHEAP, [MODEL], [0.9], [0.2]) > 1.05


def never_changed(monkeypatch) -> None:
    """No streak is strange."""
    for bound in ("_CHANGED", "_TIRED"):
        monkeypatch.setattr(estimates, bound, -np.inf)


def behind_a_break() -> float:
    """Milliseconds per token of 40 that nobody can draft, behind 40 and four texts that go very
    well, over the best."""
    paces = []
    for seed in range(16):
        control = still()
        generate(World(CHEAP, [MODEL], [steady(0.98)], seed=100 + seed), control, 200, 4)
        breaks = World(CHEAP, [MODEL], [lambda at, depth: 0.98 if at < 40 else 0.02], seed=seed)
        paces.append(generate(breaks, control, 80).pace(40, 80) / best_pace(breaks, 40, 80)[0])
    return float(np.mean(paces))


def test_a_streak_that_was_not_to_be_expected_is_believed_at_once(monkeypatch):
    assert behind_a_break() < 1.25
    never_changed(monkeypatch)
    assert behind_a_break() > 1.5


# --- who drafts -------------------------------------------------------------------------------

SUITS = {0: [steady(0.9), steady(0.05)], 1: [steady(0.3), steady(0.95)]}
"""What each drafter's texts are like."""


def chosen(kind, who: list[int]) -> list[float]:
    """Of the rounds that are drafted for each sequence, how many by whom it suits."""
    found = np.zeros((len(who), 2))
    for seed in range(3):
        alphas = [SUITS[m] for m in who]
        world = World(PAIR, BOTH, alphas, batch=len(who), seed=seed)
        picks = generate(world, still(kind, BOTH)).picks
        for b, m in enumerate(who):
            members = [p[b].member for p in picks[len(picks) // 3 :] if p[b]]
            found[b] += [members.count(m), len(members)]
    return (found[:, 0] / found[:, 1].clip(30)).tolist()


class Pools(Controller):
    """What one sequence shows is not told apart from what others do."""

    def _choose(self, asks, crowded, last):
        for open_ in self._estimates._open.values():
            open_.own.clear()
        return super()._choose(asks, crowded, last)


def test_every_sequence_gets_the_drafter_that_suits_it():
    for who in ([0], [1], [1, 1, 0, 0]):
        assert min(chosen(Controller, who)) > 0.75, who
    assert min(chosen(Pools, [1, 1, 0, 0])) < 0.75


def test_k_may_be_fixed_and_who_drafts_chosen():
    """For instants K is the longest there is to take."""
    for better, alphas in SUITS.items():
        world = World(PAIR, BOTH, alphas)
        control = still(members=BOTH, fixed=3)
        picks = [p for (p,) in generate(world, control).picks[:-4]]
        assert {p.k for p in picks} == {3}
        late = picks[len(picks) // 3 :]
        assert Counter(p.member for p in late)[better] > 0.75 * len(late)


# --- what finding out costs -------------------------------------------------------------------


def lost(batch: int, step: float) -> tuple[float, float]:
    """What probes have lost by their own account beyond a hundredth of the time, in plain rounds;
    and the share of all that was lost, from the second request on. Means of some: one probe that
    was slow by chance is a third of what the next two thousand rounds may lose."""
    machine = Machine(target, [step], reading=[0.02])
    plain, found = machine.target(batch), []
    for seed in SEEDS:
        control = still()
        world = World(machine, [MODEL], [steady(0.0)], batch=batch, seed=seed)
        first = generate(world, control, 200)
        run = generate(world, control, 2000)
        whole = sum(run.seconds)
        probed = control.report().probe_share * (whole + sum(first.seconds))
        more = whole - plain * sum(run.expected) / batch  # all that was not plain decoding
        found.append(((probed - 0.01 * (whole + sum(first.seconds))) / plain, more / whole))
    beyond, share = np.mean(found, axis=0)
    return float(beyond), float(share)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("step", [1.0, 3.0])
def test_probes_take_a_hundredth_of_the_time_and_what_they_begin_with(batch, step):
    beyond, share = lost(batch, step)
    assert beyond < probes._CREDIT[0] + 2  # the last one may cost more than was left
    part = 1 if batch == 1 else 1 + probes._IN_VAIN  # of it, where several are probed in vain
    # they do take it, and little is lost by other rounds
    assert 0.005 / part < share < 0.017 / part


def test_probes_that_may_take_more_do(monkeypatch, bottomless):
    monkeypatch.setattr(probes, "SHARE", 0.05)
    beyond, share = lost(1, 3.0)
    assert beyond > 50
    assert share > 0.03


def test_a_look_that_does_not_pay_is_taken_seldom(bottomless):
    machine = Machine(target, [0.0], look=[1.0])
    counts = []
    for kind in (Controller, NeverPlain):
        control = still(kind, [LOOK])
        world = World(machine, [LOOK], [steady(0.02)])
        run = generate(world, control)
        counts.append(sum(s > 10.5 for s in run.seconds) / len(run.seconds))
    assert counts[0] < 0.15
    assert counts[1] > 0.9  # all but those that time plain decoding


def test_rounds_in_which_nobody_may_be_drafted_for_gain_nothing():
    """And what is told of them does not pile up."""
    control, n = still(), 8
    for slot in range(n):
        control.open(slot, 0.0)
    while control.rests(n):
        control.rested(target(n))
    for _ in range(1000):
        control.sits_out()
        for slot in range(n):
            control.emitted(slot, 1)
        control.spent([None] * n, Spent({}, 0.0, 0.0, target(n), 1))
    assert len(control._judged) + len(control._rounds) < 300
    control._learn()
    assert control._probes.gains < target(n)
    assert control._purse.seconds > target(n)  # nor lose


def test_a_probe_ends_where_the_purse_is_empty(monkeypatch):
    control = still()
    generate(World(CHEAP, [MODEL], [steady(0.9)]), control)
    control.open(0, 0.0)
    for empty in (False, True):
        monkeypatch.setattr(Purse, "empty", empty)
        control._probes.now = Probe(0, 2, [0], 1.0, False, reached=2, passed=2)
        control.again([0], [16])
        assert (control._probes.now is None) is empty


def test_a_model_that_has_no_room_is_not_chosen():
    control = still()
    generate(World(CHEAP, [MODEL], [steady(0.9)]), control)
    control.open(0, 0.0)
    for lag, drafts in ((0, True), (None, False)):
        control.again([0], [16])
        (pick,) = control.choose([Ask(0, 16, 100, {}, {0: lag})])
        assert (pick is not None) is drafts
        control.close(0)
        control.open(0, 0.0)


def test_a_drafter_that_could_not_win_is_never_tried():
    machine = Machine(target, [11.0], reading=[0.3])
    members = [Profile("dear", False, 16, 1.1)]
    run = generate(World(machine, members, [steady(1.0)]), still(members=members))
    assert not any(any(picks) for picks in run.picks)


def thinking(takes: float, kind=Controller, member=MODEL) -> tuple[Controller, list[float]]:
    """A controller that takes so long to choose, and when it did."""
    now, thoughts = [0.0], []

    class Thinks(kind):
        def _choose(self, asks, crowded, last):
            thoughts.append(now[0])
            now[0] += takes
            return super()._choose(asks, crowded, last)

        def spent(self, picks, spent):
            now[0] += spent.seconds
            super().spent(picks, spent)

        def _went_on(self, along, rounds):
            began = now[0]
            super()._went_on(along, rounds)
            now[0] = began + sum(draft + rest for _, _, _, _, draft, rest, _, _ in rounds)

        def rested(self, *seconds):
            now[0] += sum(seconds)
            super().rested(*seconds)

    return Thinks([member], None, lambda: now[0]), thoughts


def test_choices_are_held_so_that_thinking_costs_little():
    control, thoughts = thinking(0.5)
    world = World(CHEAP, [MODEL], [steady(0.8)])
    run = generate(world, control, 3000)
    assert len(thoughts) < 0.6 * len(run.seconds)
    assert run.pace(600) / best_pace(world, 0, 600)[0] < 1.08


def test_thought_that_changes_nothing_comes_less_often():
    now = [0.0]
    held = Held(lambda: now[0])
    question = Question((0,), 0)

    def lasts(choice: Choice, changed: bool = False) -> int:
        """How long it is held, of an engine that is old."""
        if changed:
            held.drop()
        held.passed(1e6)
        began = held.begin(question)
        now[0] += 1.0
        held.keep(question, choice, began)
        now[0] += 1e6  # something else runs, and that makes it no older
        for seconds in range(200, 4000, 200):
            held.passed(200)
            if held.find(question) is None:
                return seconds
        raise AssertionError("it is held for ever")

    lasts(PLAIN)
    some, other = alike(0, 3), alike(0, 4)
    assert [lasts(some) for _ in range(5)] == [400, 800, 1600, 1600, 1600]
    assert [lasts(other) for _ in range(3)] == [400, 800, 1600]
    assert lasts(other, changed=True) == 800  # it had begun anew


def after_others(
    alpha, kind, first: int, last: int, machine=None, member=None, seeds: int = 24
) -> float:
    """Milliseconds per token on a part of a text that follows on ordinary ones, over the best, if
    thinking takes half as long as a plain round."""
    paces = []
    for seed in range(seeds):
        control, _ = thinking(5.0, kind, member or MODEL)
        playing = machine or CHEAP, [member or MODEL]
        generate(World(*playing, [steady(0.7)], seed=100 + seed), control, requests=4)
        world = World(*playing, [alpha], seed=seed)
        paces.append(generate(world, control, last).pace(first, last))
    return float(np.mean(paces)) / best_pace(world, first, last)[0]


class RestsLong(Controller):
    """Once it decodes plainly, it does so for as long as that choice is held."""

    def _pause_for(self, slots, rounds):
        super()._pause_for(slots, max(rounds, 1000))


class NeverSurprised(Controller):
    """Keeps what it has chosen, however it goes."""

    def _surprised(self, saved):
        return False


def test_plain_decoding_is_not_held_where_drafting_has_paid_before():
    def bad_start(at, depth):
        return 0.02 if at < 110 else 0.7

    # of 480 seeds 1.144 to 1.151 +- 0.004
    assert after_others(bad_start, Controller, 128, 280, seeds=240) < 1.165
    assert after_others(bad_start, RestsLong, 128, 280) > 1.3


def beside_look_ups() -> tuple[float, float]:
    """Milliseconds per token of a model and look-ups behind 1024 tokens, over those of the model
    alone, which is better, but must read a prompt first: the mean and the worst of some worlds."""
    machine = Machine(target, [0.4, 0.0], look=[0.0, 0.05], reading=[0.2, 0.0])
    alone = World(machine, [MODEL], [steady(0.9)], prompt=100)
    best = generate(alone, still(), 128, 12).pace(256)
    worlds = (World(machine, BOTH, [steady(0.9), steady(0.75)], prompt=100, seed=i) for i in SEEDS)
    paces = [generate(w, still(members=BOTH), 128, 12).pace(1024) / best for w in worlds]
    return float(np.mean(paces)), max(paces)


def test_what_look_ups_gain_pays_for_finding_out_about_a_model(monkeypatch):
    monkeypatch.setattr(probes, "_CREDIT", (0, 16))  # else that may be enough
    mean, worst = beside_look_ups()
    assert mean < 1.05
    assert worst < 1.15
    monkeypatch.setattr(Estimates, "new", lambda self, member, kind: False)
    assert beside_look_ups()[1] > 1.2


def rare_looks(takes: float) -> Looks:
    """At a drafter that has not gained anything so far, where a plain round takes 10."""
    prices = Prices(BOTH, 16)
    prices.rested(1, [10.0] * 3)
    prices.add([None], [Spent({1: takes}, 0.0, 0.0, 10.0, 1)])
    looks = Looks(BOTH, prices, always=False)
    looks.count([1] * 32, 0.0, 0)
    return looks


def test_who_is_looked_at_in_vain_waits_for_longer_each_time_until_a_text_begins():
    looks, found = rare_looks(5.0), []

    def eager(round_: int) -> list[int]:
        """Who is looked at behind a draft that has passed as a whole."""
        looks.drafted(4, round_)
        return looks.take(round_, paid=False)

    for round_ in range(1, 40):
        if eager(round_):  # and it brings nothing
            found.append(round_)
            looks.count({1}, 0.0, round_)
    assert np.diff(found).tolist() == [2, 4, 8, 16]
    assert not eager(40)
    looks.count({1}, 0.5, 40)
    assert eager(41) == [1]
    looks.count({1}, 0.0, 41)
    assert not eager(42)
    looks.new_text(alone=False)
    assert eager(42) == [1]


def behind_drafts(gain: float, follow: float) -> float:
    """In which share of rounds a look begins, where all drafts by a model pass, if it gains so
    much, and so much a second one behind it, as it was right."""
    looks, right, began = rare_looks(0.52), False, 0
    for round_ in range(1, 4001):
        if right:
            looks.eager.add(1)
        else:
            looks.drafted(4, round_ - 1)
        looked = looks.take(round_, paid=False)
        began += bool(looked and not right)
        if looked:
            looks.count({1}, follow if right else gain, round_)
        right = bool(looked and not right and follow)
    return began / 4000


def test_looks_behind_drafts_by_a_model_are_rare_if_they_and_those_behind_them_do_not_pay(
    monkeypatch,
):
    """A look takes 0.052 of a plain round: one in ten is due, whichever way 0.05 is rounded."""
    assert behind_drafts(0.1, 0.3) > 0.4
    assert behind_drafts(0.06, 0.0) < 0.2
    assert behind_drafts(0.06, 0.08) < 0.2
    monkeypatch.setattr(looks, "_SURELY", 1.0)
    assert behind_drafts(0.06, 0.0) > 0.4


def test_a_look_that_gains_less_than_it_takes_was_in_vain():
    for gain, again in ((0.02, []), (0.1, [1])):  # of a plain round
        looks = rare_looks(0.5)
        for round_ in (1, 2):
            looks.drafted(4, round_)
            assert looks.take(round_, paid=False) == ([1] if round_ == 1 else again)
            looks.count({1}, gain, round_)


def several_looks(batch: int) -> Looks:
    """At so many sequences, each of which takes 0.052 of a plain round."""
    prices = Prices([LOOK], 16)
    prices.rested(batch, [100.0] * 3)
    prices.add([None] * batch, [Spent({0: 5.2}, 0.0, 0.0, 100.0, 1)])
    looks = Looks([LOOK], prices, always=False)
    looks.of(batch)
    return looks


class Longest(Looks):
    """Takes what was right of one sequence for what all of them would have emitted."""

    def _pays(self, i, accepted):
        self._right[i, 1 : accepted + 1] = 1
        return super()._pays(i, accepted)


@pytest.mark.parametrize(("batch", "right", "eager"), [(4, 1, False), (4, 3, True), (1, 1, True)])
def test_one_of_several_sequences_that_repeats_itself_is_not_worth_looks_at_all(
    batch, right, eager
):
    """A pass over nine rows of four takes four plain rounds, and emits twelve tokens if all is
    right of one of them, where plain decoding emits sixteen."""
    for kind, expected in ((Looks, eager), (Longest, True)):
        looks = several_looks(batch)
        looks.__class__ = kind
        for rows in (5, 9) * 16:
            spent = Spent({0: 5.2}, 0.0, 0.0, 100.0 + 37.5 * (rows - 1), rows)
            looks._prices.add([Pick(0, rows - 1)] * batch, [spent] * 4)
        for round_ in (1, 2, 3):
            assert looks.take(round_, paid=False) == [0]
            looks.count([0], 0.0, round_)
            for _ in range(right):
                looks.judged(0, 8, round_)
        assert bool(looks.eager) == expected


def looked(looks: Looks, end: int, paid: bool = False, gains: float = 0.0) -> list[int]:
    """In which rounds up to that a look is taken, one in twenty of which gains so much."""
    found: list[int] = []
    for round_ in range(1, end):
        if looks.take(round_, paid):
            found.append(round_)
            looks.count([0], 0.0 if len(found) % 20 else gains, round_)
    return found


@pytest.mark.parametrize(("batch", "first", "pause"), [(1, 32, 10), (4, 16, 20), (16, 8, 20)])
def test_looks_at_several_that_do_not_pay_are_rare_sooner(batch, first, pause):
    found = looked(several_looks(batch), 200)
    assert found[:first] == list(range(1, first + 1))
    assert set(np.diff(found[first - 1 :])) == {pause}


@pytest.mark.parametrize(("batch", "pause"), [(1, 10), (4, 62)])
def test_looks_at_several_that_do_not_pay_are_rarer_by_what_is_thought_about_them(batch, pause):
    looks = several_looks(batch)
    looks.thought = 10.4
    assert set(np.diff(looked(looks, 400))[-3:]) == {pause}


def at_several(batch: int, gains: float) -> float:
    """The share of rounds in which such a look is taken, one in twenty of which gains so much."""
    return len(looked(several_looks(batch), 2001, gains=gains)) / 2000


class Soon(Looks):
    """Counts looks that pay for more, at several sequences as at one."""

    def _average(self, i, gain):
        seen = self._known(i)
        seen.worth += (gain - seen.worth) / (4 if gain > seen.worth else 24)


def test_looks_at_several_that_take_more_than_they_bring_are_rare(monkeypatch):
    """They take a twentieth of a round, and bring half of that, or four times as much."""
    assert at_several(16, 0.5) < 0.2
    assert at_several(16, 4.0) > 0.8  # in all rounds once it has paid
    monkeypatch.setattr(Looks, "_average", Soon._average)
    assert at_several(16, 0.5) > 0.7


def test_what_drafting_gained_pays_for_fewer_looks_at_several():
    for batch, pause in ((1, 8), (4, 16), (16, 20)):  # the last is as rare as without gains
        found = looked(several_looks(batch), 600, paid=True)
        assert set(np.diff(found[32:])) == {pause}


class Drawn(Looks):
    """Averages what all looks bring, and is drawn to those that pay."""

    def _average(self, i, gain):
        seen = self._known(i)
        seen.worth += (gain - seen.worth) / (4 if gain > seen.worth else 16)


@pytest.mark.parametrize("among", ["those in turn", "those behind what was right"])
def test_some_looks_that_pay_do_not_make_all_others_worth_it(among):
    """One in four gains five times what it takes, or each that follows on a draft that passed."""
    for kind, seldom in ((Looks, True), (Drawn, False)):
        looks, found = rare_looks(1.0), []
        looks.__class__ = kind
        for round_ in range(1, 1000):
            eager = among != "those in turn" and round_ % 25 == 0
            if eager:
                looks.drafted(4, round_ - 1)
            if looks.take(round_, paid=False):
                pays = eager or (among == "those in turn" and len(found) % 4 == 0)
                looks.count({1}, 0.5 if pays else 0.0, round_)
                found.append(looks.seldom(1, paid=False))
        assert all(found) == seldom


class Ageless(Looks):
    """Takes looks at texts of any age for alike."""

    def _known(self, i):
        return self._seen[i, 0]


def test_looks_are_rare_in_the_ages_of_a_text_in_which_they_do_not_pay():
    """They gain in what follows its first five rounds."""
    for kind, most, least in ((Looks, 0.25, 0.0), (Ageless, 1.0, 0.9)):
        looks, looked = rare_looks(1.0), {2: 0, 0: 0}
        looks.__class__ = kind
        looks._known(1).worth = 1.0
        for round_ in range(1, 4001):
            at = round_ % 20
            looks.age = 2 if 1 <= at < 6 else 0
            if looks.take(round_, paid=False):
                looked[looks.age] += 1
                looks.count({1}, 1.0 if looks.age == 0 else 0.0, round_)
        # of 200 texts a round each, and the first 32
        assert least <= looked[2] / 1000 <= most
        assert looked[0] / 3000 > 0.9


class OwnTurns(Looks):
    """Each age of a text has its own turns."""

    def _wait(self, i, round_, paid):
        return self._known(i).last + self._pause(i, paid) - round_


def test_ages_at_which_looks_do_not_pay_share_their_turns():
    """One takes a tenth of a plain round and may take 0.25 % of the time: one in 40 rounds."""
    for kind, most, least in ((Looks, 1.1, 0.9), (OwnTurns, 3.0, 1.8)):
        looks, looked = rare_looks(1.0), {2: 0, 1: 0, 0: 0}
        looks.__class__ = kind
        for age in looked:
            looks.age = age
            looks.count([1] * 32, 0.0, 0)
        for round_ in range(1, 4001):
            at = round_ % 39
            looks.age = 2 if at < 2 else 1 if at < 10 else 0
            if looks.take(round_, paid=False):
                looked[looks.age] += 1
                looks.count({1}, 0.0, round_)
        assert least <= sum(looked.values()) * 40 / 4000 <= most
        assert all(looked.values())


def test_who_is_left_of_several_is_looked_at_as_old_as_it_is():
    control = still(members=BOTH)
    for slot in (0, 1):
        control.open(slot, 0.0)
    control.again([0, 1], [8, 8])
    assert control._looks.age > 0
    for slot in (0, 1):
        control.emitted(slot, 40)
    control.close(1)
    control.again([0], [8])
    assert control._looks.age == 0


@pytest.mark.parametrize(("usual", "late", "pause"), [(5.2, 40, 10), (20, 12, 32), (20, 30.2, 60)])
def test_looks_are_taken_to_be_late_only_where_they_come_so_rarely(usual, late, pause):
    """In 32 rounds little is added that would have to be read first."""
    prices = Prices(BOTH[1:], 16)
    prices.rested(1, [100.0] * 3)
    for who, takes in (((), usual), ([0], late)):
        prices.add([None], [Spent({0: takes}, 0.0, 0.0, 100.0, 1, late=who)])
    looks = Looks(BOTH[1:], prices, always=False)
    looks.count([0] * 32, 0.0, 0)
    assert next(round_ for round_ in range(1, 200) if looks.take(round_, paid=False)) == pause


def test_what_is_chosen_for_a_text_that_goes_like_others_is_of_its_age_and_outlasts_it():
    """It is thought about once for each age; what changes for one text has only that thought
    about anew."""
    held, asked = Held(lambda: 0.0), Question((), 0)
    for alike_ in (False, True):
        asked = asked._replace(alike=alike_)
        held.keep(asked, PLAIN, held.begin(asked) - 1.0)  # the first of all are held for no time
    own, ages = Question((0,), 0), [Question(("like", age), 0, alike=True) for age in (2, 1, 0)]
    held.passed(1e6)
    choices = PLAIN, *(alike(0, k) for k in (2, 3, 6))
    for question, choice in zip((own, *ages), choices, strict=True):
        assert held.find(question) is None
        held.keep(question, choice, held.begin(question) - 1.0)
    assert held.find(own) == PLAIN
    held.part()
    assert held.find(own) is None
    assert [held.find(question).k for question in ages] == [2, 3, 6]
    held.drop()  # something has changed: whatever is asked is thought about
    assert not any(map(held.find, ages))
    held.keep(ages[0], alike(0, 4), held.begin(ages[0]) - 1.0)
    assert [held.find(question).k for question in ages] == [4, 3, 6]
    assert held.find(ages[0])
    held.passed(1e3)  # by that one, so that others are hardly older
    assert [held.find(question) is not None for question in ages] == [False, True, True]
    held.passed(1e5)
    assert not any(map(held.find, ages))


def test_what_is_chosen_at_a_new_temperature_is_not_held_as_if_much_were_known():
    def found(key: float) -> bool:
        held = Held(lambda: 0.0)
        for _ in range(2):
            known = Question((0,), 0)
            held.keep(known, PLAIN, held.begin(known) - 1.0)
            held.passed(1e6)
        asked = Question((0,), 0, key=key)
        held.keep(asked, PLAIN, held.begin(asked) - 1.0)
        held.passed(100)
        return held.find(asked) is not None

    assert found(Question((), 0).key)
    assert not found(1.2)


def test_what_is_asked_but_now_and_then_is_not_held_as_if_much_were_known(monkeypatch):
    """What is known of it comes from the rounds in which it is asked."""
    usual, seldom = (Question(who, 0, alike=True) for who in ("usual", "seldom"))

    def found() -> bool:
        held = Held(lambda: 0.0)
        for question, seconds in ((usual, 1e6), (seldom, 10.0)):
            for _ in range(2):
                held.keep(question, PLAIN, held.begin(question) - 1.0)
                held.passed(seconds)
        held.passed(100.0)
        return held.find(seldom) is not None

    assert not found()
    known = property(lambda self: 1e9, lambda self, seconds: None)
    monkeypatch.setattr(_Book, "all", known, raising=False)
    assert found()


class CutsShort(Controller):
    """Chooses for all texts by what is left of one."""

    def _choose(self, asks, crowded, last):
        left = [a._replace(budget=min(a.budget, self._asked)) for a in asks]
        return super()._choose(left, crowded, last)


def test_what_is_chosen_at_the_end_of_a_text_is_not_cut_for_others():
    def at_the_end(kind) -> tuple[int, int]:
        """K of three tokens that are left, and of a hundred of another text."""
        control = thinking(5.0, kind)[0]
        generate(World(CHEAP, [MODEL], [steady(0.9)], prompt=0), control, 100, 10)
        found = []
        for budget in (3, 16):
            control.open(0, 0.0)
            control._parts = math.inf
            if budget == 3:
                control._held._alike.clear()
                assert control.again([0], [budget]) is None
                picks = control.choose([Ask(0, budget, budget + 1, {}, {0: 0})])
            else:
                picks = control.again([0], [budget])
            found.append(picks[0].k)
            control.sits_out()
            control.close(0)
        return tuple(found)

    assert at_the_end(Controller)[0] == 3 < 5 <= at_the_end(Controller)[1]
    assert at_the_end(CutsShort) == (3, 3)


class OfItsOwn(Controller):
    """Chooses for every sequence by what it has shown itself, from its first round on."""

    def open(self, slot, key):
        super().open(slot, key)
        self._parts = 0.0


def short_texts(kind) -> np.ndarray:
    """Of short texts where thinking takes half as long as a plain round, and one in four is
    accepted far more often: thoughts and milliseconds per token, of those and of the others."""
    control, thoughts = thinking(5.0, kind)
    found = []
    for i in range(360):
        world = World(CHEAP, [MODEL], [steady(0.4 if i % 4 else 0.98)], seed=i)
        run, before = Run(), len(thoughts)
        world.generate(control, 100, run)
        found.append((len(thoughts) - before, sum(run.seconds) / 100))
    return np.array(found)[40:].reshape(-1, 4, 2).swapaxes(0, 1)


def test_a_text_is_one_of_many_until_it_goes_another_way():
    """Then it is thought about, and goes as fast as if it always had been."""

    def means(kind) -> list[float]:
        texts = short_texts(kind)
        return [float(x) for x in (*texts[0].mean(0), *texts[1:].mean((0, 1)))]

    often, fast, seldom, slow = means(Controller)
    own = means(OfItsOwn)
    assert 1.2 * seldom < often
    assert seldom < 0.6 * own[2]
    assert fast < 1.1 * own[1]
    assert slow < 1.02 * own[3]
    assert means(NeverSurprised)[1] > 1.2 * fast


def drafts_in_vain() -> float:
    """Rounds in which is drafted behind the 40th token of a text of which nothing is right from
    there on, behind texts that go very well, where thinking takes half as long as a round."""
    found = []
    for seed in range(96):
        control = thinking(5.0)[0]
        generate(World(CHEAP, [MODEL], [steady(0.6, 0.99)], seed=seed), control, 100, 40)
        broken = World(
            CHEAP, [MODEL], [lambda at, depth: (at < 40) * (0.99 if depth else 0.6)], seed=seed
        )
        run = generate(broken, control, 100)
        first = int((np.cumsum(run.tokens) <= 42).sum())
        found.append(sum(bool(pick) for (pick,) in run.picks[first:]))
    return float(np.mean(found))


def test_a_text_of_which_nothing_more_is_right_goes_another_way(monkeypatch):
    found = drafts_in_vain()
    assert found < 21
    monkeypatch.setattr(Estimates, "misses", lambda *_: math.inf)
    assert drafts_in_vain() > 1.05 * found


def test_who_was_thought_to_pay_and_lost_all_waits_twice_as_long_each_time_until_it_gains():
    """A probe that lost the last does not."""

    def waits(purse: Purse, paid: bool) -> int:
        while not purse.empty:
            purse.spent(20.0, 10.0, 10.0, paid)
        rounds = 0
        while purse.empty:
            asked = purse.rounds(10.0)
            assert asked >= 40  # it costs something to ask
            purse.spent(asked * 10.0, asked * 10.0, 10.0, not paid)
            rounds += asked
        return rounds

    def gains(purse: Purse) -> None:
        purse.spent(10.0, 500.0, 10.0, True)

    for paid in (False, True):
        purse = Purse()
        purse.spent(10.0, 10.0, 10.0)
        first, *later = (waits(purse, paid) for _ in range(6))
        assert first < 200
        gains(purse)
        anew = waits(purse, paid)
        assert anew < 200
        if paid:
            assert first < later[0] < later[1] < 700 < later[-1] < 1000
        else:
            assert max(later) < 200


def in_slow_moments() -> float:
    """Milliseconds per token, over the best, of texts of which a little can be gained, where for 80
    rounds of 400 all takes three times as long."""
    machine = replace(CHEAP, slow=lambda round_: 3.0 if round_ % 400 < 80 else 1.0)
    paces = []
    for seed in SEEDS:
        world = World(machine, [MODEL], [steady(0.4)], seed=seed)
        pace = generate(world, thinking(2.0)[0], 1000, 3).pace(1000)
        paces.append(pace / best_pace(world, 1000, 1064)[0])
    return float(np.mean(paces))


def test_what_the_machine_is_slow_by_is_no_loss_of_a_choice(monkeypatch):
    assert in_slow_moments() < 1.05
    monkeypatch.setattr(controller, "_SLOW", math.inf)
    assert in_slow_moments() > 1.1


class Asked(Controller):
    """Counts rounds that are no rest though the purse is empty. They take half as long again."""

    asked = 0

    def again(self, *args):
        self.asked += self._purse.empty
        return super().again(*args)

    def spent(self, picks, spent):
        if self._purse.empty:
            spent = spent._replace(rest=1.5 * spent.rest)
        super().spent(picks, spent)


def test_whether_the_purse_holds_enough_is_asked_while_nobody_drafts(monkeypatch):
    def asked() -> int:
        control, world = still(Asked), World(CHEAP, [MODEL], [steady(0.02)])
        generate(world, control, 200)
        while not control._purse.empty:
            control._purse.spent(1e3, 0.0, target(1), True)
        generate(world, control, 1500)
        return control.asked

    assert asked() <= 2
    monkeypatch.setattr(Controller, "_rests_on", lambda self, batch: False)
    assert asked() > 4


def test_thoughts_leave_something_for_what_they_find(monkeypatch):
    """Of a pass that takes as long as they do; they are not free."""

    def thoughts() -> int:
        found, count = Purse(), 0
        while not found.empty and count < 1000:
            found.spent(20.0, 10.0, 10.0, True, 10.0)
            count += 1
        return count

    assert 36 < thoughts() < 64
    monkeypatch.setattr(purse, "_THOUGHTS", (0, 0))
    assert thoughts() < 28


class Thinks(Controller):
    """Takes 25 ms for a thought, two and a half plain rounds.

    Attributes:
        thoughts: so far.
    """

    def __init__(self) -> None:
        self.thoughts = self.charged = 0
        super().__init__([MODEL], clock=lambda: 25.0 * self.thoughts)

    def _choose(self, *args):
        self.thoughts += 1
        return super()._choose(*args)

    def spent(self, picks, spent):
        choosing = 25.0 * (self.thoughts - self.charged)
        self.charged = self.thoughts
        super().spent(picks, spent._replace(choosing=choosing))


class MakesUp(Thinks):
    """Counts as lost what it thought."""

    def spent(self, picks, spent):
        self._lost += 25.0 * (self.thoughts - self.charged)
        super().spent(picks, spent)


def test_no_thought_makes_up_for_thoughts(bottomless):
    def thoughts(kind) -> float:
        """Of a text that goes as expected."""
        found = []
        for seed in SEEDS:
            control = kind()
            generate(World(CHEAP, [MODEL], [steady(0.5)], seed=seed), control, 300)
            found.append(control.thoughts)
        return float(np.mean(found))

    assert thoughts(MakesUp) > 1.3 * thoughts(Thinks)


def test_rounds_in_which_nothing_is_to_be_thought_about_are_counted_together(monkeypatch):
    """None is lost."""
    spent = Purse.spent

    def counted() -> tuple[int, int, int]:
        """Times, rounds that were counted then, and those that there were."""
        sums, (control, _) = [], thinking(2.0)
        tell, went_on = control.spent, control._went_on
        timed = 0

        def noted(self, seconds, saved, plain, paid=False, thought=None, rounds=1, sequences=1):
            if thought is not None:  # else they were rested in
                sums.append(rounds)
            spent(self, seconds, saved, plain, paid, thought or 0.0, rounds, sequences)

        def told(picks, what):
            nonlocal timed
            timed += control._prices.plain_rounds() > 0
            tell(picks, what)

        def told_of(along, rounds):
            nonlocal timed
            timed += len(rounds)
            went_on(along, rounds)

        control.spent, control._went_on = told, told_of
        monkeypatch.setattr(Purse, "spent", noted)
        generate(World(CHEAP, [MODEL], [steady(0.8)]), control, 2000)
        return len(sums), sum(sums), timed

    times, rounds, timed = counted()
    assert rounds == timed > 2 * times
    monkeypatch.setattr(controller, "_STRIDE", 1)
    monkeypatch.setattr(controller, "_ALONG", 1)
    times, rounds, timed = counted()
    assert rounds == timed == times


class OneByOne(Controller):
    """Counts rounds that went along one by one."""

    def _went_on(self, along, rounds):
        for went in rounds:
            self._went(along, went)


class Retold(OneByOne):
    """Compares how far rounds went along with how far it would have chosen to go itself."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.rounds = self.asked = 0
        self.telling, self.unlike = False, []

    def again(self, *args):
        self.asked += 1
        return super().again(*args)

    def went(self, along):
        self.telling, self.chosen = True, []
        super().went(along)
        self.telling = False
        self.rounds += len(along.went)
        if self._estimates.length(along.slot) < 5900:  # else it may end before it has gone so far
            self.unlike.append(self.chosen != [k for k, *_ in along.went])

    def _varied(self, slots, choice):
        k = super()._varied(slots, choice)
        if self.telling:
            self.chosen.append(k)
        return k


class OfOneState(Along):
    """Forgets what became of the draft before."""

    def _next(self) -> None:
        self.state = FAILED
        super()._next()


class NeverVaries(Along):
    """Goes as far as was chosen."""

    def _next(self) -> None:
        self.varies = 1000
        super()._next()


@pytest.mark.parametrize("broken", [OfOneState, NeverVaries])
def test_rounds_that_go_along_go_as_far_as_would_be_chosen_for_them(broken, monkeypatch):
    def retold() -> Retold:
        control = thinking(5.0, Retold)[0]
        generate(World(CHEAP, [MODEL], [stretches]), control, 6000)
        return control

    found = retold()
    assert found.rounds > 4 * found.asked > 100
    assert not any(found.unlike)
    monkeypatch.setattr(controller, "Along", broken)
    assert sum(retold().unlike) > 5


def test_rounds_that_are_told_of_one_by_one_are_as_if_they_were_asked_about(monkeypatch):
    def lengths() -> list[int]:
        control, world = thinking(5.0)[0], World(CHEAP, [MODEL], [stretches])
        return [pick.k if pick else 0 for (pick,) in generate(world, control, 3000).picks]

    late = lengths()
    monkeypatch.setattr(controller, "_ALONG", 1)
    alone = lengths()
    monkeypatch.setattr(Controller, "along", lambda self: None)
    assert lengths() == alone != late


def state_of(control: Controller) -> tuple[list, list[float]]:
    """What is known of rounds so far, exactly and to within rounding."""
    text = "judged", "passed", "missed", "vain", "since"
    names = *text, "rounds", "round", "drafted", "rows", "cold", "now"
    exact = [getattr(control, f"_{name}") for name in names]
    stride = control._stride
    exact += [stride.batch, stride.rounds, control._estimates.length(0)]
    return exact, [control._held.now, control._lost, control._more, stride.seconds, stride.saved]


class Compares(Controller):
    """Rounds that are counted at once with the same one by one."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.compared, self.alike = 0, True

    def counts(self, along, rounds) -> None:
        super()._went_on(along, rounds)

    def _went_on(self, along, rounds):
        other = copy.deepcopy(self)
        # what it would have done between them was too late for them
        other._goes_apart = other._learn = other._count_up = lambda *_: None
        OneByOne._went_on(other, along, rounds)
        self.counts(along, rounds)
        (here, seconds), (there, expected) = state_of(self), state_of(other)
        self.compared += len(rounds)
        self.alike &= here == there and seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)


class Forgets(Compares):
    """Whether all of a draft was accepted before them."""

    def counts(self, along, rounds):
        self._passed = {}
        super().counts(along, rounds)


class ForgetsLosses(Compares):
    """What they have lost."""

    def counts(self, along, rounds):
        lost = self._lost
        super().counts(along, rounds)
        self._lost = lost


def test_rounds_that_went_along_are_counted_at_once_as_one_by_one():
    def compared(kind) -> Compares:
        control = thinking(5.0, kind)[0]
        generate(World(CHEAP, [MODEL], [stretches]), control, 1000)
        return control

    found = compared(Compares)
    assert found.compared > 100
    assert found.alike
    assert not compared(Forgets).alike
    assert not compared(ForgetsLosses).alike


def asked_too_often(asked: int, monkeypatch) -> int:
    """Rounds of plain decoding before a purse is opened again, if a seventh of one is lost whenever
    it is asked whether it is."""
    monkeypatch.setattr(purse, "_ASKED", asked)
    found, rounds = Purse(0.0, 0.0, 1.0), 0
    while found.empty and rounds < 5000:
        wait = found.rounds(10.0)
        found.spent(wait * 10.0 + 1.5, wait * 10.0, 10.0)
        rounds += wait
    return rounds


def at_a_new_temperature(before: float) -> float:
    """Milliseconds per token of two texts that are drafted well, over the best, behind one of
    another temperature of which nothing is right, where the purse has lost all it held."""
    paces = []
    for seed in SEEDS:
        control = still()
        world = World(CHEAP, [MODEL], [steady(0.02)], seed=100 + seed)
        world.temperature = before
        generate(world, control, 200)
        control._purse.spent(1e3, 0.0, target(1))  # four plain rounds at once, and so on
        while not control._purse.empty:
            control._purse.spent(1e3, 0.0, target(1), True)
        well = World(CHEAP, [MODEL], [steady(0.9)], seed=seed)
        paces.append(generate(well, control, 128, 2).pace() / best_pace(well, 0, 128)[0])
    return float(np.mean(paces))


def test_what_was_lost_at_another_temperature_keeps_it_from_nothing(monkeypatch):
    assert at_a_new_temperature(1.2) < 1.2
    assert at_a_new_temperature(0.0) > 2
    monkeypatch.setattr(Purse, "begin", lambda self, plain: None)
    assert at_a_new_temperature(1.2) > 2


def test_a_purse_that_is_asked_too_often_stays_empty(monkeypatch):
    assert asked_too_often(purse._ASKED, monkeypatch) < 200
    assert asked_too_often(1, monkeypatch) > 2000


def looked_in_vain() -> float:
    """Share of rounds in which somebody is looked at who never finds anything, and takes a quarter
    of a pass for that."""
    world = World(Machine(target, [0.0], look=[2.6]), [LOOK], [steady(0.0)], offered=lambda at: 0)
    control, looks = still(members=[LOOK]), []

    class Counts(Looks):
        def take(self, round_, paid):
            looks.append(super().take(round_, paid))
            return looks[-1]

    control._looks.__class__ = Counts
    run = generate(world, control, 400)
    return sum(map(bool, looks)) / len(run.tokens)


def test_what_a_look_takes_is_known_where_nothing_is_ever_found(monkeypatch, bottomless):
    assert looked_in_vain() < 0.15
    monkeypatch.setattr(controller, "_SOME", 10**6)  # where it waits for a choice
    assert looked_in_vain() > 0.25


def test_looks_that_find_nothing_are_no_drafts_that_were_thought_to_pay():
    """They have a price of their own, and empty the purse for no longer than before."""
    for found in (False, True):
        control = still(members=[LOOK])
        generate(World(Machine(target, [0.0], look=[0.05]), [LOOK], [steady(0.95)]), control, 200)
        assert control._chosen.k
        assert control._purse.enough == 1.0
        control.open(0, 0.0)
        while not control._purse.empty:
            assert control.again([0], [16]) is None
            picks = control.choose([Ask(0, 16, 200, {0: range(17) if found else (0,)})])
            control.emitted(0, 1)
            control.spent(picks, Spent({0: 20.0}, 0.0, 0.0, 10.0, 17 if found else 1))
        assert control._purse.enough == (2.0 if found else 1.0)
        assert control.report().drafter is None
        assert control.report().k == 0


def test_where_look_ups_find_nothing_nothing_is_thought_about():
    """What was chosen where they do is kept for the next time."""
    control = still(members=BOTH[1:])
    world = World(Machine(target, [0.0], look=[0.05]), [LOOK], [steady(0.95)])
    generate(world, control, 200)
    control.open(0, 0.0)
    for offered in (True, False):
        assert control.again([0], [16]) is None
        offers = {0: range(17) if offered else (0,)}
        (pick,) = control.choose([Ask(0, 16, 200, offers)])
        assert (pick is not None) == control.thought == offered
        assert control._chosen.k == 16


def openings(prompts: list[int], forget: bool) -> list[int]:
    """Thoughts for each of sequences that begin with so long prompts."""
    control, thoughts = thinking(5.0)
    counts = []
    for i, prompt in enumerate([50] * 20 + prompts):
        if forget:
            control._held._alike.clear()
        world = World(CHEAP, [MODEL], [steady(0.7)], prompt=prompt, seed=i)
        before = len(thoughts)
        world.generate(control, 20, Run())
        counts.append(len(thoughts) - before)
    return counts[20:]


def test_a_sequence_like_the_last_one_begins_by_what_was_chosen_for_that():
    alike, anew, longer = (
        openings([50] * 16, False),
        openings([50] * 16, True),
        openings([400], False),
    )
    assert 2 * sum(alike) < 32 < sum(anew)
    assert longer[0] >= 1


def stretches(at: int, depth: int) -> float:
    """Of 120 tokens 80 are hard."""
    return 0.97 if at % 120 >= 80 else 0.25


def test_behind_a_draft_that_passed_it_goes_farther_than_any_fixed_k(monkeypatch):
    machine = Machine(lambda rows: 10 + 0.2 * rows, [0.8], reading=[0.02])

    rng = np.random.default_rng(0)
    best = min(fixed_pace(machine, k, rng) for k in range(1, 17))
    assert learned_pace(machine, stretches) < best
    monkeypatch.setattr(Survival.__module__ + "._FARTHER", 1)
    never_long(monkeypatch)
    assert learned_pace(machine, stretches) > best


def learned_pace(machine: Machine, alpha, seeds: int = 6) -> float:
    """Milliseconds per token of long texts behind some others."""
    found = []
    for seed in range(seeds):
        world, control = World(machine, [MODEL], [alpha], seed=seed), still()
        generate(world, control, 1200, 3)
        found.append(generate(world, control, 1200, 2).pace())
    return float(np.mean(found))


def never_long(monkeypatch) -> None:
    """No stretch is long."""
    for module in (Survival.__module__, Controller.__module__):
        monkeypatch.setattr(module + ".LONG", 10**9)


def loops(at: int, depth: int) -> float:
    """Of 240 tokens the last half repeats what was said."""
    return 0.995 if at % 240 >= 120 else 0.6


def test_where_nothing_was_refused_for_long_it_goes_farthest(monkeypatch):
    machine = Machine(lambda rows: 10 + 1.5 * rows, [0.4], reading=[0.02])
    fast = learned_pace(machine, loops, seeds=12)
    never_long(monkeypatch)
    assert learned_pace(machine, loops, seeds=12) > 1.01 * fast  # 18 seeds: 1.019 +- 0.003


def test_what_was_chosen_is_told_of_every_state():
    control = still()
    control._take(Choice(0, 3, 5, 12))
    report = control.report()
    assert (report.k, report.passed, report.long) == (3, 5, 12)
    assert "K = 3 (5 behind a draft that was accepted as a whole, 12 where nothing" in str(report)
    for choice, said in ((alike(0, 4), "K = 4"), (PLAIN, "plain decoding")):
        control._take(choice)
        assert str(control.report()).splitlines()[0].endswith(said)


def test_why_it_is_chosen_is_told():
    control = still()
    assert control.report().reason == "nothing was drafted yet"
    control._prices.rounds[0] = 3
    assert "no draft promised to be faster" in control.report().reason
    control._take(PLAIN._replace(gap=True))
    assert "look-ups find nothing" in control.report().reason
    control._take(Choice(0, 3, 3, 3, saves=0.0082, takes=0.0047))
    said = "takes 4.70 ms, plain decoding of as many tokens 8.20 ms"
    assert said in str(control.report()).splitlines()[1]
    control._purse.needs = 1.0
    report = control.report()
    assert (report.drafter, report.k) == (None, 0)
    assert "nothing is tried until plain rounds" in report.reason


def test_what_a_sequence_has_accepted_is_of_it_and_of_the_drafter_alone():
    control, kinds = still(members=[MODEL, MODEL]), []

    def judged(accepted: int, reached: int, member: int = 0) -> None:
        control._begin()
        kinds.append(control._state(0, member))
        control.told(Told(0, member, 0, reached, accepted))

    control.open(0, 0.0)
    for accepted, reached in ((16, 16), (14, 14), (0, 0), (9, 9), (2, 3), (4, 4), (40, 40)):
        judged(accepted, reached)
    judged(40, 40, member=1)
    judged(1, 1, member=1)
    control.close(0)
    control.open(0, 0.0)
    judged(1, 1, member=1)
    control._begin()  # and in this one somebody else drafted, or nobody
    judged(1, 1, member=1)
    assert kinds == [0, 1, 2, 2, 2, 0, 1, 0, 2, 0, 0]


def fixed_pace(machine: Machine, k: int, rng: np.random.Generator) -> float:
    """Milliseconds per token of such a text with a fixed K."""
    text = seconds = 0.0
    while text < 60_000:
        accepted = 0
        while accepted < k and rng.random() < stretches(int(text) % 1200, accepted):
            accepted += 1
        seconds += machine.draft[0] * k + machine.target(k + 1)
        text += accepted + 1
    return seconds / text


@pytest.mark.parametrize(("k", "expected"), [(4, [5, 3, 6, 3]), (1, [2, 1, 2, 1])])
def test_two_drafts_of_many_are_a_token_shorter_or_one_or_two_longer(k, expected):
    """One after the other: the first costs what it costs to change."""
    control = still()
    control._prices.add([Pick(0, 6)], [Spent({}, 1.0, 0.0, 10.0, 7)])  # none goes twice as far
    lengths = [control._varied([0], alike(0, k)) for _ in range(131)]
    for at, other in zip((31, 64, 97, 130), expected, strict=True):
        assert set(lengths[at : at + 2]) == {other}
        lengths[at : at + 2] = [k] * len(lengths[at : at + 2])
    assert set(lengths) == {k}


def test_what_goes_better_than_expected_is_thought_about_anew():
    def better(at, depth):
        return 0.6 if at < 40 else 0.97

    looks = Machine(lambda rows: 10 + 1.5 * rows, [0.0], look=[0.05]), LOOK
    for last, play in ((240, (CHEAP, MODEL)), (180, looks)):
        assert after_others(better, Controller, 64, last, *play) < 1.3
        assert after_others(better, NeverSurprised, 64, last, *play) > 1.4


# --- engines ----------------------------------------------------------------------------------


def run(engine: Engine, requests) -> list[list[int]]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    return [r.emitted for r in submitted]


def requests(temperature: float, count: int = 12, **more):
    """Ragged ones."""
    return [
        (
            [*PROMPT[: 1 + i % 9], i % V],
            SamplingParams(
                temperature=temperature,
                seed=i,
                eos_token_ids=(),
                max_new_tokens=12 + 7 * (i % 4),
                **more,
            ),
        )
        for i in range(count)
    ]


def taken_over(engine: Engine, control: Controller) -> Engine:
    """An engine with another controller."""
    engine.controller = engine._drafting.controller = control
    return engine


CALLS = ("open", "draft", "catch_up", "observe", "close")


def counting(drafter):
    """A drafter, and how often it was called."""
    calls = Counter()

    def counted(name, honest):
        def call(*args, **more):
            calls[name] += 1
            return honest(*args, **more)

        return call

    for name in CALLS:
        setattr(drafter, name, counted(name, getattr(drafter, name)))
    return drafter, calls


class Plain(Controller):
    """K = 0."""

    def looks(self):
        return []

    def choose(self, asks, crowded=False):
        return [None] * len(asks)


@pytest.mark.parametrize("kind", ["draft model", "n-gram", "suffix", "lookahead", "early exit"])
def test_k_0_calls_no_drafter(kind):
    model, make = DRAFTERS[kind]
    for auto in (True, False):
        drafter, calls = counting(make())
        engine = Engine(model(), drafter)
        if auto:
            taken_over(engine, Plain(engine.controller.members))
        said = run(engine, requests(0.0, 4))
        assert said == run(Engine(model()), requests(0.0, 4))
        assert (calls == Counter()) == auto
        assert engine.stats.proposed == 0 or not auto


def test_a_drafter_that_cannot_pay_is_left_alone_by_the_controller_itself():
    drafter, calls = counting(ModelDrafter(NEAR))
    engine = Engine(MARKOV, drafter)
    members = [Profile("model", False, 16, cost=99.0)]
    taken_over(engine, Controller(members))
    run(engine, requests(0.0))
    assert calls == Counter()


@pytest.mark.parametrize("k", ["auto", 3])
@pytest.mark.parametrize(
    "make", [lambda: NgramDrafter(1), lambda: ModelDrafter(MARKOV)], ids=["n-gram", "model"]
)
def test_who_shall_not_be_drafted_for_is_not(make, k):
    """Its neighbours are; and the text is the same."""
    engine = Engine(MARKOV, make(), k)
    asked = [engine.submit(p, s) for p, s in requests(0.0, 2, speculate=False)]
    others = [engine.submit(p, s) for p, s in requests(0.0, 4)]
    if k == "auto":
        taken_over(engine, Erratic(engine.controller.members, 0))
    while engine.busy:
        engine.step()
    plain = run(Engine(MARKOV), requests(0.0, 4))
    assert [r.emitted for r in asked] == plain[:2]
    assert [r.emitted for r in others] == plain
    for r in asked:
        assert r.stats.proposed == 0
        assert {e.provenance for e in r.events} == {"plain"}
    assert all(r.stats.proposed for r in others)
    assert sum(r.stats.accepted for r in others)


@pytest.mark.parametrize("k", ["auto", 3])
def test_requests_that_shall_not_be_drafted_for_leave_drafter_and_controller_alone(k):
    class Untouched(Controller):
        """Fails where it is asked or told anything, but that sequences begin and end."""

        def rests(self, batch):
            raise AssertionError("asked")

        sits_out = again = choose = emitted = spent = rested = rests

    drafter, calls = counting(ModelDrafter(NEAR))
    engine = Engine(MARKOV, drafter, k)
    if k == "auto":
        taken_over(engine, Untouched(engine.controller.members))
    assert run(engine, requests(0.0, 3, speculate=False)) == run(Engine(MARKOV), requests(0.0, 3))
    assert calls["draft"] == calls["observe"] == 0
    assert engine.stats.rounds
    if k == "auto":
        with pytest.raises(AssertionError, match="asked"):
            run(engine, requests(0.0, 1))


class Erratic(Controller):
    """Looks, and chooses who drafts and how far, by chance."""

    def __init__(self, members, seed):
        super().__init__(members, clock=lambda: 0.0)
        self.rng = np.random.default_rng(seed)

    def rests(self, batch):
        return False

    def again(self, slots, budgets, late=()):
        return None

    def looks(self):
        return [i for i in self._instant if self.rng.random() < 0.7]

    def choose(self, asks: list[Ask], crowded=False):
        self._learn()
        return [self._cut(self._any(ask), ask) for ask in asks]

    def _any(self, ask: Ask) -> Pick | None:
        able = [i for i, m in enumerate(self.members) if not m.instant or i in ask.offers]
        if not able or not ask.budget or self.rng.random() < 0.3:
            return None
        member = int(self.rng.choice(able))
        return Pick(member, int(self.rng.integers(1, 1 + self.members[member].most)))


CHEAP_KINDS = [
    name
    for name in DRAFTERS
    if name not in ("int4", "int8", "int4 trees", "adapter", "early exit, lean")
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CHEAP_KINDS)
def test_a_seed_gives_one_text_whatever_is_chosen(name, temperature):
    """By any rule that is lossless: those by which it would not are replaced."""
    model, make = DRAFTERS[name]
    for rule in (None, TokenVerifier()):
        drafter = make()
        if rule is not None and Independent in drafter.laws and drafter.proposes > Shape.CHAIN:
            continue  # siblings that were drawn with replacement
        engine = Engine(model(), drafter, verifier=rule, max_batch=4)
        taken_over(engine, Erratic(engine.controller.members, 1))
        said = run(engine, requests(temperature))
        plain = Engine(model(), verifier=engine._steady, max_batch=1)
        assert said == run(plain, requests(temperature))
        assert engine.stats.accepted > 3
        assert engine.stats.proposed > 60
        assert len([n for n in engine.stats.lengths if n]) > 2


class Pretending(TokenVerifier):
    """Says that its texts follow from target and seed alone."""

    invariant = True


@pytest.mark.parametrize("name", ["draft model", "n-gram", "suffix", "cascade"])
def test_by_token_verification_a_text_follows_from_what_is_chosen(name):
    model, make = DRAFTERS[name]
    found = set()
    for seed in range(3):
        engine = Engine(model(), make(), verifier=Pretending(), max_batch=4)
        taken_over(engine, Erratic(engine.controller.members, seed))
        found.add(str(run(engine, requests(1.0))))
    assert len(found) > 1


def test_members_that_sat_out_go_on_where_the_text_is():
    """Whoever drafts after a pause drafts for the text as it is now: with a copy of the target
    every token is accepted."""
    cascade = CascadeDrafter([SuffixDrafter(capacity=999), ModelDrafter(MARKOV)])
    engine = Engine(MARKOV, cascade, max_batch=4)
    taken_over(engine, Erratic(engine.controller.members, 3))
    run(engine, requests(0.0))
    assert engine.stats.drafters[ModelDrafter.name] > 20
    told = engine.controller._estimates._all(0.0, 1)
    assert told.reached[0] > 20
    assert told.alpha()[0] > 0.9
    assert told.accepted == pytest.approx(told.reached)
