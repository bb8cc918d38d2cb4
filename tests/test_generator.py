"""The public object: prompts in, results and events out, slots freed, errors early."""

from __future__ import annotations

import gc
import math
import shutil

import numpy as np
import pytest
import torch

import outpace
from checkpoints import REFUSED, swap_two_tokens, write
from outpace import SamplingParams
from outpace.models import MarkovModel

PROMPT = "for i in naïve"


@pytest.fixture(scope="module")
def fast(pair):
    return outpace.load(
        str(pair / "target"), str(pair / "draft"), k=3, dtype="float32", device="cpu", max_batch=4
    )


@pytest.fixture(scope="module")
def plain(pair):
    return outpace.load(str(pair / "target"), None, dtype="float32", device="cpu", max_batch=4)


def test_one_prompt_gives_one_result(fast):
    result = fast.generate(PROMPT, max_new_tokens=20)
    assert isinstance(result, outpace.Result)
    assert result.prompt == PROMPT
    assert len(result.token_ids) == len(result.tokens) <= 20
    assert result.text == "".join(e.text for e in result.tokens)
    assert result.stats.emitted == len(result.tokens)


def test_greedy_equals_plain_and_lists_keep_their_order(fast, plain):
    prompts = [PROMPT, "def", "return 'größe", "x", "print(", "🙂"]
    options = {"max_new_tokens": 40, "eos_token_ids": ()}
    a, b = fast.generate(prompts, **options), plain.generate(prompts, **options)
    assert [r.prompt for r in a] == prompts
    assert [r.token_ids for r in a] == [r.token_ids for r in b]
    assert [r.text for r in a] == [r.text for r in b]


def test_text_is_the_tokenizers(fast):
    for seed in range(5):
        r = fast.generate(PROMPT, temperature=1.5, seed=seed, max_new_tokens=60, eos_token_ids=())
        assert r.text == fast.tokenizer.decode(r.token_ids)


def test_seeds(fast):
    options = {"temperature": 1.0, "max_new_tokens": 25, "eos_token_ids": ()}
    one = fast.generate(PROMPT, seed=5, **options)
    assert fast.generate(PROMPT, seed=5, **options).token_ids == one.token_ids
    assert fast.generate(PROMPT, seed=6, **options).token_ids != one.token_ids
    both = fast.generate([PROMPT, PROMPT], seed=[6, 5], **options)
    assert both[1].token_ids == one.token_ids
    assert both[0].seed == 6
    assert fast.generate(PROMPT, **options).seed is None  # no seed would give the text again
    assert fast.generate(PROMPT, max_new_tokens=3).seed is not None


@pytest.mark.parametrize("verifier", ["match", "coupled", "token"])
def test_a_seed_that_was_drawn_gives_the_text_again(pair, verifier):
    folders = str(pair / "target"), str(pair / "draft")
    k = 3 if verifier == "token" else "auto"
    generator = outpace.load(*folders, k, dtype="float32", verifier=verifier)
    options = {"temperature": 1.0, "max_new_tokens": 25, "eos_token_ids": ()}
    fresh = generator.generate(PROMPT, **options)
    assert generator.generate(PROMPT, seed=fresh.seed, **options).token_ids == fresh.token_ids


def test_a_seed_gives_one_text(pair, fast):
    """Whoever drafts, however far, or nobody. By a rule that is not for seeds it is another."""
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 25, "eos_token_ids": ()}
    said = fast.generate(PROMPT, **options).token_ids
    target, draft = str(pair / "target"), str(pair / "draft")
    for drafter in (None, "auto", "ngram", draft, f"suffix+{draft}"):
        for k in ("auto", 3):
            other = outpace.load(target, drafter, k, dtype="float32")
            assert other.generate(PROMPT, **options).token_ids == said
    other = outpace.load(target, draft, 3, dtype="float32", verifier="token")
    assert other.generate(PROMPT, **options).token_ids != said


def test_every_prompt_has_its_own_parameters(fast):
    params = [
        SamplingParams(max_new_tokens=3, eos_token_ids=()),
        SamplingParams(temperature=1.0, seed=1, max_new_tokens=9, eos_token_ids=()),
    ]
    a, b = fast.generate([PROMPT, PROMPT], params=params)
    assert (len(a.tokens), len(b.tokens)) == (3, 9)
    assert a.token_ids == fast.generate(PROMPT, params=params[0]).token_ids
    assert b.token_ids == fast.generate(PROMPT, params=params[1]).token_ids


