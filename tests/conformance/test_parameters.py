"""Every sampling parameter with every lossless verifier, drafts shaped by it or not.

At temperature 0 the tokens are plain decoding's, in batches whose requests differ in their
parameters. Sampled, every row that a verifier is handed is the twins' law of its own prefix,
and the first tokens have the law that follows from the target's table by the twins alone: a χ²
test with a false-alarm rate of 1e-6 each (seeds are fixed).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import generation as hf

import chi_square
import twins
from growing import texts
from outpace import SamplingParams
from outpace.drafters import ModelDrafter
from outpace.engine import Engine, Request, engine
from outpace.errors import DeadEndError
from outpace.models import MarkovModel
from outpace.sampling import transforms, warp
from outpace.trees import Builder, StaticBuilder, k_ary, paths_tree
from outpace.types import Independent, PointMass
from outpace.verifiers import VERIFIERS, make_verifier

V = 5
TARGET = MarkovModel.random(V, 2, 0)
NEAR = MarkovModel(0.6 * TARGET.table + 0.4 * MarkovModel.random(V, 2, 1).table)
DRAFTS = {"near": NEAR, "narrow": MarkovModel.random(V - 1, 1, 2)}
PROMPT = [1, 2, 1]

LOSSLESS = [name for name, kind in VERIFIERS.items() if kind.lossless]
SAMPLING = [name for name in LOSSLESS if VERIFIERS[name].takes_sampling]


TREES = {
    "traversal": lambda: StaticBuilder(k_ary([2, 2])),
    "kseq": lambda: StaticBuilder(paths_tree(2, 3), "with"),
    "multipath": lambda: StaticBuilder(paths_tree(2, 3), "with"),
}
"""What is drafted where a rule is for more than chains."""


def sway(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's: something about all that stands before."""
    scores[torch.arange(len(ids)), ids.sum(-1) % V] += 1.5
    return scores


def sway_twin(row: list[float], prefix: list[int]) -> list[float]:
    return twins.biased(row, {sum(prefix) % V: 1.5})


SEQUENCES = {(1, 2): 1.5, (4,): -0.5, (0, 1, 3): 2.0, (2, 2): -1.0}


def sequence_bias_twin(row: list[float], prefix: list[int]) -> list[float]:
    for sequence, x in SEQUENCES.items():
        row = twins.biased(row, dict.fromkeys(twins.completing(prefix, [sequence], V), x))
    return row


Also = tuple[Callable[[list[float], list[int]], list[float]], ...]

PENALTIES = {"presence_penalty": 0.75, "frequency_penalty": 0.5}
BIAS = {0: 1.25, 3: -math.inf}
LEAST = {"min_new_tokens": 2, "eos_token_ids": (3,)}
USERS = (sway, hf.SequenceBiasLogitsProcessor(SEQUENCES))
PARAMETERS: dict[str, tuple[dict, Also]] = {
    "temperature": ({"temperature": 0.6}, ()),
    "top-k": ({"top_k": 3}, ()),
    "top-p": ({"top_p": 0.8}, ()),
    "min-p": ({"min_p": 0.3}, ()),
    "repetition": ({"repetition_penalty": 1.75}, ()),
    "presence and frequency": (PENALTIES, ()),
    "no pair twice": ({"no_repeat_ngram": 2}, ()),
    "bias": ({"logit_bias": BIAS}, ()),
    "bad words": ({"bad_words": [(2,), (1, 4), (4, 0, 1)]}, ()),
    "least": (LEAST, ()),
    "a function": ({"transforms": sway}, (sway_twin,)),
    "a processor": ({"transforms": USERS[1]}, (sequence_bias_twin,)),
    "all": (
        {
            "temperature": 0.8,
            "top_k": 4,
            "top_p": 0.97,
            "min_p": 0.05,
            "repetition_penalty": 1.25,
            "no_repeat_ngram": 3,
            "logit_bias": {0: 0.75, 2: -0.5},
            "bad_words": [(1, 4), (4, 0, 1)],
            "transforms": USERS,
        }
        | PENALTIES
        | LEAST,
        (sway_twin, sequence_bias_twin),
    ),
}


