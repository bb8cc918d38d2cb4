"""`outpace plan` as it is typed: the report, JSON, the command to run, and errors first."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from made_up import machine, survey

from outpace.cli.main import run
from outpace.cli.plan import checked
from outpace.cli.plan_report import Asked, command, print_plan
from outpace.planner import plan

QUICK = ["-p", "2", "-n", "10", "--seconds", "0.02", "--dtype", "fp32"]


def asked(**options) -> Asked:
    given = {"--dtype": None, "--device": None, "--quantize": None} | options
    return Asked("some/model", (0.0, 0.8), (1, 4), 64, given)


def test_json_has_everything_and_the_pictures_are_written(pair, tmp_path, capsys):
    prompts, picture = tmp_path / "prompts.jsonl", tmp_path / "landscape.svg"
    prompts.write_text('"for i in"\n{"prompt": "def f"}\n"third"\n')
    arguments = ["plan", str(pair / "target"), "-d", str(pair / "draft"), "-d", "ngram", *QUICK]
    arguments += ["--prompt-file", str(prompts), "-t", "0", "-t", "0.9", "--no-trees"]
    arguments += ["-b", "2", "-b", "3"]
    assert run([*arguments, "--picture", str(picture), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["model"] == str(pair / "target")
    assert value["drafters"] == [str(pair / "draft"), "ngram"]
    assert value["prompts"] == 2
    assert [(p["temperature"], p["batch"]) for p in value["plans"]] == [
        (temperature, batch) for temperature in (0.0, 0.9) for batch in (2, 3)
    ]
    rules = {(s["drafter"], s["temperature"], s["verifier"]) for s in value["surveys"]}
    draft = str(pair / "draft")
    assert {(draft, 0.9, rule) for rule in ("token", "block", "coupled")} <= rules
    assert all(
        p["emitted"] == 10 for s in value["surveys"] for r in s["runs"] for p in r["prompts"]
    )
    assert picture.stat().st_size > 1000
    assert (tmp_path / "landscape-3.svg").stat().st_size > 1000
    assert len(list(tmp_path.glob("*.svg"))) == 2


def test_the_report_ends_with_what_to_run(pair, capsys):
    assert run(["plan", str(pair / "target"), "-d", "ngram", *QUICK, "-t", "0", "--no-color"]) == 0
    captured = capsys.readouterr()
    assert "\x1b[" not in captured.out
    said = " ".join(captured.out.split())
    for word in ("ms of a pass", "Temperature 0, one sequence", "ngram", "speedup", "Run:"):
        assert word in said
    assert re.search(r"ngram: α by depth (-|[0-9. ]+); a draft step takes [0-9.]+ ms", said)
    assert "outpace generate -f PROMPT --model" in captured.out.rsplit("Run:", 1)[1]


def test_by_default_all_that_needs_no_download_and_can_draft(pair, capsys):
    """int4 needs compiled kernels, and is left out with a word about it where there are none."""
    arguments = ["plan", str(pair / "target"), *QUICK, "-t", "0", "--no-compile", "--json"]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["drafters"] == ["ngram", "suffix", str(pair / "draft")]
    assert "not measured: int4" in captured.err


def test_the_shipped_pair_is_a_candidate_for_the_shipped_target():
    from outpace.assembly import Assembly

    here = Assembly("demo")
    suited = {c.name for c in here.candidates if c.fits}
    found = set(checked(here, asked(), ["import os"], None))
    assert found == suited | {"ngram", "suffix", "int4"}
    assert "demo-draft" in found
    assert set(checked(here, asked(), ["import os"], ["suffix"])) == {"suffix"}


def test_commands_are_what_was_found():
    cold, warm = survey("my/draft", 0.8, 0.5), survey("my/draft", 0.7, 0.5, temperature=0.8)
    found = plan(machine(), [cold, warm], (1, 16))
    one, many, hot, _ = found.advices
    start = "outpace generate -f PROMPT --model some/model --drafter"
    assert command(asked(), one) == f"{start} my/draft -k {one.best.k}"
    assert command(asked(), many) == "outpace.load('some/model', drafter=None, max_batch=16)"
    options = {"--dtype": "bfloat16", "--quantize": "int8", "--device": None, "--no-compile": ""}
    assert command(asked(**options), hot) == (
        f"{start} my/draft -k {hot.best.k} --verifier token -t 0.8 --dtype bfloat16 "
        "--quantize int8 --no-compile"
    )
    said = command(asked(**options), replace(hot, batch=4))
    assert said == (
        f"outpace.load('some/model', drafter='my/draft', k={hot.best.k}, verifier='token', "
        "dtype='bfloat16', quantize='int8', compile=False, max_batch=4)"
    )


def test_a_plan_that_is_not_to_speculate_says_so(capsys):
    found = plan(machine(), [survey("slow", 0.5, 20.0)])
    print_plan(found, asked(), True)
    out = " ".join(capsys.readouterr().out.split())
    assert "do not speculate" in out
    assert "--drafter none # nothing pays" in out
    assert "→ plain" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/place"], "does not exist"),
        (["--temperature", "-1"], "temperature must be"),
        (["--batch", "0"], "batch must be"),
        (["--drafter", "ngrm"], "did you mean 'ngram'"),
        (["--drafter", "none"], "plan measures drafters"),
        (["--drafter", "auto"], "name one ('outpace drafters MODEL' lists them), or leave it out"),
        (["--drafter", "early-exit:99"], "leaves nothing to verify"),
        (["--prompts", "0"], "at least 1"),
        (["--prompts", "99"], "give more of your own (--prompt-file)"),
        (["--prompt-file", "/no/such/file"], "cannot read the prompt"),
        (["--max-new-tokens", "2"], "say nothing"),
        (["--max-new-tokens", "600"], "positions"),
        (["--seconds", "0"], "above 0"),
        (["--picture", "x.doc"], "suffix is one of"),
        (["--picture", "/no/such/folder/x.png"], "no such folder"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--device", "abacus"], "unknown device"),
        (["--tempratur", "1"], "No such option"),
    ],
)
def test_errors_come_before_weights_are_read(arguments, message, pair, refused, monkeypatch):
    from outpace.models.checkpoint import Weights

    def reading(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "load", reading)
    if not arguments[0].startswith("no/"):
        arguments = [str(pair / "target"), *arguments]
    refused(["plan", *arguments], message)
