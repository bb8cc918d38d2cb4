"""Recommendations from made-up times and texts are the best there is, and "don't" is one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from made_up import added, machine, survey, text

from outpace import OptionError
from outpace.cli.plan_report import Asked, command
from outpace.drafters import ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.planner import (
    Added,
    Surveying,
    Wanted,
    measure,
    measuring,
    plan,
    reasons,
    run_texts,
    tokens_counted,
    tokens_iid,
)
from outpace.planner.measuring import rules_for
from outpace.planner.promises import longest_of, price_of, speedup_of
from outpace.planner.survey import Played, Text, drafted_share, replayed
from outpace.trees import Costs
from outpace.verifiers import make_verifier


def by_hand(machine, survey, k):
    """Speedup of one sequence: all rounds' tokens and seconds, one after the other."""
    plain = machine.rounds(survey.temperature)(1, 1)
    tokens = seconds = 0.0
    for t in survey.texts(k):
        for p in t.played:
            tokens += p.emitted
            seconds += machine.rounds(survey.temperature)(p.nodes + 1, 1) + survey.added(p.k, 1)
    return tokens * plain / seconds


@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_what_brute_force_finds(seed):
    rng = np.random.default_rng(seed)
    here = machine(10, float(rng.uniform(0, 3)))
    surveys = [
        survey(f"d{i}", float(rng.uniform(0.1, 0.95)), float(rng.uniform(0, 6)), seed=i)
        for i in range(4)
    ]
    found = {(s.drafter, k): by_hand(here, s, k) for s in surveys for k in range(1, 17)}
    best = max(found, key=found.get)
    (advice,) = plan(here, surveys).advices
    if found[best] < 1.05:
        assert advice.best is None
    else:
        assert (advice.best.drafter, advice.best.k) == best
        assert advice.best.speedup == pytest.approx(found[best])
    for option in advice.options:
        mine = {k: found[option.drafter, k] for k in range(1, 17)}
        assert option.speedup == pytest.approx(max(mine.values()))
    assert [o.speedup for o in advice.options] == sorted(
        (o.speedup for o in advice.options), reverse=True
    )


def test_what_the_draft_costs_decides():
    """Negative control: by acceptance alone the other one would be taken."""
    here = machine()
    near, cheap = survey("near", 0.95, 8.0), survey("cheap", 0.6, 0.3)
    (advice,) = plan(here, [near, cheap]).advices
    assert advice.best.drafter == "cheap"
    for_nothing = [replace(s, added=added(0.0)) for s in (near, cheap)]
    assert plan(here, for_nothing).advices[0].best.drafter == "near"


@pytest.mark.parametrize(
    ("alpha", "step", "said"),
    [
        (0.9, 12.0, "a draft step costs 1.20 of a pass, so no draft would"),
        (0.3, 4.0, "Drafting 1 would pay from α = 0."),
        (0.01, 0.5, "Drafting 1 would pay from α = 0."),
    ],
)
def test_where_nothing_pays_it_says_so(alpha, step, said):
    found = plan(machine(), [survey("slow", alpha, step)])
    (advice,) = found.advices
    assert advice.best is None
    sentences = reasons(found, advice)
    assert "do not speculate" in sentences[0]
    assert any(said in sentence for sentence in sentences)
    assert not found.to_dict()["plans"][0]["speculate"]


def test_a_little_is_not_enough():
    here, little = machine(), survey("little", 0.12, 0.5)
    best = max(by_hand(here, little, k) for k in range(1, 17))
    assert 1 < best < 1.05
    found = plan(here, [little])
    assert found.advices[0].best is None
    assert "less than can be relied on" in reasons(found, found.advices[0])[1]
    assert plan(here, [little], margin=0.0).advices[0].best is not None


def test_who_seldom_proposes_is_told_from_who_is_wrong():
    seldom = survey("ngram", 0.5, 0.0, offers=0.05)
    assert drafted_share(seldom.texts(16)) < 0.1
    looks = Added({(0, 1): 1e-3}, {1: 1e-4})  # a tenth of a pass, whatever is found
    seldom = replace(seldom, added=looks)
    found = plan(machine(), [seldom])
    assert any("rounds only" in sentence for sentence in reasons(found, found.advices[0]))


def test_large_batches_are_told_not_to():
    """Where sixteen sequences fill the machine, drafts that are right are still too many rows."""
    found = plan(machine(), [survey("good", 0.8, 0.5)], (1, 16))
    one, many = found.advices
    assert one.best is not None
    assert many.best is None
    assert found.ceilings[0.0][16] < 1.05 < found.ceilings[0.0][1]
    assert any("From 16 sequences" in s for s in reasons(found, many))


