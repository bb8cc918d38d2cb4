"""Text that streams is the text of the whole, chats are rendered, vocabularies are compared."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outpace import CheckpointError, OptionError, VocabularyMismatchError
from outpace.models.tokenizer import (
    ByteDetokenizer,
    NullDetokenizer,
    Tokenizer,
    WindowDetokenizer,
    check_vocabularies,
)
from outpace.training.bpe import END_OF_TEXT, train_tokenizer

TEXTS = [
    "def parse(text):\n    return [int(x) for x in text.split(',')]\n" * 4,
    "für naïve Köpfe: grüße, façade, 日本語の文章、日本 🙂🙃 🙂\n" * 4,
]
REPLACEMENT = "\ufffd"
UNICODE = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A byte-level BPE tokenizer of 330 tokens."""
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer(TEXTS, 330, folder)
    return Tokenizer.load(folder)


@pytest.fixture
def fresh_bpe(bpe, tmp_path):
    """A copy of it to add tokens to."""
    bpe.hf.save_pretrained(tmp_path)
    return Tokenizer.load(tmp_path)


MERGES = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("日", "本"), ("▁", "日本")]


def pieces_with_bytes():
    """Three special tokens, a token for every byte, then characters and words."""
    words = ["▁", *"thexy(),日本", *(a + b for a, b in MERGES)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {name: i for i, name in enumerate(names)}


def sentencepiece_like(style):
    """Metaspace and byte fallback, as in Llama 2 (`strip`) or with its own decoder."""
    bpe = models.BPE(pieces_with_bytes(), MERGES, unk_token="<unk>", byte_fallback=True)
    backend = Backend(bpe)
    if style == "strip":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
        )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    )


STYLES = {style: sentencepiece_like(style) for style in ("strip", "metaspace")}


def stream(detokenizer, ids):
    """The pieces as they come; no piece ends in the middle of a character."""
    pieces = [detokenizer.push(i) for i in ids]
    return pieces, detokenizer.flush()


# --- text that streams ----------------------------------------------------------------------


@settings(max_examples=150)
@given(text=UNICODE)
@example("日本語🙂")
@example("a\ufffdb\ufffd")
@example("\x00\r\n\t ")
def test_both_detokenizers_stream_the_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    for detokenizer in (bpe.detokenizer(), WindowDetokenizer(bpe)):
        pieces, rest = stream(detokenizer, ids)
        assert "".join(pieces) + rest == text
        if REPLACEMENT not in text:
            assert rest == ""
            assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_byte_level_tokenizer_streams_bytes(bpe):
    assert type(bpe.detokenizer()) is ByteDetokenizer
    assert bpe.detokenizer() is not bpe.detokenizer()


@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
def test_a_character_is_held_back_until_it_is_whole(bpe, kind):
    ids = bpe.encode("xЖ𐍈y")
    assert len(ids) == 8  # letters of two and four bytes that were not in the training text
    detokenizer = bpe.detokenizer() if kind is ByteDetokenizer else WindowDetokenizer(bpe)
    pieces, rest = stream(detokenizer, ids)
    assert pieces == ["x", "", "Ж", "", "", "", "𐍈", "y"]
    assert rest == ""


@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
def test_an_open_character_is_replaced_at_the_end_only(bpe, kind):
    ids = bpe.encode("x𐍈")[:-1]
    detokenizer = bpe.detokenizer() if kind is ByteDetokenizer else WindowDetokenizer(bpe)
    pieces, rest = stream(detokenizer, ids)
    assert pieces == ["x", "", "", ""]
    assert "x" + rest == bpe.decode(ids)
    assert REPLACEMENT in rest


def test_decoding_each_token_alone_would_break_characters(bpe):
    ids = bpe.encode("xЖ𐍈y")
    assert "".join(bpe.decode([i]) for i in ids) != "xЖ𐍈y"


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 329), max_size=30))
def test_any_ids_stream_what_decode_gives(bpe, ids):
    pieces, rest = stream(bpe.detokenizer(), ids)
    assert "".join(pieces) + rest == bpe.decode(ids)


@pytest.fixture(scope="session")
def bpe_with_added(bpe, tmp_path_factory):
    """More tokens: 330 to 332 plain ones, 333 special, then two of letters that stand for bytes."""
    folder = tmp_path_factory.mktemp("added")
    bpe.hf.save_pretrained(folder)
    hf = Tokenizer.load(folder).hf
    hf.add_tokens(["<tool>", "日本", "two words"])
    hf.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    hf.add_tokens(["ĠĠxx", "éà"])
    assert len(hf) == 336
    return Tokenizer(hf)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 333), max_size=30))
