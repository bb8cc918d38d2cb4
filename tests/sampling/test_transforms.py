"""Transforms of rows by their own prefixes, against slow twins and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from transformers import generation as hf

import twins
from outpace import OptionError, SamplingParams
from outpace.errors import DeadEndError
from outpace.sampling import Pipeline, Prefixes, Transform, Warp
from outpace.sampling.transforms import (
    BadText,
    BadTokens,
    LogitBias,
    MinNewTokens,
    NoRepeatNgram,
    Penalties,
    UserTransform,
    completing_ids,
)

CPU = torch.device("cpu")
V = 5
INF = math.inf

token = st.integers(0, V - 1)
number = st.one_of(st.integers(-3, 3).map(float), st.floats(-9, 9), st.just(-INF))
logit_row = st.lists(number, min_size=V, max_size=V)
path = st.lists(token, max_size=5)
rows_of_a_call = st.lists(st.tuples(path, logit_row), min_size=1, max_size=5)


@dataclass(frozen=True)
class Case:
    """A prompt, and calls: what is committed before each, then its paths and rows."""

    prompt: list[int]
    calls: list[tuple[list[int], list[tuple[list[int], list[float]]]]]


cases = st.builds(
    Case,
    st.lists(token, min_size=1, max_size=5),
    st.lists(st.tuples(st.lists(token, max_size=3), rows_of_a_call), min_size=1, max_size=4),
)


def user(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Sways by the sum of all that stands before."""
    scores[torch.arange(len(ids)), ids.sum(-1) % V] += 1.5
    return scores


def user_twin(row: list[float], prefix: list[int]) -> list[float]:
    return twins.biased(row, {sum(prefix) % V: 1.5})


PIECES = [b"", b"a", b"b", b"ab", b"ba"]  # the first is no text
Twin = Callable[[list[float], list[int], list[int]], list[float]]


def penalties(**options: float) -> tuple[Callable[[], Transform], Twin]:
    return lambda: Penalties(V, CPU, **options), partial(twins.penalised, **options)


def ngram(n: int) -> tuple[Callable[[], Transform], Twin]:
    return lambda: NoRepeatNgram(n), lambda row, prompt, text: twins.without(
        row, twins.repeating([*prompt, *text], n, V)
    )


def bad_tokens(*sequences: tuple[int, ...]) -> tuple[Callable[[], Transform], Twin]:
    return lambda: BadTokens(sequences), lambda row, prompt, text: twins.without(
        row, twins.completing([*prompt, *text], sequences, V)
    )


def bad_text(*words: bytes) -> tuple[Callable[[], Transform], Twin]:
    ids = [completing_ids(PIECES, word) for word in words]
    return lambda: BadText(PIECES, words, ids), lambda row, prompt, text: twins.without(
        row, twins.spelling([*prompt, *text], PIECES, words)
    )


KINDS: dict[str, tuple[Callable[[], Transform], Twin]] = {
    "bias": (
        lambda: LogitBias({1: 0.5, 4: -INF}, CPU),
        lambda row, prompt, text: twins.biased(row, {1: 0.5, 4: -INF}),
    ),
    "repetition": penalties(repetition=1.5),
    "less than one": penalties(repetition=0.75),
    "presence": penalties(presence=0.75),
    "frequency": penalties(frequency=-0.25),
    "all penalties": penalties(repetition=1.25, presence=-0.5, frequency=0.75),
    "no token twice": ngram(1),
    "no pair twice": ngram(2),
    "no three twice": ngram(3),
    "bad tokens": bad_tokens((2,), (0, 1), (1, 1, 3), (3, 0, 0, 0)),
    "bad words": bad_text(b"ab", b"bbab"),
    "a bad byte": bad_text(b"b"),
    "least": (
        lambda: MinNewTokens(4, (0, 3)),
        lambda row, prompt, text: twins.without(row, (0, 3) if len(text) < 4 else ()),
    ),
    "user": (
        lambda: UserTransform(user),
        lambda row, prompt, text: user_twin(row, [*prompt, *text]),
    ),
}