@pytest.mark.parametrize("k", [0, 2, 5])
def test_a_stop_string_is_cut_wherever_it_falls(pair, k):
    generator = outpace.load(str(pair / "target"), str(pair / "draft"), k, dtype="float32")
    options = {"temperature": 1.2, "seed": 3, "max_new_tokens": 80, "eos_token_ids": ()}
    whole = generator.generate(PROMPT, **options)
    for start in range(0, len(whole.text) - 3, 7):
        stop = whole.text[start : start + 3]
        if "\ufffd" in stop:
            continue  # bytes that are no text may be completed by the next token
        r = generator.generate(PROMPT, stop=stop, **options)
        at = whole.text.find(stop)
        assert r.text == whole.text[:at]
        assert r.finish_reason == "stop"
        assert r.stopped_by == stop
        assert whole.token_ids[: len(r.token_ids)] == r.token_ids
        assert stop in generator.tokenizer.decode(r.token_ids)
        assert stop not in generator.tokenizer.decode(r.token_ids[:-1])
        assert r.stats.emitted == len(r.token_ids)
    missing = generator.generate(PROMPT, stop=("\x00never",), **options)
    assert missing.text == whole.text


def test_streaming_equals_generating_and_interleaves(fast):
    prompts = [PROMPT, "def"]
    options = {"max_new_tokens": 15, "eos_token_ids": ()}
    stream = fast.stream(prompts, **options)
    events = list(stream)
    results = fast.generate(prompts, **options)
    for i, result in enumerate(results):
        assert tuple(e for e in events if e.index == i) == result.tokens
    assert [r.text for r in stream.results] == [r.text for r in results]


def test_streams_run_side_by_side(fast):
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    want = [fast.generate(p, **options).token_ids for p in ("def", "x")]
    a, b = fast.stream("def", **options), fast.stream("x", **options)
    got: list[list[int]] = [[], []]
    for _ in range(12):
        got[0].append(next(a).token_id)
        got[1].append(next(b).token_id)
    assert [tuple(g) for g in got] == want


def test_abandoned_streams_free_their_slots(fast):
    free = fast.engine.free_slots
    stream = fast.stream(PROMPT, max_new_tokens=50, eos_token_ids=())
    next(stream)
    assert fast.engine.free_slots == free - 1
    del stream
    gc.collect()
    assert fast.engine.free_slots == free

    with fast.stream(PROMPT, max_new_tokens=50, eos_token_ids=()) as stream:
        for _ in range(3):
            next(stream)
    assert fast.engine.free_slots == free
    (result,) = stream.results
    assert result.finish_reason == "cancelled"
    assert result.text == fast.tokenizer.decode(result.token_ids)

    never_read = fast.stream(PROMPT)
    with pytest.raises(outpace.OptionError, match="has not ended"):
        _ = never_read.results
    del never_read
    gc.collect()
    assert fast.engine.free_slots == free
    assert not fast.engine.busy