def params_of(name: str, **options) -> SamplingParams:
    given = {"temperature": 1.0, "eos_token_ids": (), **PARAMETERS[name][0], **options}
    return SamplingParams(**given)


def twin_row(model: MarkovModel, prompt, text, name: str, shaped: bool = True) -> list[float]:
    """Logits of one prefix."""
    row = model.table[tuple([0, 0, *prompt, *text][-2:])].log().tolist()
    if not shaped:
        return row
    return twins.shaped(row, prompt, text, params_of(name), PARAMETERS[name][1])


def run(engine: Engine, requests) -> list[Request]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.busy:
        engine.step()
    return submitted


def make(
    verifier: str, k: int, max_batch: int, draft: str = "near", tree: Builder | None = None
) -> Engine:
    if tree is None and verifier in TREES:
        tree = TREES[verifier]()
    drafter = ModelDrafter(DRAFTS[draft], tree=tree)
    return Engine(TARGET, drafter, k, make_verifier(verifier), max_batch)


# --- greedy ---------------------------------------------------------------------------------

GREEDY = [
    (name, prompt, params_of(name, temperature=0, max_new_tokens=26, transform_draft=shaped))
    for name in PARAMETERS
    for prompt in (PROMPT, [4, 4])
    for shaped in (True, False)
]


def greedy_texts(engine: Engine, sampled: bool = False):
    """What each request emitted and how it ended; between them others that sample, if asked to."""
    requests = [(prompt, params) for _, prompt, params in GREEDY]
    others = [(p, replace(s, temperature=1.0, seed=i)) for i, (p, s) in enumerate(requests)]
    mixed = [r for both in zip(requests, others, strict=True) for r in both]
    done = run(engine, mixed)[::2] if sampled else run(engine, requests)
    return [(r.emitted, r.finish_reason, type(r.failure)) for r in done]


@pytest.fixture(scope="module")
def plain():
    return greedy_texts(Engine(TARGET, max_batch=1))


def test_plain_greedy_texts_are_the_twins(plain):
    for (name, prompt, params), (emitted, reason, failure) in zip(GREEDY, plain, strict=True):
        text: list[int] = []
        ended = dead = False
        while not ended and len(text) < params.max_new_tokens:
            row = twin_row(TARGET, prompt, text, name)
            if dead := max(row) == -math.inf:
                break
            text.append(row.index(max(row)))
            ended = text[-1] in params.eos_token_ids
        assert emitted == text
        assert reason == ("cancelled" if dead else "stop" if ended else "length")
        assert failure is (DeadEndError if dead else type(None))
    assert {reason for _, reason, _ in plain} == {"cancelled", "stop", "length"}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("verifier", LOSSLESS)
def test_greedy_is_plain(verifier, sampled, plain):
    if sampled and verifier not in SAMPLING:
        return
    for k in (1, 4):
        assert greedy_texts(make(verifier, k, 5), sampled) == plain


def test_a_function_that_refuses_some_texts_is_asked_about_drafts_in_vain():
    """It ends a request where plain decoding would, not where a draft goes."""

    def picky(ids, scores):
        assert not (ids == 4).any(), "forbidden, so no text has it"
        assert ids.shape[1] < 9, "too long"
        return sway(ids, scores)

    options = {"bad_words": [(4,)], "transforms": picky, "transform_draft": False}
    requests = [
        (PROMPT, params_of("a function", temperature=t, seed=i, **options))
        for i, t in enumerate((0, 0, 1, 1, 1))
    ]
    want = run(Engine(TARGET, verifier=make_verifier("match")), requests)
    got = run(make("match", 4, 3), requests)
    assert [r.emitted for r in got] == [r.emitted for r in want]
    for request in got:
        assert len(request.emitted) == 6
        assert "too long" in str(request.failure)


# --- seeds ----------------------------------------------------------------------------------