def test_a_draft_that_has_begun_the_pass_is_paid_back():
    here = machine()
    late, early = (survey("exit", 0.7, 3.0, begun=begun) for begun in (0.0, 3.0))
    for k in (1, 4, 8):
        texts = late.texts(k)
        assert speedup_of(here, early, k, 1)(texts) > speedup_of(here, late, k, 1)(texts)


def test_temperatures_are_planned_for_apart():
    warm = survey("model", 0.4, 0.5, temperature=0.8)
    block = survey("model", 0.6, 0.5, temperature=0.8, rule="block")
    cold = survey("model", 0.9, 0.5)
    found = plan(machine(), [cold, warm, block])
    assert [(a.temperature, a.best.rule) for a in found.advices] == [(0.0, "token"), (0.8, "block")]
    assert any("Rules: block" in s and "token" in s for s in reasons(found, found.advices[1]))
    assert found.survey_of(found.advices[1].best) is block


def test_intervals_hold_the_value_and_need_two_prompts():
    (advice,) = plan(machine(), [survey("model", 0.8, 1.0)]).advices
    assert advice.best.low < advice.best.speedup < advice.best.high
    alone = plan(machine(), [survey("model", 0.8, 1.0, texts=1)])
    assert alone.advices[0].best.low is None
    assert any("one prompt" in s for s in reasons(alone, alone.advices[0]))


def test_the_longest_of_several_drafts():
    counts = {0: 2, 3: 1, 5: 3}
    each = [length for length, count in counts.items() for _ in range(count)]
    drawn = [max(three) for three in itertools.product(each, repeat=3)]
    for length, chance in longest_of(counts, 3).items():
        assert chance == pytest.approx(drawn.count(length) / len(drawn))


def test_json_is_complete_and_stable():
    found = plan(machine(), [survey("a", 0.8, 1.0), survey("b", 0.1, 9.0)], (1, 4))
    value = json.loads(json.dumps(found.to_dict()))
    assert set(value) == {"machine", "surveys", "plans", "ceilings"}
    assert {"pass_seconds", "bandwidth", "spread", "memory"} <= set(value["machine"])
    assert [(p["temperature"], p["batch"]) for p in value["plans"]] == [(0.0, 1), (0.0, 4)]
    keys = {"drafter", "k", "tree", "verifier", "speedup", "low", "high", "tokens_per_round"}
    keys |= {"price", "c", "alpha", "rounds_with_a_draft", "measured"}
    for each in value["plans"]:
        assert set(each["best"]) == keys
        assert [set(o) for o in each["options"]] == [keys | {"break_even"}] * 2
    run = value["surveys"][0]["runs"][0]
    assert run["tokens_per_round"] == pytest.approx(
        tokens_counted(found.surveys[0].texts(run["k"]))
    )
    assert len(run["prompts"]) == 6


def test_what_cannot_be_planned():
    with pytest.raises(OptionError, match="nothing was surveyed"):
        plan(machine(), [])
    with pytest.raises(OptionError, match="batch"):
        plan(machine(), [survey("a", 0.5, 1.0)], (0,))
    with pytest.raises(OptionError, match="k=17"):
        survey("a", 0.5, 1.0).texts(17)
    for wrong in ({"prompts": []}, {"prompts": [[]]}, {"prompts": [[1]], "batches": ()}):
        with pytest.raises(OptionError):
            Wanted(**wrong)


# --- replays ----------------------------------------------------------------------

TARGET = MarkovModel.random(6, 2, 0, sharpness=2)
NEAR = MarkovModel(0.7 * TARGET.table + 0.3 * MarkovModel.random(6, 2, 1).table)
FAR = MarkovModel(0.3 * TARGET.table + 0.7 * MarkovModel.random(6, 2, 1).table)
PROMPTS = [[1], [2, 0, 3], [4, 4]]


def engine_of(drafter) -> Engine:
    return Engine(TARGET, drafter, 16, None, 3, 200)


@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_a_replay_is_what_the_engine_does_with_that_k(k):
    """Coupled texts follow from target and seed, and drafts from what was read: all is the same."""
    how = {"temperature": 1.0, "rule": make_verifier("coupled"), "tokens": 120, "seed": 1}
    engine = engine_of(ModelDrafter(FAR))
    longest = run_texts(engine, PROMPTS, 16, **how)
    assert not any(p.accepted == 16 for t in longest for p in t.played)  # all places are judged
    run = run_texts(engine, PROMPTS, k, **how)
    assert [replayed(t, 16, k) for t in longest] == run
    wrong = [
        Text(tuple(p._replace(accepted=min(p.accepted, k)) for p in t.played)) for t in longest
    ]
    assert wrong != run


