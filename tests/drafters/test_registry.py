"""Drafters by name: what strings mean, what is refused and what is said then, other packages'."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import outpace
from outpace import OptionError
from outpace.assembly import Assembly
from outpace.cli.main import run
from outpace.drafters import (
    BUILT_IN,
    CascadeDrafter,
    Drafter,
    NgramDrafter,
    QuantizedDrafter,
    entries,
    parse,
    registry,
)
from outpace.drafters.cascade import Cascade
from outpace.types import Shape

DOCS = Path(__file__).parents[2] / "docs" / "drafters.md"


def test_options_go_by_position_and_by_name():
    drafter = parse("ngram:2,branches=3")
    assert isinstance(drafter, NgramDrafter)
    assert (list(drafter._lengths), drafter._branches) == ([2, 1], 3)
    assert parse("suffix:factor=1.5,branching=no").proposes is Shape.CHAIN


def test_a_plus_makes_a_cascade():
    cascade = parse("suffix+ngram:1+owner/model")
    assert isinstance(cascade, Cascade)
    assert cascade.name == "suffix+ngram+owner/model"


def test_a_folder_comes_behind_a_name_and_before_a_cascade(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ngram", "a+b", "plain"):
        (tmp_path / name).mkdir()
    assert isinstance(parse("ngram"), NgramDrafter)
    for path in ("./ngram", "a+b", "plain", "owner/model", "demo-draft", tmp_path / "ngram"):
        assert parse(path).name == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngrm", "did you mean 'ngram'?"),
        ("nothing-like-it", "known are ngram, suffix"),
        ("", "there is no drafter ''"),
        ("suffix+", "there is no drafter ''"),
        ("ngram:x", "longest of the drafter 'ngram' must be a whole number, not 'x'"),
        ("ngram:0", "longest must be a whole number >= 1"),
        ("ngram:1,2,3", "takes 2 values at most: it has longest, branches"),
        ("ngram:branchs=2", "no option 'branchs': it has longest, branches"),
        ("ngram:1,longest=2", "longest is given twice"),
        ("suffix:factor=wide", "factor of the drafter 'suffix' must be a number"),
        ("suffix:least=2", "least must be in"),
        ("suffix:branching=maybe", "must be true or false"),
        ("suffix:capacity=0", "capacity must be a whole number >= 1"),
        ("suffix:capacity=99999999999", "at most 2^30"),
        ("suffix:file=~nobody-of-that-name/x", "is no path"),
        ("early-exit:1,~nobody-of-that-name/x", "is no path"),
        ("skip:0-99999999999", "numbers and ranges like '3-5.8'"),
        ("x" * 300, "there is no drafter"),
        ("recycling:9999", "at most 512"),
        ("lookahead:2", "n must be a whole number >= 3"),
        ("early-exit", "needs layers: write 'early-exit:layers'"),
        ("early-exit:4,nowhere", "nowhere has no adapter that can be read"),
        ("skip:a", "numbers and ranges"),
        ("skip:5-3", "no layer is left out"),
        ("int8:3", "takes 0 values at most"),
        ("tli", "needs path"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(outpace.OutpaceError, match=re.escape(message)):
        parse(text)


def test_what_is_no_drafter_at_all_is_refused(pair):
    with pytest.raises(OptionError, match="takes a name, a path or an outpace"):
        outpace.load(str(pair / "target"), drafter=NgramDrafter)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("early-exit:3", "leaves nothing to verify with, as the target has 3: exit earlier"),
        ("early-exit:0", "layers must be a whole number >= 1"),
        ("skip:7", "needs layer 7, and the target has 3, from 0 to 2"),
        ("skip:0-2", "keep at least one"),
        ("ngram+early-exit:9", "exit earlier, e.g. 'early-exit:1'"),
        ("ngram:2,3 --verifier block", "proposes trees and the verifier 'block' takes chains"),
        ("int8 --no-compile", "'ngram', 'suffix' and 'recycling' draft for any model"),
        ("int8 --quantize int8", "would cost as much: draft with 'int4'"),
        ("int4 --quantize int4", "would cost as much"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(pair, refused, drafter, message):
    name, *options = drafter.split()
    arguments = ["generate", "x", "--model", str(pair / "target"), "--drafter", name]
    refused([*arguments, *options], message)


def test_models_that_are_not_run_layer_by_layer_have_no_layers_to_spare(tmp_path, pair):
    from checkpoints import write

    write(tmp_path / "gpt2", "GPT2", {"vocab_size": 320})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / file).write_bytes((pair / "target" / file).read_bytes())
    for drafter in ("early-exit:1", "skip:1", "int8"):
        with pytest.raises(outpace.IncompatibleError, match="Llama family"):
            outpace.load(str(tmp_path / "gpt2"), drafter)
    options = {"temperature": 0, "max_new_tokens": 8, "eos_token_ids": ()}
    plain = outpace.load(str(tmp_path / "gpt2")).generate("for i", **options)
    fast = outpace.load(str(tmp_path / "gpt2"), "recycling:4").generate("for i", **options)
    assert fast.token_ids == plain.token_ids


def test_a_path_that_cannot_be_is_refused():
    with pytest.raises(outpace.CheckpointError, match="cannot be read"):
        outpace.load("demo", "~nobody-of-that-name/model")


@pytest.mark.parametrize("taken", [lambda: NgramDrafter(), lambda: QuantizedDrafter("int8")])
def test_a_drafter_in_use_is_refused_and_goes_on(pair, taken, monkeypatch):
    drafter, target = taken(), str(pair / "target")
    first = outpace.load(target, drafter)
    again = Assembly(target, "ngram")
    held = vars(drafter).copy()
    monkeypatch.setattr("outpace.assembly.load_model", None)
    for given in (drafter, CascadeDrafter([NgramDrafter(), drafter])):
        with pytest.raises(outpace.IncompatibleError, match="make one for each"):
            outpace.load(target, given)
    again._draft = drafter  # taken while it was being assembled
    with pytest.raises(outpace.IncompatibleError, match="make one for each"):
        again.load()
    assert vars(drafter) == held
    assert len(first.generate("for i", max_new_tokens=5, eos_token_ids=()).token_ids) == 5


def test_every_drafter_has_one_line(capsys):
    assert run(["drafters", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in listed][: len(BUILT_IN)] == list(BUILT_IN)
    assert listed[-1]["name"] == "PATH"
    assert all(e["summary"].endswith(".") and e["requires"] for e in listed)
    assert run(["drafters"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BUILT_IN)


# --- other packages ----------------------------------------------------------------------------


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    (code,) = (b for b in blocks if "class PeriodDrafter" in b)
    return code


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`install(name, value)`: a package with the documented example and this entry point."""
    (tmp_path / "outpace_period.py").write_text(example(), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, value: str) -> None:
        info = tmp_path / "outpace_period-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outpace-period\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {value}\n")
        registry._third_party.cache_clear()

    yield install
    sys.modules.pop("outpace_period", None)
    registry._third_party.cache_clear()


