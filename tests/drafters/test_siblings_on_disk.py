"""Smaller models that are on this disk: what is found, in which order, and what is left out."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from checkpoints import swap_two_tokens
from outpace.drafters import Checkpoint, parse
from outpace.drafters.families import FAMILIES
from outpace.drafters.siblings import known_drafts, siblings
from outpace.models.loading import Source, inspect_checkpoint, load_tokenizer
from sibling_cases import cached, change, sizes, source_named, write_sizes

DOCS = Path(__file__).parents[2] / "docs" / "choosing.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Folders of one tokenizer: `large`, `middle`, `small` and `tiny`; read only."""
    folder = tmp_path_factory.mktemp("made")
    write_sizes(folder)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever touches the network fails."""

    def refuse(*args, **kwargs):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def search(folder: Path | str, cache: Path, most: int | None = None):
    source = inspect_checkpoint(folder)
    return siblings(source, load_tokenizer(source), cache, most)


def names(found) -> list[str]:
    return [Path(sibling.name).name for sibling in found.found]


def why_not(found) -> dict[str, str]:
    return {Path(name).name: reason for name, reason in found.left_out}


def test_a_smaller_model_beside_it(made, tmp_path):
    shutil.copytree(made / "large", tmp_path / "large")
    shutil.copytree(made / "small", tmp_path / "small")
    (tmp_path / "notes").mkdir()  # no checkpoint: not worth a word
    found = search(tmp_path / "large", tmp_path / "no cache")
    (sibling,) = found.found
    assert sibling.name == str(tmp_path / "small")
    assert sibling.folder == tmp_path / "small"
    counts = [sizes(tmp_path / name) for name in ("small", "large")]
    assert sibling.ratio == pytest.approx(counts[0] / counts[1])
    assert 0.05 < sibling.ratio < 0.5
    assert isinstance(parse(sibling.name), Checkpoint)
    assert found.left_out == ()


def test_neither_bigger_ones_nor_nearly_as_big(made, tmp_path):
    for name in ("large", "middle", "small"):
        shutil.copytree(made / name, tmp_path / name)
    found = search(tmp_path / "middle", tmp_path / "no cache")
    assert names(found) == ["small"]
    assert "of the target's parameters" in why_not(found)["large"]
    found = search(tmp_path / "small", tmp_path / "no cache")
    assert names(found) == []
    assert set(why_not(found)) == {"large", "middle"}


def test_a_copy_of_the_target_in_fewer_bytes_is_no_smaller_model(made, tmp_path):
    import transformers

    shutil.copytree(made / "large", tmp_path / "large")
    half = transformers.AutoModelForCausalLM.from_pretrained(made / "large").bfloat16()
    shutil.copytree(made / "large", tmp_path / "half")
    half.save_pretrained(tmp_path / "half")
    size = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("half", "large")]
    assert size[0] < 0.55 * size[1]
    found = search(tmp_path / "large", tmp_path / "no cache")
    assert names(found) == []
    assert why_not(found)["half"].startswith("it has 100%")


def test_another_vocabulary(made, tmp_path):
    for name in ("large", "small", "tiny"):
        shutil.copytree(made / name, tmp_path / name)
    swap_two_tokens(tmp_path / "small")  # as many rows, two of them swapped
    change(tmp_path / "tiny" / "config.json", vocab_size=90)
    found = search(tmp_path / "large", tmp_path / "no cache")
    assert names(found) == []
    assert "the tokenizers differ on 2 of" in why_not(found)["small"]
    assert why_not(found)["tiny"] == "another vocabulary: 90 rows, the target has 320"
    with pytest.raises(ReadError, match="tokenizer read"):  # rows alone told so
        _without_tokenizers(tmp_path)
    shutil.rmtree(tmp_path / "small")
    assert why_not(_without_tokenizers(tmp_path)).keys() == {"tiny"}


class ReadError(BaseException):
    """Not passed over."""


def _without_tokenizers(folder: Path):
    source = inspect_checkpoint(folder / "large")
    tokenizer = load_tokenizer(source)

    def refuse(source: Source):
        raise ReadError("a tokenizer read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.drafters.siblings.load_tokenizer", refuse)
        return siblings(source, tokenizer, folder / "no cache")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "truncated or corrupt"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda f: change(f / "config.json", architectures=5), "'int' object"),
        (lambda f: change(f / "config.json", model_type="bert"), "not a causal language model"),
        (lambda f: change(f / "config.json", quantization_config={"bits": 4}), "are quantised"),
    ],
)
def test_broken_folders_are_passed_over(made, tmp_path, damage, reason):
    for name in ("large", "small", "tiny"):
        shutil.copytree(made / name, tmp_path / name)
    damage(tmp_path / "small")
    found = search(tmp_path / "large", tmp_path / "no cache")
    assert names(found) == ["tiny"]
    assert reason in why_not(found)["small"]
    assert "\n" not in why_not(found)["small"]


def test_what_may_not_be_read_is_passed_over(made, tmp_path, monkeypatch):
    for name in ("large", "small", "tiny"):
        shutil.copytree(made / name, tmp_path / name)
    stat = Path.stat

    def forbidden(self, **options):
        if "small" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", forbidden)
    assert "tiny" in names(search(tmp_path / "large", tmp_path / "no cache"))


def test_the_cache(made, tmp_path):
    cache = tmp_path / "hub"
    target = cached(cache, "house/large", made / "large")
    small = cached(cache, "house/small", made / "small")
    cached(cache, "house/middle", made / "middle")
    cached(cache, "other/unpacked", made / "small", without=("model.safetensors",))
    cached(cache, "other/configless", made / "small", without=("config.json",))
    (cache / "models--other--empty").mkdir()
    (cache / "models--no--such--name").mkdir()
    found = search(target, cache)
    assert [(s.name, s.folder) for s in found.found] == [("house/small", small)]
    assert dict(found.left_out).keys() == {"house/middle", "other/unpacked"}
    assert "has no model.safetensors" in dict(found.left_out)["other/unpacked"]


def test_the_users_own_cache_by_default(made, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", "house/small", made / "small")
    source = inspect_checkpoint(shutil.copytree(made / "large", tmp_path / "a" / "large"))
    (sibling,) = siblings(source, load_tokenizer(source)).found
    assert sibling.name == "house/small"


def test_known_pairs_come_first_and_then_those_near_a_twentieth(made, tmp_path):
    cache = tmp_path / "hub"
    target = cached(cache, "Qwen/Qwen3-8B", made / "large")
    cached(cache, "Qwen/Qwen3-1.7B", made / "tiny")
    cached(cache, "Qwen/Qwen3-0.6B", made / "small")
    cached(cache, "a/tiny", made / "tiny")
    cached(cache, "a/small", made / "small")
    found = search(target, cache)
    order = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "a/tiny", "a/small"]
    assert [sibling.name for sibling in found.found] == order
    assert found.found[0].why == "known to draft for it, in the Hugging Face cache"
    assert found.found[2].why == "in the Hugging Face cache"
    assert found.found[1].ratio < found.found[0].ratio < 0.5  # so it was not the size
    one = search(target, cache, most=1)
    assert [sibling.name for sibling in one.found] == order[:1]
    assert dict(one.left_out) == dict.fromkeys(order[1:], "Qwen/Qwen3-0.6B is preferred")


def test_a_known_draft_in_a_folder_beside_it(made, tmp_path):
    target = shutil.copytree(made / "large", tmp_path / "Qwen3-8B")
    shutil.copytree(made / "tiny", tmp_path / "a")
    shutil.copytree(made / "small", tmp_path / "Qwen3-0.6B")
    assert names(search(target, tmp_path / "no cache")) == ["Qwen3-0.6B", "a"]


def test_few_are_tried(made, tmp_path, monkeypatch):
    target = shutil.copytree(made / "large", tmp_path / "large")
    for i in range(12):
        shutil.copytree(made / "small", tmp_path / f"s{i:02}")
        swap_two_tokens(tmp_path / f"s{i:02}")
    found = search(target, tmp_path / "no cache")
    reasons = [why_not(found)[f"s{i:02}"] for i in range(12)]
    assert all("tokenizers differ" in reason for reason in reasons[:8])
    assert reasons[8:] == ["too many others were tried before"] * 4
    monkeypatch.setattr("outpace.drafters.siblings._INSPECTED", 3)
    few = why_not(search(target, tmp_path / "no cache"))
    assert few["s03"] == few["s11"] == "too many others were looked at before"


def test_the_shipped_pair():
    found = search("demo", Path("no cache"))
    assert [sibling.name for sibling in found.found] == ["demo-draft"]
    assert found.found[0].ratio == pytest.approx(1721536 / 17664832)
    assert search("demo-draft", Path("no cache")).found == ()


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("someone/Qwen3-14B-tuned", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B-Base"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.2-1B"),
        ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-135M"),
        ("EleutherAI/pythia-6.9b-deduped", "EleutherAI/pythia-70m-deduped"),
        ("meta-llama/Llama-2-13b-chat-hf", "JackFram/llama-68m"),
        ("google/gemma-3-27b-it", "google/gemma-3-270m-it"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "alamios/DeepSeek-R1-DRAFT-Qwen2.5-0.5B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "alamios/Mistral-Small-3.1-DRAFT-0.5B"),
        ("mistralai/Devstral-Small-2505", "alamios/Mistral-Small-3.1-DRAFT-0.5B"),
        ("tiiuae/Falcon3-10B-Instruct", "tiiuae/Falcon3-1B-Instruct"),
        ("tiiuae/Falcon3-7B-Base", "tiiuae/Falcon3-1B-Base"),
        ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_what_is_known(made, name, draft):
    source = source_named(made / "large", name)
    assert known_drafts(source)[0] == draft


def test_nothing_is_known_of_most_and_of_the_smallest(made):
    assert known_drafts(inspect_checkpoint(made / "large")) == ()
    for name in (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen2.5-0.5B",
        "tiiuae/Falcon3-1B-Base",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "mistralai/Mistral-Small-Instruct-2409",  # of another vocabulary than its successors
    ):
        assert known_drafts(source_named(made / "large", name)) == ()
    before = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B")
    source = source_named(made / "large", "Qwen/Qwen2.5-1.5B-Instruct")
    assert known_drafts(source) == before


def test_the_guide_has_every_family():
    text = DOCS.read_text(encoding="utf-8")
    drafts = {re.sub("-(Base|Instruct|it|deduped)$", "", f.drafts[0]) for f in FAMILIES}
    missing = [draft for draft in drafts if draft not in text]
    assert missing == []


def test_an_embedding_may_be_padded(made, tmp_path):
    """Rows beyond the vocabulary, as sizes of one family have more or fewer of."""
    target = shutil.copytree(made / "large", tmp_path / "large")
    shutil.copytree(made / "padded", tmp_path / "padded")
    rows = json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"]
    assert rows == 328
    assert names(search(target, tmp_path / "no cache")) == ["padded"]