def seeded(engine: Engine, **options) -> list[list[int]]:
    names = [name for name in PARAMETERS for _ in range(6)]
    params = [params_of(name, max_new_tokens=9, **options) for name in names]
    return [
        r.emitted for r in run(engine, [(PROMPT, p.with_seed(i)) for i, p in enumerate(params)])
    ]


@pytest.mark.parametrize(
    ("verifier", "reference"),
    [
        ("match", lambda: make("match", 0, 1)),
        ("coupled", lambda: make("coupled", 0, 1)),
    ],
)
def test_seeded_texts_do_not_depend_on_the_draft(verifier, reference):
    want = seeded(reference())
    for k, draft in ((1, "near"), (4, "near"), (3, "narrow")):
        for shaped in (True, False):
            assert seeded(make(verifier, k, 7, draft), transform_draft=shaped) == want
    assert seeded(make(verifier, 3, 7, "near", StaticBuilder(k_ary([2, 3])))) == want


# --- rows -----------------------------------------------------------------------------------


class Watched:
    """A verifier whose calls are kept."""

    def __init__(self, verifier) -> None:
        self._verifier, self.calls = verifier, []

    def __getattr__(self, name):
        return getattr(self._verifier, name)

    def __call__(self, p, draft, noise):
        self.calls.append((p, draft))
        return self._verifier(p, draft, noise)


def rows(verifier: str, shaped: bool) -> Iterator[tuple[str, torch.Tensor, list[float]]]:
    """A kind, a row that a verifier was handed, and the twins' law of the same prefix."""
    engine = make(verifier, 3, 2 * len(PARAMETERS))
    watched = engine.verifier = Watched(engine.verifier)
    names = [name for name in PARAMETERS for _ in range(2)]
    options = {"max_new_tokens": 12, "transform_draft": shaped}
    params = [params_of(name, **options).with_seed(i) for i, name in enumerate(names)]
    requests = [engine.submit(PROMPT, p) for p in params]
    while engine.busy:
        live = [(i, r.emitted) for i, r in enumerate(requests) if r.finish_reason is None]
        engine.step()
        p, draft = watched.calls[-1]
        assert len(p) == len(live)
        for b, (i, text) in enumerate(live):
            if isinstance(requests[i].failure, DeadEndError):
                continue
            tree, tokens = draft.trees[b], draft.tokens[b].tolist()
            behind = [(), *texts(tree, tokens)]
            for n, said in enumerate(behind):
                row = twin_row(TARGET, PROMPT, [*text, *said], names[i])
                if max(row) > -math.inf:
                    yield names[i], p[b, n], twins.law(row, params[i])
            for n, parent in enumerate(
                tree.parents if not isinstance(draft.law, PointMass) else ()
            ):
                before = [*text, *behind[parent + 1]]
                row = twin_row(NEAR, PROMPT, before, names[i], shaped)
                if max(row) == -math.inf:
                    continue
                law = twins.law(row, params[i])
                if not isinstance(draft.law, Independent):
                    elder = {tokens[m] for m in range(n) if tree.parents[m] == parent}
                    law = [0.0 if token in elder else x for token, x in enumerate(law)]
                if any(law):
                    yield names[i], draft.law.q[b, n], [x / sum(law) for x in law]


def wrong_rows(verifier: str, shaped: bool) -> Counter[str]:
    """How many rows of each kind are not the twins'."""
    wrong: Counter[str] = Counter()
    for name, row, law in rows(verifier, shaped):
        wrong[name] += not torch.allclose(row, torch.tensor(law, dtype=row.dtype), atol=1e-6)
    return wrong


@pytest.mark.parametrize("shaped", [True, False])
@pytest.mark.parametrize("verifier", SAMPLING)
def test_rows_are_the_laws_of_their_own_prefixes(verifier, shaped):
    """The target's rows, and the draft's, which are shaped or not as the request asks."""
    wrong = wrong_rows(verifier, shaped)
    assert wrong.keys() == PARAMETERS.keys()
    assert not any(wrong.values())