def both(transform: Transform, twin: Twin, case: Case):
    """What each makes of the rows of every call, the committed tokens growing between them."""
    tokens = list(case.prompt)
    for new, rows in case.calls:
        tokens += new
        prefixes = Prefixes(tokens, len(case.prompt), [p for p, _ in rows])
        given = torch.tensor([row for _, row in rows], dtype=torch.float64)
        text = tokens[len(case.prompt) :]
        want = [twin(row, case.prompt, [*text, *p]) for p, row in rows]
        yield transform(given, prefixes), torch.tensor(want, dtype=torch.float64)


def agree(transform: Transform, twin: Twin, case: Case) -> bool:
    return all(torch.allclose(got, want) for got, want in both(transform, twin, case))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(cases)
def test_every_row_is_the_twins_of_its_whole_prefix(kind, case):
    """The twin knows one prefix only: rows do not mix, and paths of earlier calls leave nothing."""
    make, twin = KINDS[kind]
    assert agree(make(), twin, case)


class Committed:
    """Broken: every row by what is committed."""

    def __init__(self, honest: Transform) -> None:
        self._honest = honest

    def __call__(self, logits, prefixes):
        return self._honest(logits, replace(prefixes, paths=[()] * len(prefixes.paths)))


class Leaky:
    """Broken: a path is taken for committed by the calls behind it."""

    def __init__(self, honest: Transform) -> None:
        self._honest, self._left = honest, []

    def __call__(self, logits, prefixes):
        shaped = self._honest(logits, replace(prefixes, tokens=[*prefixes.tokens, *self._left]))
        self._left += prefixes.paths[-1]
        return shaped


@pytest.mark.parametrize("broken", [Committed, Leaky])
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("bias", "a bad byte")])
def test_a_wrong_prefix_would_be_noticed(kind, broken):
    make, twin = KINDS[kind]
    at_once = settings(phases=[Phase.generate], max_examples=500)
    assert find(cases, lambda case: not agree(broken(make()), twin, case), settings=at_once)


SEQUENCES = ((2,), (0, 1), (1, 1, 3), (3, 0, 0, 0))
THEIRS = {
    "bias": (
        lambda: LogitBias({1: 0.5, 4: -2.0}, CPU),
        lambda prompt: hf.SequenceBiasLogitsProcessor({(1,): 0.5, (4,): -2.0}),
    ),
    "repetition": (
        lambda: Penalties(V, CPU, 1.5),
        lambda prompt: hf.RepetitionPenaltyLogitsProcessor(1.5),
    ),
    "no token twice": (
        lambda: NoRepeatNgram(1),
        lambda prompt: hf.NoRepeatNGramLogitsProcessor(1),
    ),
    "no three twice": (
        lambda: NoRepeatNgram(3),
        lambda prompt: hf.NoRepeatNGramLogitsProcessor(3),
    ),
    "bad tokens": (
        lambda: BadTokens(SEQUENCES),
        lambda prompt: hf.NoBadWordsLogitsProcessor([list(s) for s in SEQUENCES]),
    ),
    "least": (
        lambda: MinNewTokens(3, (0, 3)),
        lambda prompt: hf.MinNewTokensLengthLogitsProcessor(len(prompt), 3, [0, 3]),
    ),
}


@pytest.mark.parametrize("kind", THEIRS)
@settings(max_examples=50)
@given(cases)
def test_what_transformers_has_too_is_the_same(kind, case):
    make, theirs = THEIRS[kind]
    processor = theirs(case.prompt)

    def twin(row, prompt, text):
        ids = torch.tensor([[*prompt, *text]])
        return processor(ids, torch.tensor([row], dtype=torch.float64))[0].tolist()

    assert agree(make(), twin, case)


@settings(max_examples=60)
@given(
    st.integers(0, 99),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([None, 3, 8]),
    st.sampled_from([1.0, 0.83]),
    st.sampled_from([0.02, 0.13, 0.4]),
)
def test_min_p_is_that_of_transformers(seed, temperature, top_k, top_p, min_p):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = hf.TemperatureLogitsWarper(temperature)(None, x)
    for kind, value in (
        (hf.TopKLogitsWarper, top_k or 12),
        (hf.TopPLogitsWarper, top_p),
        (hf.MinPLogitsWarper, min_p),
    ):
        scores = kind(value)(None, scores)
    found = Warp([params], 12, CPU)(x.unsqueeze(0))[0]
    assert torch.allclose(found, scores.softmax(-1))


