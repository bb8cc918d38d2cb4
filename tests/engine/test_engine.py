"""The engine on toy models: batches, slots, stops, budgets, trees, provenance."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outpace
from outpace import SamplingParams
from outpace.drafters import Drafter, ModelDrafter
from outpace.engine import Engine
from outpace.engine.control import Controller
from outpace.models import ForwardOutput, MarkovModel
from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, Shape, Tree
from outpace.verifiers import BlockVerifier, GreedyVerifier, TokenVerifier

V = 8
TARGET = MarkovModel.random(V, 2, 0, sharpness=2.0)
DRAFT = MarkovModel.random(V, 2, 1, sharpness=2.0)


def mixed(sharp: float = 0.7) -> MarkovModel:
    """A draft that often agrees with the target."""
    table = sharp * TARGET.table + (1 - sharp) * DRAFT.table
    return MarkovModel(table)


def run(engine: Engine, requests, **options):
    sequences = [engine.submit(p, s, **options) for p, s in requests]
    while engine.busy:
        engine.step()
    return sequences


def make(k: int = 4, target=TARGET, drafter=None, **options) -> Engine:
    return Engine(target, drafter or ModelDrafter(mixed()), k, **options)


class SlowReader(ModelDrafter):
    """Takes long to read a prompt."""

    def open(self, context, features=()):
        time.sleep(0.05)
        super().open(context, features)


def test_what_a_drafter_takes_to_read_a_prompt_is_part_of_prefill():
    for drafter, reads in ((SlowReader(mixed()), True), (None, False)):
        engine = Engine(TARGET, drafter, 2)
        (one,) = run(engine, [([1, 2, 3], SamplingParams(max_new_tokens=9, eos_token_ids=()))])
        for stats in (engine.stats, one.stats):
            assert (stats.reading_seconds >= 0.05) == reads
            assert stats.prefill_seconds > stats.reading_seconds
            assert stats.draft_seconds < stats.round_seconds < stats.seconds


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, V - 1), min_size=1, max_size=9),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
            top_k=st.sampled_from([None, 1, 3, 100]),
            top_p=st.sampled_from([1.0, 0.9, 0.4]),
            seed=st.integers(0, 2**64 - 1),
            max_new_tokens=st.integers(1, 30),
            eos_token_ids=st.sampled_from([(), (3,), (1, 5)]),
        ),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(requests, st.integers(0, 6), st.integers(1, 8), st.sampled_from([None, TokenVerifier()]))
def test_a_request_does_not_feel_its_neighbours(batch, k, slots, rule):
    """Alone or among others, in any number of slots: the same tokens."""
    together = run(make(k, max_batch=slots, verifier=rule), batch)
    for request, sequence in zip(batch, together, strict=True):
        (alone,) = run(make(k, max_batch=1, verifier=rule), [request])
        assert alone.emitted == sequence.emitted
        assert alone.finish_reason == sequence.finish_reason
        assert [e.provenance for e in alone.events] == [e.provenance for e in sequence.events]


@settings(max_examples=40)
@given(requests, st.integers(1, 6))
def test_greedy_is_plain_decoding(batch, k):
    batch = [
        (p, SamplingParams(max_new_tokens=s.max_new_tokens, eos_token_ids=s.eos_token_ids))
        for p, s in batch
    ]
    plain = run(Engine(TARGET, max_batch=3), batch)
    fast = run(make(k, max_batch=3), batch)
    assert [s.emitted for s in plain] == [s.emitted for s in fast]
    assert [s.finish_reason for s in plain] == [s.finish_reason for s in fast]


@pytest.mark.parametrize("rule", [None, TokenVerifier()])
def test_noise_of_a_neighbour_would_be_noticed(monkeypatch, rule):
    """Negative control: noise keyed by the row in the batch instead of the request."""
    request = ([1], SamplingParams(temperature=1.0, seed=7, max_new_tokens=20))
    other = ([2], SamplingParams(temperature=1.0, seed=8, max_new_tokens=20))
    keys, noise = Engine._keys, Engine._noise
    turned = lambda self, r: keys(self, r).select(torch.arange(len(r)).flip(0))  # noqa: E731
    monkeypatch.setattr(Engine, "_keys", turned)
    monkeypatch.setattr(Engine, "_noise", lambda self, rows: noise(self, rows[::-1]))
    (alone,) = run(make(verifier=rule), [request])
    assert run(make(verifier=rule), [request, other])[0].emitted != alone.emitted


class TreeDrafter(ModelDrafter):
    """Two candidates at every node of a small tree, most likely first: point masses."""

    laws = (PointMass,)
    proposes = Shape.TREE
    tree = Tree((-1, -1, 0, 0, 1, 2))

    def draft(self, contexts, budgets, warp, noise):
        tokens = torch.zeros(len(contexts), len(self.tree), dtype=torch.int64)
        trees = []
        for b, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            texts: list[list[int]] = []
            for node, parent in enumerate(self.tree.parents):
                before = list(context.tokens) if parent < 0 else texts[parent]
                rank = sum(q == parent for q in self.tree.parents[:node])
                row = self.model.table[tuple(([0, *before])[-2:])]
                tokens[b, node] = row.topk(2).indices[rank]
                texts.append([*before, int(tokens[b, node])])
            fits = [d <= budget for d in self.tree.depths]
            trees.append(self.tree if all(fits) else chain(0))
        return Draft(tokens, PointMass(), tuple(trees))

    def observe(self, commits):
        pass


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_trees_go_through_the_same_round(prompts):
    """Greedy over branching drafts is plain decoding; KV of the path is kept, in order."""
    batch = [(p, SamplingParams(max_new_tokens=25, eos_token_ids=())) for p in prompts]
    engine = make(3, drafter=TreeDrafter(mixed()), verifier=GreedyVerifier(), max_batch=3)
    fast = run(engine, batch)
    plain = run(Engine(TARGET, max_batch=3), batch)
    assert [s.emitted for s in fast] == [s.emitted for s in plain]
    assert engine.stats.tokens_per_pass > 1


def test_a_path_gathered_wrongly_would_be_noticed(monkeypatch):
    """Negative control: keep the first rows of the block instead of the accepted path."""
    from outpace.models.cache import SlotCache

    batch = [([1, 2], SamplingParams(max_new_tokens=60, eos_token_ids=()))]
    plain = run(Engine(TARGET), batch)
    honest = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda self, slot, kept: honest(self, slot, range(len(kept)))
    )
    fast = run(make(3, drafter=TreeDrafter(mixed()), verifier=GreedyVerifier()), batch)
    assert fast[0].emitted != plain[0].emitted


class Swayed(MarkovModel):
    """Its two best tokens are nearly tied in some contexts, and company sways it."""

    NUDGE = 1e-6
    cautious = True

    def __init__(self):
        table = MarkovModel.random(V, 2, 5, sharpness=2.0).table.clone()
        first, second = table.topk(2).indices.unbind(-1)
        tied = torch.rand(V, V, generator=torch.Generator().manual_seed(1)) < 0.15
        mean = (table.gather(-1, first[..., None]) + table.gather(-1, second[..., None])) / 2
        for best in (first, second):
            nearly = mean * (1 + self.NUDGE * (best == first)[..., None])
            table = torch.where(tied[..., None], table.scatter(-1, best[..., None], nearly), table)
        super().__init__(table / table.sum(-1, keepdim=True))

    def doubt(self, batch, rows, branched):
        return 10 * self.NUDGE if self.cautious else 0.0

    def forward(self, tokens, *args, **options):
        out = super().forward(tokens, *args, **options)
        if tokens.shape[1] > 1:
            best = out.logits.argmax(-1, keepdim=True)
            sway = torch.full_like(best, -3 * self.NUDGE, dtype=out.logits.dtype)
            return ForwardOutput(out.logits.scatter_add(-1, best, sway))
        return out


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_near_ties_are_decided_in_a_pass_of_their_own(monkeypatch, trees, max_batch):
    target = Swayed()
    batch = [([1 + i % 6], SamplingParams(max_new_tokens=40, eos_token_ids=())) for i in range(6)]
    plain = [s.emitted for s in run(Engine(target), batch)]

    def fast():
        kind = TreeDrafter if trees else ModelDrafter
        engine = Engine(target, kind(target), 3, GreedyVerifier(), max_batch)
        found = run(engine, batch)
        events = [e for s in found for e in s.events]
        assert engine.stats.emitted == len(events) == 6 * 40
        assert engine.stats.accepted == sum(e.provenance == "draft" for e in events)
        assert engine.stats.tokens_per_pass > 1
        return [s.emitted for s in found]

    assert fast() == plain
    monkeypatch.setattr(Swayed, "cautious", False)  # the control
    assert fast() != plain


def test_of_a_draft_that_was_not_judged_nothing_is_told():
    """As it lay behind a near tie, and another pass decides."""
    told, batch = [], [([1 + i], SamplingParams(max_new_tokens=60)) for i in range(4)]

    class Listens(Controller):
        def told(self, one):
            told.append(one.reached)
            super().told(one)

    engine = Engine(Swayed(), ModelDrafter(Swayed()), "auto", GreedyVerifier(), 1)
    control = Listens(engine.controller.members)
    engine.controller = engine._drafting.controller = control
    cut = []
    without = engine._without_doubt
    engine._without_doubt = lambda *args: [cut.append(e.tokens) or e for e in without(*args)]
    run(engine, batch)
    assert [] in [list(tokens) for tokens in cut]  # nothing was sure, of some
    assert told
    assert 0 not in told


def test_provenance_and_depth():
    (s,) = run(make(3), [([1], SamplingParams(temperature=1.0, seed=3, max_new_tokens=200))])
    kinds = [e.provenance for e in s.events]
    assert set(kinds) == {"draft", "correction", "bonus", "plain"} - (
        set() if "plain" in kinds else {"plain"}
    )
    depth = 0
    for event in s.events:
        depth += 1
        assert event.depth == depth
        if event.provenance != "draft":
            assert depth == 4 if event.provenance == "bonus" and s.events[-1] != event else True
            depth = 0
    assert s.stats.emitted == len(s.events) == 200
    assert s.stats.accepted == kinds.count("draft")


def test_plain_decoding_is_plain():
    (s,) = run(Engine(TARGET), [([1], SamplingParams(max_new_tokens=5))])
    assert {e.provenance for e in s.events} == {"plain"}
    assert s.stats.rounds == 5
    assert s.stats.acceptance_rate is None
    assert s.stats.draft_cost is None


def test_k_zero_is_plain_decoding_with_the_same_noise():
    """K = 0 and no drafter are the same code and the same draws."""
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=40)
    (a,) = run(make(0), [([1], params)])
    (b,) = run(Engine(TARGET), [([1], params)])
    assert a.emitted == b.emitted


def test_logprobs_are_the_targets_own():
    params = SamplingParams(temperature=0.5, top_k=3, seed=2, max_new_tokens=50)
    (s,) = run(make(3), [([1, 2], params)])
    tokens = s.tokens
    for i, event in enumerate(s.events):
        a, b = tokens[i], tokens[i + 1]
        assert event.logprob == pytest.approx(float(TARGET.table[a, b, event.token_id].log()))


def counting(vocab: int = V) -> MarkovModel:
    """0 → 1 → 2 → ... → 0, with certainty."""
    return MarkovModel(torch.eye(vocab, dtype=torch.float64).roll(1, 1))


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_eos_inside_a_block_cuts_everything_behind_it(k):
    """The text, the statistics and the stream see nothing behind the EOS token."""
    engine = Engine(counting(), ModelDrafter(counting()), k)
    (s,) = run(engine, [([0], SamplingParams(eos_token_ids=(4,)))])
    assert s.emitted == [1, 2, 3, 4]
    assert s.finish_reason == "stop"
    assert s.stopped_by == 4
    assert s.stats.emitted == engine.stats.emitted == 4
    assert s.stats.accepted <= s.stats.proposed <= 4
    if k:
        assert s.stats.acceptance_rate == 1.0
    assert engine.free_slots == 8


@pytest.mark.parametrize("n", range(1, 9))
def test_max_new_tokens_is_exact_and_nothing_is_drafted_past_it(n):
    engine = Engine(counting(), ModelDrafter(counting()), 4)
    (s,) = run(engine, [([0], SamplingParams(max_new_tokens=n, eos_token_ids=()))])
    assert len(s.emitted) == n
    assert s.finish_reason == "length"
    assert s.stats.proposed + s.stats.rounds == n


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("limit", [4, 7, 64])
def test_the_context_ends_with_its_reason(k, limit):
    target = MarkovModel(counting().table, context_length=limit)
    engine = Engine(target, ModelDrafter(counting()), k)
    (s,) = run(engine, [([0, 1], SamplingParams(max_new_tokens=500, eos_token_ids=()))])
    assert s.finish_reason == "context"
    assert len(s.tokens) == limit
    assert s.tokens == [i % V for i in range(limit)]


def test_a_draft_with_a_short_context_falls_silent():
    short = MarkovModel(counting().table, context_length=10)
    engine = Engine(counting(), ModelDrafter(short), 3)
    batch = [([0] * n, SamplingParams(max_new_tokens=20, eos_token_ids=())) for n in (1, 9, 30)]
    for s in run(engine, batch):
        assert s.emitted == [(i + 1) % V for i in range(20)]
        assert all(e.provenance == "plain" for e in s.events[-5:])


def test_context_errors_come_before_anything_runs():
    engine = Engine(MarkovModel(TARGET.table, context_length=10))
    with pytest.raises(outpace.ContextLengthError, match="shorten the prompt to at most 9"):
        engine.submit([1] * 10, SamplingParams())
    with pytest.raises(outpace.ContextLengthError, match="ask for at most 4"):
        engine.submit([1] * 6, SamplingParams(max_new_tokens=5, on_context_full="error"))
    engine.submit([1] * 6, SamplingParams(max_new_tokens=4, on_context_full="error"))
    with pytest.raises(outpace.ContextLengthError, match="more than the model's context"):
        Engine(TARGET, max_len=5000)


def test_finished_sequences_leave_and_waiting_ones_enter():
    engine = make(2, max_batch=2)
    lengths = [3, 30, 5, 8, 2]
    sequences = [
        engine.submit([1], SamplingParams(max_new_tokens=n, eos_token_ids=(), seed=0))
        for n in lengths
    ]
    most = 0
    while engine.busy:
        most = max(most, len(engine.step()))
    assert most == 2
    assert [len(s.emitted) for s in sequences] == lengths
    assert engine.free_slots == 2


def test_cancelled_requests_free_their_slots():
    engine = make(2, max_batch=1)
    running = engine.submit([1], SamplingParams(max_new_tokens=50, eos_token_ids=()))
    waiting = engine.submit([1], SamplingParams(max_new_tokens=50, eos_token_ids=()))
    last = engine.submit([1], SamplingParams(max_new_tokens=3, eos_token_ids=()))
    engine.step()
    engine.cancel(waiting)
    engine.cancel(running)
    assert engine.free_slots == 1
    while engine.busy:
        engine.step()
    assert len(last.emitted) == 3
    assert running.finish_reason == waiting.finish_reason == "cancelled"


class PointOnly(TokenVerifier):
    name = "point-only"
    laws = (PointMass,)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: make(-1), outpace.OptionError, "k must be a whole number >= 0"),
        (lambda: make(2.5), outpace.OptionError, "k must be a whole number >= 0"),
        (lambda: make(max_batch=0), outpace.OptionError, "max_batch"),
        (lambda: make(max_len=1), outpace.OptionError, "max_len"),
        (lambda: make(verifier=PointOnly()), outpace.IncompatibleError, "not exact for drafts"),
        (
            lambda: make(drafter=TreeDrafter(DRAFT), verifier=BlockVerifier()),
            outpace.IncompatibleError,
            "proposes trees and the verifier 'block' takes chains only",
        ),
        (lambda: make().submit([], SamplingParams()), outpace.OptionError, "prompt is empty"),
        (lambda: make().submit([V], SamplingParams()), outpace.OptionError, "outside the target"),
        (
            lambda: make(verifier=GreedyVerifier()).submit([1], SamplingParams(temperature=1.0)),
            outpace.IncompatibleError,
            "exact at temperature 0 only",
        ),
    ],
)
def test_what_cannot_work_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


class Wrong(Drafter):
    """Proposes what it must not."""

    name = "wrong"

    def __init__(self, tokens, parents, laws=(PointMass,)):
        self.draft_ = torch.tensor([tokens]), Tree(parents)
        self.laws = laws

    def draft(self, contexts, budgets, warp, noise):
        tokens, tree = self.draft_
        return Draft(tokens, PointMass(), (tree,))


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Wrong([V], (-1,)), f"token {V}, which is outside the target's vocabulary of {V}"),
        (Wrong([1, -1], (-1, 0)), "proposed token -1"),
        (Wrong([1] * 4, (-1, 0, 1, 2)), "a path of 4 tokens where 3 were allowed"),
        (
            Wrong([1, 2], (-1, -1)),
            "proposed paths of one length, and says",
        ),
        (Wrong([1], (-1,), (Rows,)), "by the law PointMass, which its laws do not name"),
    ],
)
def test_a_draft_that_must_not_be_is_refused(drafter, message):
    """Its request ends with the error, and the next one finds a free slot."""
    engine = make(3, drafter=drafter)
    request = engine.submit([1], SamplingParams(max_new_tokens=20, eos_token_ids=()))
    with pytest.raises(outpace.IncompatibleError, match=message):
        engine.step()
    assert request.finish_reason == "cancelled"
    assert not engine.busy


def test_draft_law_is_a_point_mass_only_when_all_are_greedy():
    """A greedy row among sampled ones carries one-hot rows: the law stays true."""
    drafter = ModelDrafter(mixed())
    seen = []
    original = drafter.draft

    def spy(contexts, budgets, warp, noise):
        draft = original(contexts, budgets, warp, noise)
        seen.append(draft)
        return draft

    drafter.draft = spy
    run(
        make(2, drafter=drafter),
        [
            ([1], SamplingParams(max_new_tokens=4, eos_token_ids=())),
            ([1], SamplingParams(temperature=1.0, seed=0, max_new_tokens=30)),
        ],
    )
    first, last = seen[0], seen[-1]
    assert isinstance(first.law, Rows)
    assert set(first.law.q[0].unique().tolist()) == {0.0, 1.0}
    assert isinstance(last.law, Rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(temperature):
    broken = MarkovModel(TARGET.table)
    broken._log = broken._log.clone()
    broken._log[:, 3] = float("nan")
    engine = Engine(broken, ModelDrafter(mixed()), 2)
    engine.submit([1, 3], SamplingParams(temperature=temperature, seed=0))
    with pytest.raises(outpace.NumericsError, match="not numbers"):
        engine.step()
