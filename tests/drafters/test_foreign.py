"""Draft models of another vocabulary: no byte is lost, and texts are the target's."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import outpace
from checkpoints import TEXT, VOCAB, build
from outpace import SamplingParams
from outpace.drafters.foreign import TLIDrafter
from outpace.drafters.translation import Common, Translated, Words, special_pairs
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.models.loading import ASSETS
from outpace.models.tokenizer import Tokenizer
from outpace.training.bpe import train_tokenizer
from tokenizers_of import byte_level, letters

STRANGE = "größe 你好 🙂\n\n\tend  of it, naïve — “quoted” 🏳️‍🌈 x=1"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """Byte-level BPE of two sizes, and what SentencePiece makes of Unicode."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(TEXT * 20, VOCAB, folder / "ours")
    train_tokenizer([STRANGE, "def f(x): return x\n"] * 20, 290, folder / "theirs")
    found = {name: Tokenizer.load(folder / name) for name in ("ours", "theirs")}
    return found | {"sentencepiece": sentencepiece()}


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "e", "n", "d", "▁e", "▁en", "▁end", "r", "f", "ö", "x", "=", "▁x", "re", "of"]
    vocab = {p: i for i, p in enumerate(pieces)}
    merges = [("▁", "e"), ("▁e", "n"), ("▁en", "d"), ("▁", "x"), ("r", "e"), ("o", "f")]
    vocab["o"] = len(vocab)
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


NAMES = ["ours", "theirs", "sentencepiece"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_stand_for_their_bytes(tokenizers, name):
    words = Words(tokenizers[name], "target")
    for text in (STRANGE, " end", "end", "", "re re"):
        ids = words.split(text.encode())
        assert words.bytes_of(ids) == text.encode()
        assert words.bytes_of(words.spell(text.encode())) == text.encode()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [1, 2, 5, 9])
def test_a_character_in_pieces_is_spelled(tokenizers, name, cut):
    whole = STRANGE.encode()[:-cut]
    broken = "🙂".encode()[:cut]
    words = Words(tokenizers[name], "target")
    for text in (whole + broken, broken + whole, whole):
        assert words.bytes_of(words.split(text)) == text


def test_a_split_is_the_tokenizers_own(tokenizers):
    words = Words(tokenizers["ours"], "target")
    text = "def naïve(x):\n    return"
    assert words.split(text.encode()) == tokenizers["ours"].encode(text)


def translated(target: Words, draft: Words) -> Translated:
    return Translated(target, draft, special_pairs(target, draft))


@pytest.mark.parametrize(
    "text", ["end of x", "x = end\n  x\nend of x = re", "\n\nx end", "x"], ids=range(4)
)
def test_sentencepiece_splits_as_it_does_a_whole_text(tokenizers, text):
    """Its blank before the text included, whether all comes at once or byte by byte."""
    ours, theirs = Words(tokenizers["ours"], "target"), Words(tokenizers["sentencepiece"], "draft")
    wanted = [*theirs.tokenizer.prefix_ids, *theirs.tokenizer.hf(text)["input_ids"]]
    at_once, by_bytes = (translated(ours, theirs) for _ in range(2))
    at_once.extend(ours.split(text.encode()))
    for i in range(len(text)):
        by_bytes.extend(ours.split(text[i : i + 1].encode()))
    assert at_once.ids == by_bytes.ids == wanted


def test_a_long_text_without_blanks_is_not_split_anew_each_time(tokenizers):
    ours, theirs = Words(tokenizers["ours"], "target"), Words(tokenizers["theirs"], "draft")
    text = translated(ours, theirs)
    changed = [text.extend(ours.split("你好".encode() * 20)) for _ in range(40)]
    assert changed[-1] > len(text.ids) - 400
    assert theirs.bytes_of(text.ids) == "你好".encode() * 800


@pytest.mark.parametrize("ours", NAMES)
@pytest.mark.parametrize("theirs", NAMES)
@settings(max_examples=25)
@given(st.data())
def test_a_text_keeps_its_bytes_token_by_token(tokenizers, ours, theirs, data):
    """Any tokens at all, canonical or not, in pieces of any size."""
    target, draft = Words(tokenizers[ours], "target"), Words(tokenizers[theirs], "draft")
    text, tokens, before = translated(target, draft), list[int](), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        piece = st.integers(0, len(target.pieces) - 1)
        new = data.draw(st.lists(piece, min_size=1, max_size=8))
        if data.draw(st.booleans()):
            new = target.split(
                data.draw(st.sampled_from([STRANGE, " end", "\n  x = 1", "re"])).encode()
            )
        tokens += new
        changed = text.extend(new)
        assert text.ids[:changed] == before[:changed]
        before = list(text.ids)
        said, whole = draft.bytes_of(text.ids), target.bytes_of(tokens)
        assert said == whole or (theirs == "sentencepiece" and said == b" " + whole)
    assert text.count == len(tokens)