# --- words in the text ----------------------------------------------------------------------

letters = st.lists(st.sampled_from(b"abc"), max_size=4).map(bytes)
word = st.lists(st.sampled_from(b"abc"), min_size=1, max_size=5).map(bytes)


@settings(max_examples=200)
@given(
    st.lists(letters, min_size=1, max_size=8),
    st.lists(word, min_size=1, max_size=3),
    st.lists(st.integers(0, 7), max_size=3),
    st.integers(0, 2**20),
)
def test_bad_words_never_stand_in_a_text(pieces, words, prompt, seed):
    """A token is forbidden if, and only if, a word would end in it; no word ever does."""
    generator = torch.Generator().manual_seed(seed)
    transform = BadText(pieces, words, [completing_ids(pieces, word) for word in words])
    prompt = [i % len(pieces) for i in prompt]
    tokens = list(prompt)
    for _ in range(25):
        draft = torch.randint(len(pieces), (3,), generator=generator).tolist()
        paths = [draft[:n] for n in range(4)]
        logits = torch.randn(4, len(pieces), generator=generator)
        masked = transform(logits, Prefixes(tokens, len(prompt), paths))
        for row, path in zip(masked, paths, strict=True):
            banned = row.isneginf().nonzero().flatten().tolist()
            assert set(banned) == twins.spelling([*tokens, *path], pieces, words)
        if masked[0].isneginf().all():
            break
        tokens.append(int(masked[0].argmax()))
    start = len(b"".join(pieces[i] for i in prompt))
    whole = b"".join(pieces[i] for i in tokens)
    for word in words:  # one that the prompt begins must not end in the text
        assert whole.find(word, max(0, start - len(word) + 1)) < 0


def test_a_word_is_found_around_tokens_without_text():
    """Special tokens and padding are no text, so a word goes on behind them."""
    pieces = [b"a", b"b", b""]
    transform = BadText(pieces, [b"ab"], [completing_ids(pieces, b"ab")])
    masked = transform(torch.zeros(2, 4), Prefixes([0, 2, 3, 2], 1, [(), (2,)]))
    assert masked.isneginf().tolist() == [[False, True, False, False]] * 2


# --- the pipeline ---------------------------------------------------------------------------


def pipeline(*transforms: Transform, complete: Sequence[Sequence[int]] = ()) -> Pipeline:
    return Pipeline([0, 1], 1, transforms, lambda path: list(path) in map(list, complete))


def test_rows_without_a_token_are_reported_and_stay_numbers():
    """Behind 2 nothing may come: a dead end, or the end where the text is complete."""
    banned = BadTokens([(0,), (1,), (3,), (4,), (2, 2)])
    paths = [(), (2,), (2, 2), (3,)]
    rows, stuck = pipeline(banned)(torch.ones(4, V), paths)
    assert stuck.keys() == {1, 2}
    assert all(isinstance(why, DeadEndError) for why in stuck.values())
    assert all("\n" not in str(why) for why in stuck.values())
    assert rows[[1, 2]].isfinite().all()
    assert rows[0].tolist() == rows[3].tolist() == [-INF, -INF, 1, -INF, -INF]
    _, stuck = pipeline(banned, complete=[(2,)])(torch.ones(4, V), paths)
    assert stuck[1] is None
    assert isinstance(stuck[2], DeadEndError)


def test_a_pipeline_leaves_its_input_alone_and_keeps_the_order():
    given = torch.zeros(1, V)
    rows, stuck = pipeline(LogitBias({1: 1.0}, CPU), Penalties(V, CPU, 2.0))(given, [()])
    assert rows.tolist() == [[0, 0.5, 0, 0, 0]]
    assert not given.any()
    assert stuck == {}


def raises(ids, scores):
    raise RuntimeError("no\nthank you")


def cuts(ids, scores):
    return scores[:, 1:]


def lists(ids, scores):
    return scores.tolist()


def not_numbers(ids, scores):
    return scores / 0