def test_messages_need_a_template_and_use_it(pair, tmp_path, fast):
    messages = [{"role": "user", "content": "def"}]
    with pytest.raises(outpace.OptionError, match="no chat template"):
        fast.generate(messages=messages)
    folder = tmp_path / "chat"
    shutil.copytree(pair / "target", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    chat = outpace.load(str(folder), dtype="float32")
    options = {"max_new_tokens": 10, "eos_token_ids": ()}
    by_messages = chat.generate(messages=messages, **options)
    by_text = chat.generate("<user>def\n<assistant>", **options)
    assert by_messages.token_ids == by_text.token_ids
    assert len(chat.generate(messages=[messages, messages], **options)) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.generate(""), "the prompt is empty"),
        (lambda g: g.generate([]), "list of prompts is empty"),
        (lambda g: g.generate(["x", ""]), "the prompt is empty"),
        (lambda g: g.generate([[]]), "the prompt is empty"),
        (lambda g: g.generate(), "either prompts or messages"),
        (lambda g: g.generate("x", messages=[{}]), "either prompts or messages"),
        (lambda g: g.generate(messages=[]), "messages is empty"),
        (lambda g: g.generate("x", temprature=1.0), "did you mean 'temperature'"),
        (lambda g: g.generate("x", temperature=-0.1), "temperature must be a number >= 0"),
        (lambda g: g.generate("x", temperature=float("nan")), "temperature must be"),
        (lambda g: g.generate("x", top_p=0.0), "top_p must be a number > 0"),
        (lambda g: g.generate("x", top_p=1.1), "top_p must be"),
        (lambda g: g.generate("x", top_k=0), "top_k must be a whole number >= 1"),
        (lambda g: g.generate("x", seed=-1), "seed must be"),
        (lambda g: g.generate("x", seed=2**64), "seed must be"),
        (lambda g: g.generate(["x", "y"], seed=[1]), "1 seeds for 2 prompts"),
        (lambda g: g.generate("x", max_new_tokens=0), "max_new_tokens"),
        (lambda g: g.generate("x", stop=""), "non-empty strings"),
        (lambda g: g.generate("x", on_context_full="?"), "on_context_full"),
        (lambda g: g.generate("x", params=SamplingParams(), seed=1, top_k=2), "not both"),
        (lambda g: g.generate("x", eos_token_ids=[-4]), "eos_token_ids"),
        (lambda g: g.generate("x" * 4000), "shorten the prompt"),
        (lambda g: g.generate(123), "text or token ids"),
        (lambda g: g.generate([1, 2.7]), "list of token ids"),
        (lambda g: g.generate([1, "x"]), "list of token ids"),
        (lambda g: g.generate("x", stop=5), "non-empty strings"),
        (lambda g: g.generate("x", params=[{}]), "takes outpace.SamplingParams"),
        (lambda g: g.generate("x", eos_token_ids=(10**6,)), "EOS token id 1000000 is outside"),
        (lambda g: g.generate([10**6]), "outside the target's vocabulary"),
        (lambda g: g.generate("\udcff"), "not valid Unicode"),
        (lambda g: g.generate(b"text"), "text or token ids, not bytes"),
        (lambda g: g.generate(np.array(5)), "list of token ids"),
        (lambda g: g.generate(messages={"role": "user", "content": "x"}), "list of messages"),
        (lambda g: g.generate("x", params=5), "takes outpace.SamplingParams, not int"),
        (lambda g: g.generate("x", seed="7"), "seed must be"),
        (lambda g: g.generate("x", seed=np.array([1, 2])), "2 seeds for 1 prompts"),
        (lambda g: g.generate("x", eos_token_ids=np.array([0.5])), "eos_token_ids"),
        (lambda g: g.generate("x", temperature="1"), "temperature must be"),
        (lambda g: g.generate("x", logprobs=321), "logprobs=321 asks for more than"),
        (lambda g: g.generate("x", logit_bias={320: 1.0}), "logit_bias has token id 320, which is"),
        (lambda g: g.generate("x", bad_words=[[5, 999]]), "bad_words has token id 999, which is"),
        (lambda g: g.generate("x", regex="("), "regex cannot be used"),
    ],
)
def test_bad_input_is_refused_and_loses_nothing(fast, call, message):
    with pytest.raises(outpace.OutpaceError, match=message) as caught:
        call(fast)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not fast.engine.busy
    assert fast.engine.free_slots == 4


SHAPING = {"logit_bias": {70: 2.0}, "repetition_penalty": 1.3, "top_k": 40, "min_p": 0.01}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}])
@pytest.mark.parametrize("more", [{}, SHAPING])
def test_logprobs_are_those_of_the_raw_logits(fast, plain, options, more):
    """The likeliest tokens of every emitted position, whatever shaped the one that was drawn."""
    for generator in (fast, plain):
        result = generator.generate(
            [PROMPT, "def"], logprobs=7, max_new_tokens=25, eos_token_ids=(), **options, **more
        )[0]
        target = generator.engine.target
        ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
        rows = torch.arange(ids.shape[1])[None]
        scores = target.forward(ids, rows, target.new_cache(1, ids.shape[1]), [0])
        law = scores.logits[0].double().log_softmax(-1)[len(result.prompt_token_ids) - 1 :]
        for event, row in zip(result.tokens, law, strict=False):
            values, best = row.topk(7)
            assert [i for i, _ in event.top_logprobs] == best.tolist()
            assert [x for _, x in event.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)
            assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-5)
            assert dict(event.top_logprobs).get(event.token_id, event.logprob) == event.logprob
        assert any(e.token_id in dict(e.top_logprobs) for e in result.tokens)


def test_every_request_gets_as_many_logprobs_as_it_asks_for(fast):
    counts = [0, 1, 320]
    params = [SamplingParams(logprobs=n, max_new_tokens=9, eos_token_ids=()) for n in counts]
    results = fast.generate([PROMPT] * 3, params=params)
    for count, result in zip(counts, results, strict=True):
        assert {len(e.top_logprobs) for e in result.tokens} == {count}
        assert result.token_ids == results[0].token_ids
        assert [e.logprob for e in result.tokens] == [e.logprob for e in results[0].tokens]
    for event in results[2].tokens:
        assert event.top_logprobs[0] == (event.token_id, event.logprob)  # greedy
        assert sum(math.exp(x) for _, x in event.top_logprobs) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("transform_draft", [True, False])
