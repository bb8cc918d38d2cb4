"""Constrained decoding: every row allows what its whole prefix may go on with; texts conform."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import outpace
from outpace import OptionError, SamplingParams
from outpace.assembly import Assembly
from outpace.errors import DeadEndError
from outpace.models.constraint import Constraint, Grammars
from outpace.models.tokenizer import Tokenizer
from outpace.sampling import Pipeline, Prefixes

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc"]},
        "on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "n", "kind", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"[0-9]{3}-[a-c]+(x|größe)"
LARK = 'start: "x" | "(" start ")" | start "+" start'


def is_valid(text: str) -> bool:
    """By `SCHEMA`, read by hand."""
    found = json.loads(text)
    return (
        list(found) == ["name", "n", "kind", "on"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and type(found["n"]) is int
        and 0 <= found["n"] <= 99
        and found["kind"] in ("a", "bc")
        and len(found["on"]) <= 3
        and all(type(on) is bool for on in found["on"])
    )


def is_sum(text: str) -> bool:
    """By `LARK`: it comes down to x."""
    before = None
    while text != before:
        before, text = text, text.replace("(x)", "x").replace("x+x", "x")
    return text == "x"


CONSTRAINTS = {
    "json": ({"json_schema": SCHEMA}, is_valid),
    "regex": ({"regex": REGEX}, lambda text: bool(re.fullmatch(REGEX, text))),
    "lark": ({"grammar": LARK}, is_sum),
}
MATCHERS = {
    "json": lambda: llguidance.LLMatcher.grammar_from_json_schema(SCHEMA),
    "regex": lambda: llguidance.LLMatcher.grammar_from_regex(REGEX),
    "lark": lambda: llguidance.LLMatcher.grammar_from_lark(LARK),
}


@pytest.fixture(scope="module")
def load(pair):
    def make(draft: bool = True, **options):
        drafter = str(pair / "draft") if draft else None
        target, options = str(pair / "target"), {"k": 3, "max_batch": 4, **options}
        return outpace.load(target, drafter, dtype="float32", device="cpu", **options)

    return make


@pytest.fixture(scope="module")
def fast(load):
    return load()


@pytest.fixture(scope="module")
def plain(load):
    return load(draft=False)


@pytest.fixture(scope="module")
def tokenizer(pair):
    return Tokenizer.load(pair / "target")


# --- texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transform_draft", [True, False])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_texts_are_what_they_must_be(fast, kind, transform_draft):
    options, conforms = CONSTRAINTS[kind]
    options = options | {"max_new_tokens": 120, "transform_draft": transform_draft}
    params = [SamplingParams(**options)]
    params += [SamplingParams(temperature=1.0, seed=seed, **options) for seed in range(20)]
    results = fast.generate(["def f"] * len(params), params=params)
    ended = [r for r in results if r.finish_reason == "stop"]
    assert len(ended) > 15
    assert len({r.text for r in ended}) > (1 if kind == "lark" else 15)
    for result in ended:
        assert conforms(result.text), result.text
        assert result.stopped_by == fast.eos_token_ids[0]
    rate = sum(r.stats.accepted for r in results) / sum(r.stats.proposed for r in results)
    assert rate > 0.25 if transform_draft else rate < 0.25


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_they_are_plain_decodings(fast, plain, load, kind):
    options = CONSTRAINTS[kind][0] | {"max_new_tokens": 40}
    prompts = ["def f", "x", "print(", "for"]
    want, got = (g.generate(prompts, **options) for g in (plain, fast))
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    others = load(), load(verifier="coupled")
    for transform_draft in (True, False):
        sampled = options | {"temperature": 1.0, "seed": [1, 2, 3, 4]}
        want = plain.generate(prompts, **sampled)
        for other in others:
            got = other.generate(prompts, transform_draft=transform_draft, **sampled)
            assert [r.token_ids for r in got] == [r.token_ids for r in want]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_an_eos_token_a_complete_text_stops(fast, temperature):
    """No token is left, and none is needed."""
    options = {"eos_token_ids": (), "temperature": temperature, "seed": 0}
    for regex in ("[0-9]{3}", "(ab|abc)d", "x"):
        result = fast.generate("def f", regex=regex, **options)
        assert re.fullmatch(regex, result.text)
        assert result.finish_reason == "stop"
        assert result.stopped_by is None
        assert result.stats.emitted == len(result.token_ids)
    assert fast.engine.free_slots == 4


def test_a_stream_has_the_text_that_a_stop_string_held_back(fast, plain):
    """The end comes behind the last token, when its event might have been fetched."""
    for generator in (fast, plain):
        stream = generator.stream("x", regex="(ab|cd)b", stop=("bbb", "dbd"), eos_token_ids=())
        events = tuple(stream)
        (result,) = stream.results
        assert "".join(e.text for e in events) == result.text
        assert result.text in ("abb", "cdb")
        assert events == result.tokens


def test_what_may_go_on_goes_on(fast):
    """A constraint that allows the end does not call for it."""
    result = fast.generate("x", regex="[0-9]*", eos_token_ids=(), max_new_tokens=9)
    assert result.finish_reason == "length"
    assert re.fullmatch("[0-9]+", result.text)


DIGITS = list("0123456789")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_end_is_its_own_requests_error(fast, plain, temperature):
    """Its neighbours, in the same rounds, are what they are alone."""
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 20}
    impossible = [
        SamplingParams(regex="[0-9]+", bad_words=DIGITS, **options),
        SamplingParams(regex="ab[0-9]", bad_words=DIGITS, **options),
    ]
    others = [SamplingParams(**options), SamplingParams(regex=REGEX, **options)]
    for generator in (fast, plain):
        engine, tokenizer = generator.engine, generator.tokenizer
        eos = generator.eos_token_ids

        def run(params, engine=engine, tokenizer=tokenizer, eos=eos):
            prompt = tokenizer.encode("def f")
            found = [engine.submit(prompt, p, eos=eos, tokenizer=tokenizer) for p in params]
            while engine.busy:
                engine.step()
            return found

        first, plain_text, second, constrained = run(
            [impossible[0], others[0], impossible[1], others[1]]
        )
        for request, text in ((first, ""), (second, "ab")):
            assert isinstance(request.failure, DeadEndError)
            assert request.text == text
        alone = [run([p])[0] for p in others]
        assert [plain_text.emitted, constrained.emitted] == [r.emitted for r in alone]
        assert plain_text.failure is constrained.failure is None
        assert engine.free_slots == 4
        with pytest.raises(DeadEndError, match="no token is left"):
            generator.generate(["x", "y"], params=[others[0], impossible[1]])
        assert engine.free_slots == 4


# --- masks ----------------------------------------------------------------------------------


def masks(constraint, tokens: list[int], prompt: int, paths, vocab: int) -> list[set[int]]:
    logits = constraint(torch.zeros(len(paths), vocab), Prefixes(tokens, prompt, paths))
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def fresh_mask(tokenizer, grammar: str, text: list[int], vocab: int, eos: int) -> set[int] | None:
    """By a matcher that has seen nothing else; None behind what cannot be."""
    from llguidance.hf import from_tokenizer

    lexicon = from_tokenizer(tokenizer.hf, n_vocab=vocab, eos_token=[eos])
    matcher = llguidance.LLMatcher(lexicon, grammar)
    if eos in text or matcher.try_consume_tokens(text) < len(text):
        return None
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:vocab]).tolist())


def masks_are_fresh(tokenizer, kind: str, vocab: int) -> bool:
    """Whether every row's mask is that of a matcher which has seen its prefix alone.

    Paths are chains and branches, allowed or not, in every order, while the text grows.
    """
    grammar, (eos,) = MATCHERS[kind](), tokenizer.eos_token_ids
    params = SamplingParams(**CONSTRAINTS[kind][0])
    everything = set(range(vocab))
    generator = torch.Generator().manual_seed(0)

    def pick(among: set[int]) -> int:
        return sorted(among)[int(torch.randint(len(among), (1,), generator=generator))]

    def fresh(text):
        return fresh_mask(tokenizer, grammar, text, vocab, eos)

    for _ in range(3):
        constraint = tokenizer.grammars.constraint(params, vocab, (eos,))
        tokens, prompt = [5, 6], 2
        while len(tokens) < 20:
            paths: list[list[int]] = [[]]
            for _ in range(4):  # one token in four is any at all
                before = paths[pick(set(range(len(paths))))]
                allowed = fresh([*tokens[prompt:], *before])
                wild = allowed is None or pick({0, 1, 2, 3}) == 0
                paths.append([*before, pick(everything if wild else allowed)])
            want = [fresh([*tokens[prompt:], *path]) for path in paths]
            got = masks(constraint, tokens, prompt, paths, vocab)
            for path, mask, allowed in zip(paths, got, want, strict=True):
                whole = allowed is not None and eos in allowed
                right = mask == (everything if allowed is None else allowed)
                if not right or constraint.complete(path) != whole:
                    return False
            token = pick(want[0])
            if token == eos:
                break
            tokens.append(token)
    return True


@pytest.mark.parametrize("vocab", [320, 330])
@pytest.mark.parametrize("kind", MATCHERS)
def test_masks_are_those_of_a_fresh_matcher(tokenizer, kind, vocab):
    assert masks_are_fresh(tokenizer, kind, vocab)


@pytest.mark.parametrize("kind", MATCHERS)
def test_a_wrong_mask_would_be_noticed(tokenizer, kind, monkeypatch):
    """Negative controls: a matcher that does not go back, and rows by what is committed."""

    @contextmanager
    def onward(self, path):
        yield self._matcher.try_consume_tokens(list(path)) == len(path)

    with monkeypatch.context() as patch:
        patch.setattr(Constraint, "_behind", onward)
        assert not masks_are_fresh(tokenizer, kind, 320)
    honest = Constraint._mask
    monkeypatch.setattr(Constraint, "_mask", lambda self, path: honest(self, ()))
    assert not masks_are_fresh(tokenizer, kind, 320)


FINITE = {
    "regex": (
        {"regex": "(ab|ba|größer?)(print|p)?"},
        [a + b for a in ("ab", "ba", "größe", "größer") for b in ("print", "p", "")],
    ),
    "json": ({"json_schema": {"enum": ["a", "für", 12, None]}}, ['"a"', '"für"', "12", "null"]),
    "lark": (
        {"grammar": 'start: "def" x x\nx: "x" | "yx"'},
        ["def" + a + b for a in ("x", "yx") for b in ("x", "yx")],
    ),
}


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("eos", [(0,), ()])
def test_masks_of_a_finite_language(tokenizer, kind, eos):
    """Without llguidance in the twin: what begins one of its texts, and EOS behind a whole one.

    Where only one byte can come next, one token may stand for all that spell the rest.
    """
    vocab, pieces = 320, tokenizer.byte_pieces
    options, texts = FINITE[kind]
    language = [text.encode() for text in texts]
    constraint = tokenizer.grammars.constraint(SamplingParams(**options), vocab, eos)

    def begins(text: bytes) -> bool:
        return any(whole.startswith(text) for whole in language)

    paths: list[list[int]] = [[]]
    for path in paths:  # grows on the way: every way to spell every text
        text = b"".join(pieces[i] for i in path)
        more = [i for i in range(len(pieces)) if pieces[i] and begins(text + pieces[i])]
        paths += [[*path, i] for i in more]
        allowed = set(more) | (set(eos) if text in language else set())
        (got,) = masks(constraint, [1, 2], 2, [path], vocab)
        forced = text not in language and len({pieces[i][0] for i in more}) == 1
        assert got == allowed or (forced and got < allowed and len(got) == 1)
        assert constraint.complete(path) == (text in language)
    assert len(paths) > 10


def test_a_row_that_cannot_go_on_does_not_end_the_others():
    """A draft runs into what no token can spell. The matcher errs for good, the text does not."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {name: i for i, name in enumerate(["<end>", "a", "b", "x", "y"])}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    constraint = Grammars(hf).constraint(SamplingParams(regex="y(ax|bz)"), 5, (0,))
    tokens = [1]
    pipeline = Pipeline(tokens, 1, [constraint], constraint.complete)
    for text, paths in (([], [(), (4,), (4, 2), (4, 1)]), ([4], [(), (), (2,), (1,)])):
        tokens += text
        rows, stuck = pipeline(torch.zeros(4, 5), paths)
        assert stuck.keys() == {2}
        with pytest.raises(OptionError, match=r"the constraint cannot go on \(\w+\): simplify it"):
            raise stuck[2]
        allowed = [set(row.isfinite().nonzero().flatten().tolist()) for row in rows]
        assert allowed[1] == {1, 2}
        assert allowed[3] == {3}