# --- laws -----------------------------------------------------------------------------------

SEEDS = 500  # for each verifier: 3500 for each kind of parameters
LENGTH = 3


def brute_force(name: str) -> dict[tuple[int, ...], float]:
    """The law of the first tokens, from the target's table by the twins alone."""
    params, done = params_of(name), {}
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for text, mass in open_texts:  # grows on the way
        if len(text) == LENGTH or (text and text[-1] in params.eos_token_ids):
            done[text] = mass
            continue
        law = twins.law(twin_row(TARGET, PROMPT, list(text), name), params)
        open_texts += [((*text, token), mass * x) for token, x in enumerate(law) if x]
    assert sum(done.values()) == pytest.approx(1)
    return done


def sample(name: str, verifier: str) -> Counter[tuple[int, ...]]:
    """Texts of seeds that no other verifier has; every other request's drafts are shaped."""
    first = SEEDS * SAMPLING.index(verifier)
    both = [params_of(name, max_new_tokens=LENGTH, transform_draft=t) for t in (True, False)]
    requests = [(PROMPT, both[i % 2].with_seed(first + i)) for i in range(SEEDS)]
    return Counter(tuple(r.emitted) for r in run(make(verifier, 2, 64), requests))


def p_value(found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    return chi_square.p_value(chi_square.chi_square(found, law))


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampled_texts_have_the_law_of_the_parameters(name):
    law, together = brute_force(name), Counter()
    for verifier in SAMPLING:
        found = sample(name, verifier)
        assert p_value(found, law) > 1e-6
        together += found
    assert p_value(together, law) > 1e-6
    assert p_value(together, plain_law()) < 1e-6  # the test can tell


def plain_law() -> dict[tuple[int, ...], float]:
    """Without any parameters."""
    table = TARGET.table
    return {
        (a, b, c): float(table[2, 1, a] * table[1, a, b] * table[a, b, c])
        for a in range(V)
        for b in range(V)
        for c in range(V)
    }


# --- negative controls ----------------------------------------------------------------------

BY_PREFIX = [
    "repetition",
    "presence and frequency",
    "no pair twice",
    "bad words",
    "least",
    "a function",
    "a processor",
    "all",
]


def test_rows_shaped_by_what_is_committed_would_be_noticed(monkeypatch, plain):
    """Transforms once per block, as a decoder that knows nothing of drafts would apply them."""
    honest = engine.drafted_paths
    monkeypatch.setattr(engine, "drafted_paths", lambda d: [[()] * len(p) for p in honest(d)])
    found = greedy_texts(make("token", 4, 5))
    differ = {name for (name, _, _), a, b in zip(GREEDY, found, plain, strict=True) if a != b}
    assert {"presence and frequency", "no pair twice", "all"} <= differ <= set(BY_PREFIX)
    for verifier in SAMPLING:
        wrong = wrong_rows(verifier, shaped=True)
        assert {name for name, count in wrong.items() if count} == set(BY_PREFIX)
    for name in ("repetition", "least", "all"):
        assert p_value(sample(name, "token"), brute_force(name)) < 1e-6


def test_parameters_dropped_in_blocks_would_be_noticed(monkeypatch, plain):
    """Bias and min-p for plain rounds only."""
    bias, min_p = transforms.LogitBias.__call__, warp.min_p_filter
    monkeypatch.setattr(
        transforms.LogitBias,
        "__call__",
        lambda self, x, prefixes: x if len(prefixes.paths) > 1 else bias(self, x, prefixes),
    )
    monkeypatch.setattr(warp, "min_p_filter", lambda p, m: p if p.shape[1] > 1 else min_p(p, m))
    found = greedy_texts(make("token", 4, 5))
    differ = {name for (name, _, _), a, b in zip(GREEDY, found, plain, strict=True) if a != b}
    assert "bias" in differ
    for name in ("bias", "min-p"):
        assert p_value(sample(name, "token"), brute_force(name)) < 1e-6
        assert wrong_rows("token", shaped=True)[name]