def test_bad_words_do_not_stand_in_texts(fast, transform_draft):
    """However they are cut into tokens; the same texts have them where nothing forbids it."""
    words = ["re", "größe", "\n", "你"]
    options = {"temperature": 1.2, "max_new_tokens": 60, "eos_token_ids": (), "seed": range(30)}

    def texts(**more):
        return [r.text for r in fast.generate(["def"] * 30, **options, **more)]

    free = texts()
    forbidden = texts(bad_words=words, transform_draft=transform_draft)
    for word in words:
        assert any(word in text for text in free)
        assert not any(word in text for text in forbidden)


def test_numbers_and_arrays_of_other_libraries_are_taken(fast):
    options = {"max_new_tokens": 5, "eos_token_ids": (), "temperature": 1.0}
    want = fast.generate([70, 71], seed=3, **options).token_ids
    for prompt in (np.array([70, 71]), torch.tensor([70, 71]), (70, 71)):
        got = fast.generate(prompt, seed=np.int64(3), stop=None, **options)
        assert got.token_ids == want
    two = fast.generate(torch.tensor([[70, 71], [72, 73]]), seed=3, **options)
    assert two[0].token_ids == want
    options = {"max_new_tokens": 5, "temperature": np.float32(1), "top_p": np.float64(1)}
    for none in (np.array([], dtype=int), range(0), torch.tensor([], dtype=torch.int64)):
        assert fast.generate([70, 71], seed=3, eos_token_ids=none, **options).token_ids == want
    assert outpace.SamplingParams(eos_token_ids=np.array([4, 5])).eos_token_ids == (4, 5)
    assert outpace.SamplingParams(eos_token_ids=torch.tensor(4)).eos_token_ids == (4,)


def test_an_empty_prompt_is_empty_even_behind_a_bos_token(pair, tmp_path):
    from tokenizers import processors
    from transformers import AutoTokenizer

    folder = tmp_path / "bos"
    shutil.copytree(pair / "target", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    generator = outpace.load(str(folder), dtype="float32")
    assert generator.generate("x", max_new_tokens=1).prompt_token_ids[0] == tokenizer.eos_token_id
    for prompts in ("", ["x", ""]):
        with pytest.raises(outpace.OptionError, match="the prompt is empty"):
            generator.generate(prompts)


def test_parts_can_be_put_together_by_hand():
    toy = MarkovModel.random(5, 1, 0)
    result = outpace.Generator(toy).generate([1, 2], max_new_tokens=4)
    assert result.text == ""
    assert len(result.token_ids) == 4
    with pytest.raises(outpace.OptionError, match="no tokenizer"):
        outpace.Generator(toy).generate("text")
    with pytest.raises(outpace.OptionError, match="stop strings need a tokenizer"):
        outpace.Generator(toy).generate([1], stop="x")


@pytest.mark.parametrize(("k", "models"), [(0, 1), (2, 2)])
def test_a_draft_that_would_never_draft_is_not_read(pair, k, models):
    read: list[str] = []
    outpace.load(
        str(pair / "target"),
        str(pair / "draft"),
        k,
        progress=lambda what, done, total: read.append(what),
    )
    assert len(set(read)) == models


def test_nothing_is_loaded_before_everything_is_checked(pair, tmp_path, monkeypatch):
    """K, names, configurations and vocabularies are checked before a weight is read."""
    from outpace.models.checkpoint import Weights

    def reading(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "load", reading)
    target, draft = str(pair / "target"), str(pair / "draft")
    other = tmp_path / "other"
    shutil.copytree(pair / "draft", other)
    swap_two_tokens(other)
    mamba = tmp_path / "mamba"
    write(mamba, *REFUSED["mamba"])
    lost = tmp_path / "lost"
    shutil.copytree(pair / "target", lost)
    (lost / "generation_config.json").write_text('{"eos_token_id": [null]}')
    for call, error, message in [
        (lambda: outpace.load(target, draft, k=-1), outpace.OptionError, "k must be"),
        (lambda: outpace.load(target, verifier="tokn"), outpace.OptionError, "did you mean"),
        (lambda: outpace.load(target, verifier=5), outpace.OptionError, "unknown verifier"),
        (lambda: outpace.load(target, str(mamba)), outpace.UnsupportedModelError, "cannot be run"),
        (lambda: outpace.load(str(lost)), outpace.CheckpointError, "eos_token_id"),
        (lambda: outpace.load(target, dtype="int3"), outpace.OptionError, "unknown dtype"),
        (lambda: outpace.load(target, device="tpu9"), outpace.OptionError, "device"),
        (lambda: outpace.load(target, "nowhere"), outpace.OptionError, "there is no drafter"),
        (lambda: outpace.load(target, "./nowhere"), outpace.CheckpointError, "does not exist"),
        (lambda: outpace.load("nowhere", draft), outpace.CheckpointError, "does not exist"),
    ]:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(outpace.VocabularyMismatchError, match="the tokenizers differ on 2 of"):
        outpace.load(target, str(other))