# --- errors ---------------------------------------------------------------------------------


@pytest.fixture
def check(pair, monkeypatch):
    """Ask whether a request would be taken, with weights out of reach."""
    from outpace.models.checkpoint import Weights

    def reading(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "load", reading)
    assembly = Assembly(str(pair / "target"), str(pair / "draft"))
    return lambda **options: assembly.check(SamplingParams(**options), "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "("}, "regex cannot be used"),
        ({"regex": "(?=a)b"}, "regex cannot be used"),
        ({"regex": "\udcff"}, "regex cannot be used"),
        ({"json_schema": {"type": "nope"}}, "json_schema cannot be used"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema cannot be used"),
        ({"json_schema": "false"}, "json_schema cannot be used"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"grammar": "start: nothing"}, "grammar cannot be used"),
        ({"grammar": "%%%"}, "grammar cannot be used"),
        ({"regex": "a", "grammar": LARK}, "regex and grammar exclude each other"),
        ({"json_schema": True, "regex": "a"}, "json_schema and regex exclude each other"),
    ],
)
def test_what_cannot_be_used_is_said_before_weights_are_read(check, options, message):
    check(regex="[a-z]+")
    with pytest.raises(OptionError, match=message) as caught:
        check(**options)
    assert "\n" not in str(caught.value)


def test_without_llguidance_the_error_says_what_to_install(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for options, _ in CONSTRAINTS.values():
        with pytest.raises(OptionError, match=r"pip install 'outpace\[constrain\]'") as caught:
            check(**options)
        assert "\n" not in str(caught.value)
    check(bad_words=["ab"])  # nothing else needs it


def test_a_constraint_needs_a_tokenizer():
    from outpace.models import MarkovModel

    toy = outpace.Generator(MarkovModel.random(5, 1, 0))
    with pytest.raises(OptionError, match="regex needs a tokenizer"):
        toy.generate([1], regex="a")
    assert not toy.engine.busy