def test_a_text_is_split_as_the_drafts_tokenizer_splits_it(tokenizers):
    """Token by token, once more has come."""
    target, draft = tokenizers["ours"], tokenizers["theirs"]
    text = "def f(x): return x\n" * 6
    found = translated(Words(target, "target"), Words(draft, "draft"))
    for token in target.encode(text):
        found.extend([token])
    assert found.ids == [*draft.prefix_ids, *draft.encode(text)]


def test_special_tokens_are_those_of_the_same_name():
    ours = byte_level(
        [*"abc", "<s>", "<e>", "<only>"], bos_token="<s>", eos_token="<e>", unk_token="<only>"
    )
    theirs = byte_level(["<e>", *"cba", "<s>"], bos_token="<s>", eos_token="<e>")
    text = translated(Words(ours, "target"), Words(theirs, "draft"))
    text.extend([3, 0, 1, 5, 2, 4])
    assert text.ids == [4, 3, 2, 1, 0]
    text.extend([0])
    assert text.ids == [4, 3, 2, 1, 0, 3]


def test_tokens_that_the_draft_has_no_row_for_are_never_fed():
    """A tokenizer may have more than its model: tokens that were added to it later."""
    ours = byte_level([*"abc", "<s>", "<e>"], bos_token="<s>", eos_token="<e>")
    theirs = byte_level([*"cba", "<s>", "<e>"], bos_token="<s>", eos_token="<e>")
    target, draft = Words(ours, "target"), Words(theirs, "draft", 2)
    assert Common(target, Words(theirs, "draft")).pairs == [(0, 2), (1, 1), (2, 0), (4, 4)]
    assert Common(target, draft).pairs == [(1, 1), (2, 0)]
    assert special_pairs(target, draft) == {}
    text = translated(target, draft)
    text.extend([3, 0, 1, 2, 4, 2])
    assert text.ids == [1, 0, 0]
    assert draft.split(b"cab") == [0, 1]


@pytest.mark.parametrize("way", ["tli", "slem"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_whose_tokenizer_has_more_tokens_drafts(pair, tmp_path, way, compiled):
    """Both have a token by this name; the draft has no row for it."""
    folders = [tmp_path / name for name in ("target", "draft")]
    for folder, rows in zip(folders, (1, 0), strict=True):
        shutil.copytree(pair / folder.name, folder)
        file = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        size = len(file["model"]["vocab"])
        added = {"id": size, "content": "<|mark|>", "special": True}
        file["added_tokens"].append(file["added_tokens"][0] | added)
        (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size + rows}))
        weights = load_file(folder / "model.safetensors")
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
            more = torch.cat([weights[name], weights[name][:1]])
            weights[name] = more[: size + rows].contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    marked = ["for <|mark|> i", "<|mark|>"]
    said = []
    for drafter in (None, f"{way}:{folders[1]}"):
        generator = outpace.load(folders[0], drafter, 3 if drafter else 0, compile=compiled)
        found = generator.generate(marked, max_new_tokens=20, eos_token_ids=())
        said.append([r.token_ids for r in found])
    assert said[0] == said[1]
    assert generator.engine.stats.proposed > 0


def test_a_beginning_that_both_mark_is_marked_once(tokenizers):
    """A BOS token in the target's prompt, and the draft's own."""
    both = Words(tokenizers["sentencepiece"], "either")
    assert both.tokenizer.prefix_ids == ()  # this one adds none by itself
    both.tokenizer.__dict__["prefix_ids"] = (1,)
    try:
        text = translated(both, both)
        text.extend([1, *both.split(b" end")])
        assert text.ids == [1, *both.tokenizer.hf(" end")["input_ids"]]
    finally:
        del both.tokenizer.__dict__["prefix_ids"]


def test_what_is_common_has_the_same_bytes(tokenizers):
    target, draft = (Words(tokenizers[name], "target") for name in ("ours", "sentencepiece"))
    common = Common(target, draft)
    assert all(target.pieces[a] == draft.pieces[b] for a, b in common.pairs if target.pieces[a])
    said = {target.pieces[a] for a, _ in common.pairs}
    assert {b" end", b"e", b"\xf0", b"x"} & set(target.ids) <= said
    assert draft.ids[b"e"] == draft.tokenizer.vocabulary["e"]  # not the byte's own token
    assert (target.tokenizer.eos_token_ids[0], 2) in common.pairs


# --- drafts ---------------------------------------------------------------------------------


def shuffle(draft, out, size: int):
    """A draft with its ids in another order: the same model to whoever translates."""
    shutil.copytree(draft, out)
    order = list(range(size))
    random.Random(0).shuffle(order)
    file = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    file["model"]["vocab"] = {t: order[i] for t, i in file["model"]["vocab"].items()}
    for token in file["added_tokens"]:
        token["id"] = order[token["id"]]
    file["added_tokens"].sort(key=lambda token: token["id"])
    (out / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    weights = load_file(out / "model.safetensors")
    back = torch.tensor(sorted(range(size), key=lambda i: order[i]))
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][back].contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def shuffled(pair, tmp_path_factory):
    return shuffle(pair / "draft", tmp_path_factory.mktemp("shuffled") / "draft", VOCAB)