def test_the_documented_example_is_short():
    assert len(example().strip().splitlines()) <= 22


def test_another_packages_drafter_goes_by_its_name(package, pair, capsys):
    package("period", "outpace_period:PeriodDrafter")
    drafter = parse("period:3")
    assert isinstance(drafter, Drafter)
    assert drafter.period == 3
    assert "period" in [e.name for e in entries()]
    options = {"temperature": 0, "max_new_tokens": 40, "eos_token_ids": ()}
    target = str(pair / "target")
    plain = outpace.load(target, dtype="float32").generate("for i", **options)
    for name in ("period:2", "period:1+ngram"):
        generator = outpace.load(target, name, dtype="float32")
        result = generator.generate("for i", **options)
        assert result.token_ids == plain.token_ids
        assert result.stats.proposed > 0
    with pytest.raises(OptionError, match="period of the drafter 'period' must be a whole number"):
        parse("period:x")
    assert run(["drafters"]) == 0
    assert "period:period=8" in capsys.readouterr().out


def test_a_drafter_that_cannot_be_imported_is_named(package):
    package("period", "outpace_period:Missing")
    with pytest.raises(OptionError, match=r"'period' .* cannot be imported .* reinstall"):
        parse("period")
    (listed,) = (e for e in entries() if e.name == "period")
    assert "cannot be imported" in listed.summary


def test_a_built_in_name_is_never_taken_over(package):
    package("ngram", "outpace_period:PeriodDrafter")
    assert isinstance(parse("ngram"), NgramDrafter)
    assert [e.name for e in entries()].count("ngram") == 1


@pytest.mark.parametrize("value", ["outpace_period:__doc__", "outpace_period:odd"])
def test_one_broken_drafter_leaves_the_others_listed(package, tmp_path, value):
    code = example() + "\n\ndef odd(x: 'Nowhere' = 1):\n    pass\n"
    (tmp_path / "outpace_period.py").write_text(code, encoding="utf-8")
    package("period", value)
    with pytest.raises(OptionError, match="'period'"):
        parse("period:3")
    assert {"ngram", "period", "suffix"} <= {e.name for e in entries()}


def test_past_outputs_of_another_vocabulary_are_refused_before_weights_are_read(
    pair, tmp_path, monkeypatch
):
    from outpace.drafters import Memory
    from outpace.models.checkpoint import Weights

    file = tmp_path / "deep" / "outputs"
    Memory(99, file).serve(7)
    monkeypatch.setattr(Weights, "load", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(
        OptionError, match="outputs of a vocabulary of 7 tokens, the target has 320"
    ):
        outpace.load(str(pair / "target"), f"suffix:file={file}")
    untouched = tmp_path / "new" / "outputs"
    with pytest.raises(OptionError, match="no option 'nothing'"):
        parse(f"suffix:file={untouched},nothing=1")
    parse(f"suffix:file={untouched}")
    assert not untouched.parent.exists()