@example([330, 331, 332, 333])
def test_added_tokens_stream_what_decode_gives(bpe_with_added, ids):
    pieces, rest = stream(bpe_with_added.detokenizer(), ids)
    assert "".join(pieces) + rest == bpe_with_added.decode(ids)


@pytest.mark.parametrize("token", [334, 335])
def test_added_tokens_of_letters_that_stand_for_bytes(bpe_with_added, token):
    pieces, rest = stream(bpe_with_added.detokenizer(), [token])
    assert "".join(pieces) + rest == bpe_with_added.decode([token])


def test_special_tokens_have_no_text(bpe):
    ids = [*bpe.encode("a"), bpe.vocabulary[END_OF_TEXT], *bpe.encode("b")]
    pieces, rest = stream(bpe.detokenizer(), ids)
    assert ["".join(pieces), rest] == ["ab", ""]
    assert bpe.decode(ids) == "ab"
    assert bpe.eos_token_ids == (bpe.vocabulary[END_OF_TEXT],)


def test_what_the_file_flags_as_special_has_no_text_either(bpe, fresh_bpe, tmp_path):
    """Llama 3 names no role for most of its special tokens."""
    fresh_bpe.hf.backend_tokenizer.add_special_tokens(["<|python_tag|>"])
    fresh_bpe.hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    token = tokenizer.vocabulary["<|python_tag|>"]
    assert token not in tokenizer.hf.all_special_ids
    ids = [*tokenizer.encode("a"), token, *tokenizer.encode("b")]
    pieces, rest = stream(tokenizer.detokenizer(), ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == "ab"


def test_a_stray_byte_does_not_repeat_the_character_before_it():
    tokenizer = STYLES["strip"]
    smile = [tokenizer.vocabulary[f"<0x{b:02X}>"] for b in "🙂".encode()]
    pieces, rest = stream(tokenizer.detokenizer(), [*smile, smile[0]])
    assert "".join(pieces) == "🙂"
    assert rest == REPLACEMENT


def test_ids_past_the_tokenizer_have_no_text(bpe):
    """Padding rows of the embedding can be drawn, and mean nothing."""
    pieces, rest = stream(bpe.detokenizer(), [*bpe.encode("a"), 5000, *bpe.encode("b")])
    assert "".join(pieces) + rest == "ab"


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150)
@given(text=st.text(st.sampled_from("the naïve日本語🙂xy(),\n") | st.characters(codec="utf-8")))
@example("the  the")
@example(" the")
@example("日本語 日本")
def test_a_window_streams_the_text_of_sentencepiece(style, text):
    tokenizer = STYLES[style]
    ids = tokenizer.encode(text)
    pieces, rest = stream(tokenizer.detokenizer(), ids)
    assert type(tokenizer.detokenizer()) is WindowDetokenizer
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=150)
@given(data=st.data())
def test_a_window_streams_any_words(style, data):
    """Ids in an order that no text gives, special tokens between them."""
    tokenizer = STYLES[style]
    words = [i for i in tokenizer.vocabulary.values() if i < 3 or i >= 259]
    ids = data.draw(st.lists(st.sampled_from(words), max_size=20))
    pieces, rest = stream(tokenizer.detokenizer(), ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_window_keeps_the_spaces_that_decoding_strips():
    tokenizer = STYLES["strip"]
    ids = [tokenizer.vocabulary[t] for t in ("▁the", "▁日本", "▁", "▁the")]
    pieces, _ = stream(tokenizer.detokenizer(), ids)
    assert pieces == ["the", " 日本", " ", " the"]
    assert [tokenizer.decode([i]) for i in ids] == ["the", "日本", "", "the"]  # what one alone says


@pytest.mark.parametrize("style", list(STYLES))
@given(
    st.lists(st.sampled_from(["hello", "world", "a", "größe", "x"]), min_size=2, max_size=6),
    st.data(),
)
def test_a_continuation_keeps_the_space_before_it(style, words, data):
    """Prompt and streamed text joined are the decoded whole, wherever the prompt ends."""
    tokenizer = STYLES[style]
    ids = tokenizer.encode(" ".join(words))
    cut = data.draw(st.integers(1, len(ids) - 1))
    pieces, rest = stream(tokenizer.detokenizer(ids[:cut]), ids[cut:])
    prompt = tokenizer.decode(ids[:cut])
    if not prompt.endswith("\ufffd"):
        assert prompt + "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_model_without_text_has_none():
    assert stream(NullDetokenizer(), [1, 2]) == (["", ""], "")


# --- chats ----------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role\nat all') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatty(fresh_bpe):
    fresh_bpe.hf.chat_template = TEMPLATE
    return fresh_bpe


def test_a_conversation_ends_where_the_assistant_speaks(chatty):
    ids = chatty.chat([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    assert chatty.decode(ids) == "<user>hi\n<assistant>ho\n<assistant>"


def test_a_template_adds_the_special_tokens_itself():
    tokenizer = sentencepiece_like("strip")
    tokenizer.hf.chat_template = "<s>{{ messages[0].content }}"
    ids = tokenizer.chat([{"role": "user", "content": "the"}])
    assert ids.count(tokenizer.hf.bos_token_id) == 1


def test_no_chat_template(bpe):
    with pytest.raises(OptionError, match=r"no chat template: pass a plain prompt"):
        bpe.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("message", ["hi", {"role": "user"}, {"content": "hi"}, 3, None])
def test_a_malformed_message(chatty, message):
    with pytest.raises(OptionError, match="a message needs 'role' and 'content', got"):
        chatty.chat([{"role": "user", "content": "hi"}, message])


def test_a_template_may_refuse(chatty):
    with pytest.raises(
        OptionError, match=r"^the chat template refused the messages: no such role$"
    ):
        chatty.chat([{"role": "wizard", "content": "hi"}])


# --- loading --------------------------------------------------------------------------------


def test_encoding_and_decoding_survive_a_round_trip(bpe, fresh_bpe):
    text = TEXTS[0] + TEXTS[1]
    assert fresh_bpe.encode(text) == bpe.encode(text)
    assert fresh_bpe.decode(fresh_bpe.encode(text)) == text


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(tokenizer.json\): save it"):
        Tokenizer.load(tmp_path)


# --- vocabularies ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", [330, 384])
def test_the_same_tokenizer_agrees(bpe, fresh_bpe, width):
    """Also where the draft's embedding has padding rows, or fewer than the target's."""
    assert check_vocabularies(bpe, fresh_bpe, width) == []


def test_another_tokenizer_clashes(bpe, tmp_path):
    train_tokenizer(
        ["completely different words, zebra zebra zebra quizzical\n" * 9], 290, tmp_path
    )
    other = Tokenizer.load(tmp_path)
    with pytest.raises(VocabularyMismatchError) as caught:
        check_vocabularies(bpe, other, 330)
    ours, theirs = ({i: t for t, i in t.vocabulary.items()} for t in (bpe, other))
    clash = next(i for i in sorted(theirs) if ours[i] != theirs[i])
    message = str(caught.value)
    assert f"id {clash} is {ours[clash]!r} to the target and {theirs[clash]!r} to the" in message
    assert message.endswith("use a draft model with the target's tokenizer")
    assert "\n" not in message


def test_one_swapped_pair_is_enough(bpe, monkeypatch):
    vocabulary = dict(bpe.vocabulary)
    a, b = list(vocabulary)[100:102]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    other = Tokenizer(bpe.hf)
    other.__dict__["vocabulary"] = vocabulary
    with pytest.raises(VocabularyMismatchError, match=r"differ on 2 of 330 ids"):
        check_vocabularies(bpe, other, 330)


@pytest.mark.parametrize("width", [331, 384])
def test_a_token_the_draft_does_not_know_is_padding_to_it(bpe, fresh_bpe, width):
    fresh_bpe.hf.add_tokens(["<tool>"])
    remarks = check_vocabularies(fresh_bpe, bpe, width)
    assert remarks == ["1 tokens are known to the target alone, e.g. '<tool>' (id 330)"]


def test_a_token_the_draft_has_no_row_for(bpe, fresh_bpe):
    fresh_bpe.hf.add_tokens(["<tool>"])
    with pytest.raises(VocabularyMismatchError, match=r"330 embedding rows, .*'<tool>' has id 330"):
        check_vocabularies(fresh_bpe, bpe, 330)


def test_a_token_that_the_draft_alone_knows(bpe, fresh_bpe):
    fresh_bpe.hf.add_tokens(["<tool>", "<more>"])
    remarks = check_vocabularies(bpe, fresh_bpe, 332)
    assert remarks == ["2 tokens are known to the draft alone, e.g. '<tool>' (id 330)"]