PROMPTS = ["for i in range(3):\n", "größe", "def naïve(x", "x"]


def texts(target, drafter, k, **options):
    generator = outpace.load(str(target), drafter, k, dtype="float32", max_batch=3)
    options = {"max_new_tokens": 30, "eos_token_ids": (), "seed": 5} | options
    found = generator.generate(PROMPTS, **options)
    return [r.token_ids for r in found], generator.engine.stats


def test_greedy_drafts_are_those_of_the_same_model_in_the_targets_vocabulary(tmp_path):
    """Ids do not matter: the same is proposed and the same passes, of a text that is split as the
    tokenizer splits it."""
    other = shuffle(ASSETS / "draft", tmp_path / "draft", 4096)
    prompt = "def read(path):\n    with open(path) as file:"
    options = {"max_new_tokens": 60, "eos_token_ids": ()}
    found = []
    for drafter in ("demo-draft", f"tli:{other}", f"slem:{other}"):
        result = outpace.load("demo", drafter, 4).generate(prompt, **options)
        found.append((result.token_ids, result.stats.proposed, result.stats.accepted))
    assert found[0] == found[1] == found[2]
    assert found[0][2] > 20


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_texts_are_plain_decodings_whatever_the_draft_reads(pair, shuffled, way):
    """Random tokens, whose text no tokenizer splits so."""
    said, stats = texts(pair / "target", f"{way}:{shuffled}", 3)
    assert said == texts(pair / "target", None, None)[0]
    assert stats.proposed > 0


def test_sampled_texts_by_the_writing_draft_are_plain_decodings(pair, shuffled):
    plain, _ = texts(pair / "target", None, None, temperature=0.8)
    assert texts(pair / "target", f"slem:{shuffled}", 4, temperature=0.8)[0] == plain


def test_drafts_are_drawn_from_what_both_have():
    """The law restricted to it and renormalised; at once when the target's tokens come first."""
    model = MarkovModel.random(5, 1, 4)
    common = Common(Words(letters("abcd"), "target"), Words(letters("dxbay"), "draft"))
    target = MarkovModel.random(4, 2, 0)
    engine = Engine(target, TLIDrafter(model, common, "tli"), 1)
    request = engine.submit([1], SamplingParams(temperature=1.0, seed=0, eos_token_ids=()))
    engine.admit()
    draft = engine.draft([request])
    row = model.table[2, [3, 2, 0]]  # behind "b" of a, b and d; "c" it does not know
    torch.testing.assert_close(
        draft.law.q[0, 0].double(),
        torch.tensor([*row[:2], 0, row[2]]) / row.sum(),
        rtol=0,
        atol=1e-6,
    )


def test_a_draft_with_little_room_stays_silent(pair, shuffled, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(shuffled, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    plain, _ = texts(pair / "target", None, None)
    for way in ("tli", "slem"):
        said, stats = texts(pair / "target", f"{way}:{short}", 3)
        assert said == plain
        assert 0 < stats.drafted_rounds < stats.rounds


# --- what does not fit ------------------------------------------------------------------------


def write(folder, tokenizer: Tokenizer, size: int) -> str:
    shape = {"vocab_size": size, "num_key_value_heads": 2, "num_hidden_layers": 1}
    build("Llama", shape).save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    return str(folder)


def test_nothing_in_common_is_refused_with_what_would_work(tmp_path):
    target = write(tmp_path / "target", byte_level([*"abcd", "<e>"], eos_token="<e>"), 5)
    other = write(tmp_path / "other", byte_level([*"wxyz", "<e>"], eos_token="<e>"), 5)
    with pytest.raises(
        outpace.VocabularyMismatchError, match=f"'slem:{other}' matches their texts"
    ):
        outpace.load(target, f"tli:{other}")
    with pytest.raises(outpace.VocabularyMismatchError, match=f"by common tokens: 'tli:{other}'"):
        outpace.load(target, other)
    generator = outpace.load(target, f"slem:{other}", dtype="float32")
    assert len(generator.generate([0, 1], max_new_tokens=5, eos_token_ids=()).token_ids) == 5


def test_a_share_is_told(tmp_path):
    target = write(tmp_path / "target", letters("abcd"), 4)
    other = write(tmp_path / "other", letters("xba"), 3)
    generator = outpace.load(target, f"tli:{other}", dtype="float32")
    assert generator.remarks == (f"50% of the target's tokens can be drafted by {other}",)


def test_tokens_without_bytes_are_refused(tmp_path):
    target = write(tmp_path / "target", letters("abcd"), 4)
    backend = Backend(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    other = write(tmp_path / "words", words, 2)
    with pytest.raises(outpace.VocabularyMismatchError, match="which bytes its tokens stand for"):
        outpace.load(target, f"tli:{other}")