def test_replays_keep_the_tokens_and_the_law():
    texts = [text(0.7, 16, 2000, seed) for seed in range(20)]
    for k in (1, 4, 9):
        again = [replayed(t, 16, k) for t in texts]
        assert [t.emitted for t in again] == [2000] * 20
        assert tokens_counted(again) == pytest.approx(tokens_iid(0.7, k), rel=0.02)


def test_a_draft_that_passed_as_a_whole_is_taken_to_go_on():
    whole = Text((Played(4, 4, 4, 5, True), Played(4, 4, 4, 5, True), Played(0, 0, 0, 1, True)))
    assert [p.accepted for p in replayed(whole, 4, 2).played] == [2, 2, 2, 1]


def test_texts_are_counted_as_stats_are():
    engine = engine_of(ModelDrafter(NEAR))
    (found,) = run_texts(engine, [[1]], 4, temperature=1.0, tokens=50)
    assert found.emitted == 50
    assert engine.stats.rounds == 0
    with engine.fixed(4):
        from outpace import SamplingParams

        request = engine.submit([1], SamplingParams(max_new_tokens=50, eos_token_ids=()))
        while engine.busy:
            engine.step()
    (greedy,) = run_texts(engine, [[1]], 4, tokens=50)
    stats = request.stats
    assert (greedy.rounds, list(greedy.reached)) == (stats.rounds, stats.reached)
    assert list(greedy.accepted_at) == stats.accepted_at


# --- all of it --------------------------------------------------------------------


def test_measure_runs_everything_and_leaves_no_trace():
    drafters = {"near": ModelDrafter(NEAR), "ngram": NgramDrafter()}
    wanted = Wanted(PROMPTS, (0.0, 1.0), (1, 2), tokens=20, seconds=0.02, repeats=2)
    found = measure(TARGET, drafters, wanted)
    assert {(s.drafter, s.temperature, s.rule) for s in found.surveys if s.tree is None} == {
        ("near", 0.0, "token"),
        ("near", 1.0, "token"),
        ("near", 1.0, "block"),
        ("near", 1.0, "coupled"),
        ("ngram", 0.0, "match"),
        ("ngram", 1.0, "match"),
    }
    assert [(a.temperature, a.batch) for a in found.advices] == list(
        itertools.product((0.0, 1.0), (1, 2))
    )
    assert {1, 2} <= set(found.machine.batches)
    for s in found.surveys:
        assert all(t.emitted == 20 for texts in s.counted.values() for t in texts)
        assert price_of(found.machine, s, 1)(0) == 1
    json.dumps(found.to_dict())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_is_run_as_chains_are(temperature, monkeypatch):
    """Whether it is shown follows from times, so that these are made up here."""
    wanted = Wanted(PROMPTS, (temperature,), tokens=30, seconds=0.02, repeats=2)
    engine = Engine(TARGET, ModelDrafter(FAR), None, None, 3, 200)
    before = engine.k, engine.verifier, engine.drafter.k, engine.drafter.builder
    here = machine(10.0, 0.02, 64)  # rows are cheap
    costs = Costs({1: 1e-4, 8: 1e-4}, {1: 1e-2, 64: 1.1e-2}, 2e-4)
    monkeypatch.setattr(measuring, "measure_drafting", lambda *args, **how: added(0.2))
    monkeypatch.setattr(measuring, "measure_costs", lambda *args, **how: costs)
    found = Surveying("far", engine, here, wanted).all()
    (tree,) = [s for s in found if s.tree is not None]
    assert (engine.k, engine.verifier, engine.drafter.k, engine.drafter.builder) == before
    assert not tree.tree.is_chain
    assert tree.tree_name == f"sequoia:{len(tree.tree)}"
    assert list(tree.ks) == [tree.tree.depth]
    rounds = [p for t in tree.texts(tree.longest) for p in t.played]
    assert {p.nodes for p in rounds if p.k == tree.longest} == {len(tree.tree)}
    (advice,) = plan(here, found).advices
    assert advice.best.tree == tree.tree_name
    asked = Asked("m", (temperature,), (1,), 30, {})
    assert f"--tree {tree.tree_name}" in command(asked, advice)


def test_rules_that_make_no_difference_are_not_compared():
    assert rules_for(ModelDrafter(NEAR), 0.0) == ("token",)
    assert rules_for(ModelDrafter(NEAR), 0.8) == ("token", "block", "coupled")
    assert rules_for(NgramDrafter(), 0.8) == ("match",)