def infinite(ids, scores):
    return scores + INF


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, r"raises failed \(RuntimeError: no\)"),
        (cuts, r"cuts returned \[\d, 4\]: it must return scores of shape \[\d, 5\]"),
        (lists, "lists returned list"),
        (not_numbers, r"not_numbers returned NaN or \+inf"),
        (infinite, r"infinite returned NaN or \+inf"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_said(function, said):
    rows, stuck = pipeline(UserTransform(function))(torch.zeros(2, V), [(), (1,)])
    assert stuck.keys() == {0, 1}
    assert rows.isfinite().all()
    for error in stuck.values():
        with pytest.raises(OptionError, match=f"the transform {said}") as caught:
            raise error
        assert "\n" not in str(caught.value)


def test_a_row_that_a_function_fails_on_says_nothing_about_the_others():
    """Drafts go where the text never will."""

    def picky(ids, scores):
        assert not (ids == 2).any(), "never seen in a text"
        return user(ids, scores)

    paths = [(), (1,), (2,), (1, 2), (1, 1)]
    given = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    transforms = Penalties(V, CPU, 1.5), UserTransform(picky)
    rows, stuck = pipeline(*transforms)(given, paths)
    assert stuck.keys() == {2, 3}
    want, _ = pipeline(Penalties(V, CPU, 1.5), UserTransform(user))(given, paths)
    assert torch.equal(rows[[0, 1, 4]], want[[0, 1, 4]])


def test_functions_see_rows_of_one_length_together():
    seen = []

    def watching(ids, scores):
        seen.append(ids.tolist())
        assert ids.dtype == torch.int64
        return scores

    pipeline(UserTransform(watching))(torch.zeros(5, V), [(), (1,), (2,), (1, 3), (4,)])
    assert seen == [[[0, 1]], [[0, 1, 1], [0, 1, 2], [0, 1, 4]], [[0, 1, 1, 3]]]


# --- transforms of a batch ------------------------------------------------------------------


def test_a_batch_shapes_each_sequences_own_rows():
    """Padding and sequences without transforms stay as they are; `select` keeps whose is whose."""
    given = torch.randn(3, 3, V, generator=torch.Generator().manual_seed(0))
    kept = given.clone()
    pipelines = [pipeline(LogitBias({0: 1.0}, CPU)), None, pipeline(BadTokens([(1, 2), (4, 0)]))]
    params = [SamplingParams(temperature=1.0)] * 3
    warp = Warp(params, V, CPU, None, pipelines)
    paths = [[(), (3,)], [(), (1,), (1, 2)], [(), (4,)]]
    shaped = warp.shape(given, paths)
    want = given.clone()
    want[0, :2, 0] += 1
    want[2, 0, 2] = want[2, 1, 0] = -INF
    assert torch.equal(shaped.logits, want)
    assert shaped.stuck == ({}, {}, {})
    assert torch.equal(given, kept)
    for rows in ([2], [1, 0], [2, 2, 1]):
        some = warp.select(rows).shape(given[rows], [paths[i] for i in rows])
        assert torch.equal(some.logits, want[rows])
    assert warp.shapes
    assert not warp.select([1]).shapes
    assert not warp.by_kernels


def test_without_transforms_nothing_is_touched():
    given = torch.randn(2, 2, V)
    for pipelines in ((), (None, None)):
        warp = Warp([SamplingParams()] * 2, V, CPU, None, pipelines)
        assert warp.shape(given, ()).logits is given


def test_stuck_rows_belong_to_their_sequence():
    nothing = pipeline(BadTokens([(i,) for i in range(V)]))
    warp = Warp([SamplingParams()] * 2, V, CPU, None, [None, nothing])
    shaped = warp.shape(torch.zeros(2, 2, V), [[(), (1,)], [()]])
    assert shaped.stuck[0] == {}
    assert shaped.stuck[1].keys() == {0}
    assert shaped.logits.isfinite().all()


def test_half_precision_is_shaped_in_single():
    given = torch.randn(1, 1, V).to(torch.bfloat16)
    warp = Warp([SamplingParams()], V, CPU, None, [pipeline(LogitBias({0: 2.0**-9}, CPU))])
    shaped = warp.shape(given, [[()]]).logits
    assert shaped.dtype == torch.float32
    assert shaped[0, 0, 0] == given[0, 0, 0].float() + 2.0**-9
