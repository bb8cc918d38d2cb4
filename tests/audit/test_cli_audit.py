"""`outpace audit` as a stranger types it: the verdict, its exit code, the picture, and errors."""

from __future__ import annotations

import importlib.util
import json
import re
import socket

import pytest
from matplotlib import image

from outpace import OptionError
from outpace.audit.plot import plot
from outpace.audit.report import Report, Sampled
from outpace.cli.main import run
from outpace.models.checkpoint import Weights

ALIKE = [part for i in range(70, 74) for part in ("--logit-bias", f"{i}=30")]
"""Two random checkpoints choose from the same four tokens."""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"for i in "\n{"prompt": "def x(y):"}\n')
    return ["--prompt-file", str(path)]


@pytest.fixture
def base(pair, prompts):
    models = ["--model", str(pair / "target"), "--drafter", str(pair / "draft")]
    return ["audit", *models, "--dtype", "fp32", *prompts, "-s", "240", "--tokens", "3", "-k", "2"]


@pytest.fixture
def target(pair, prompts):
    """The target alone, for engines that draft from it."""
    model = ["--model", str(pair / "target"), "--dtype", "fp32"]
    return ["audit", *model, *prompts, "-s", "240", "--tokens", "3"]


def words(text: str) -> str:
    return " ".join(text.split())


# --- verdicts ----------------------------------------------------------------------------------


def test_a_sound_engine_is_reported_and_the_code_is_0(base, capsys):
    assert run([*base, *ALIKE, "--no-color"]) == 0
    captured = capsys.readouterr()
    out = words(captured.out)
    assert captured.err == ""
    assert "K = 2, verifier token" in out
    for mode in ("greedy", "sampled", "exact"):
        assert f"ok {mode} " in out
    assert "the same 128 tokens on 2 prompts" in out
    assert "no difference in 240 samples (720 tokens)" in out
    assert "found 90% of the time" in out
    assert "of 8 seeds 8 gave the same text" in out
    assert out.endswith("no difference from the target was found")
    assert "FAIL" not in out
    assert "\x1b" not in captured.out


def test_a_lossy_rule_is_reported_and_the_code_is_1(base, capsys):
    lossy = [*base, *ALIKE, "--verifier", "typical", "-t", "1.5"]
    assert run([*lossy, "--no-color"]) == 1
    captured = capsys.readouterr()
    out = words(captured.out)
    assert "is lossy" in captured.err
    assert "ok greedy " in out
    for mode in ("sampled", "exact"):
        assert f"FAIL {mode} not the target's law" in out
    assert re.search(r"at position \d, by \w+, p = \S+ with \d+ samples; off by", out)
    assert out.endswith("NOT the target's output")


def test_json_has_the_verdict_the_tests_and_their_power(base, capsys):
    for options, code in ((["--verifier", "token"], 0), (["--verifier", "typical"], 1)):
        assert run([*base, *ALIKE, "-t", "1.5", *options, "--json"]) == code
        value = json.loads(capsys.readouterr().out)
        assert value["sound"] is (code == 0)
        assert list(value["parts"]) == ["greedy", "sampled", "exact"]
        sampled = value["parts"]["sampled"]
        assert sampled["sound"] is (code == 0)
        keys = {"position", "kind", "samples", "degrees", "p_value", "detectable", "distance"}
        for test in sampled["tests"]:
            assert keys <= set(test)
            assert 0 < test["detectable"] < 1
        lowest = min(test["p_value"] for test in sampled["tests"])
        assert (lowest < sampled["share"]) is (code == 1)
        assert value["setting"]["temperature"] == 1.5
        assert value["setting"]["samples"] == 240
        exact = value["parts"]["exact"]
        assert (exact["error"] < exact["tolerance"]) is (code == 0)
        assert exact["narrowed"] == 8  # of the vocabulary, at K = 2
        assert all(part["summary"] for part in value["parts"].values())


@pytest.mark.parametrize("mode", ["greedy", "sampled", "exact"])
def test_a_mode_alone(mode, base, capsys):
    assert run([*base, *ALIKE, "--mode", mode, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value["parts"]) == [mode]
    assert value["left_out"] == {}


def test_the_members_of_a_cascade_are_enumerated(base, capsys):
    """Who drafts is chosen; each that may be is audited."""
    several = [*base, *ALIKE, "--drafter", "ngram+recycling", "--mode", "exact"]
    assert run([*several, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["parts"]["exact"]["rounds"] >= 2
    assert value["system"].endswith("drafter ngram+recycling, K = 2, verifier match")


def test_rounds_of_any_length_can_be_audited(base, refused, monkeypatch):
    def load(model, drafter, k, *args, **options):
        raise OptionError(f"loads with K = {k}")

    monkeypatch.setattr("outpace.cli.common.load_with_bar", load)
    refused([*base, "-k", "auto"], "loads with K = auto")


def test_modes_that_do_not_fit_are_left_out_with_a_reason(base, capsys):
    assert run([*base, *ALIKE, "--verifier", "coupled", "--no-color"]) == 0
    assert "- exact left out: the verifier 'coupled' draws with" in words(capsys.readouterr().out)
    assert run([*base, "-t", "0", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value["parts"]) == ["greedy"]


def test_the_shipped_pair(prompts, capsys):
    assert run(["audit", *prompts, "-s", "200", "--tokens", "2", "-k", "1", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["system"] == "outpace, drafter demo-draft, K = 1, verifier token"
    assert list(value["parts"]) == ["greedy", "sampled", "exact"]


@pytest.mark.parametrize("how", [[], ["--prompt-lookup", "2"], ["--early-exit", "1"]])
def test_transformers_is_audited(how, base, target, capsys):
    arguments = [*(target if how else base), *ALIKE, "--engine", "transformers", *how]
    assert run([*arguments, "--no-color"]) == 0
    out = words(capsys.readouterr().out)
    name = {"--prompt-lookup": "prompt_lookup_num_tokens=2", "--early-exit": "early_exit=1"}
    assert (name[how[0]] if how else "assistant_model") in out
    assert "ok greedy " in out
    assert "ok sampled " in out
    assert "- exact left out: only generators of outpace" in out


def test_plain_transformers_is_audited(target, capsys):
    assert run([*target, "--engine", "transformers", "--top-k", "2", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["system"].endswith("generate, plain")
    assert {t["kind"] for t in value["parts"]["sampled"]["tests"]} == {"tokens", "ranks"}


# --- the picture -------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["token", "typical"])
def test_a_picture_is_written(verifier, base, tmp_path, capsys):
    path = tmp_path / "audit.png"
    options = ["--verifier", verifier, "-t", "1.5", "--mode", "sampled", "--plot", str(path)]
    assert run([*base, *ALIKE, *options]) == (verifier == "typical")
    picture = image.imread(path)
    assert picture.shape == (676, 1040, 4)
    shades = (picture[..., :3] * 255).astype(int).reshape(-1, 3)
    seen = {"#{:02x}{:02x}{:02x}".format(*shade) for shade in shades.tolist()}
    assert {"#ffffff", "#000000", "#0b7285", "#c92a2a"} <= seen
    capsys.readouterr()


def test_a_picture_without_tests(tmp_path):
    """A defect may show before there are samples enough for any."""
    found = Sampled(10, 20, 4000, 1e-4, 1e-7, (), ("2 tokens behind an EOS token",))
    for name in ("audit.svg", "audit.pdf"):
        plot(Report("an engine", {}, {"sampled": found}), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


# --- errors ------------------------------------------------------------------------------------

SERVED = ["--engine", "http://localhost:1/v1", "--served-model", "x"]
OTHERS = ["--engine", "transformers"]
WRONG = [
    (["--mode", "thorough"], "unknown mode 'thorough': choose from greedy, sampled, exact"),
    (["--engine", "vllm"], "unknown engine 'vllm'"),
    (["--drafter", "none"], "nothing to audit"),
    (["-k", "0"], "nothing to audit"),
    (["-k", "-1"], "k must be"),
    (["--verifier", "tokn"], "did you mean 'token'"),
    (["--false-alarm", "2"], "between 0 and 1, not 2.0"),
    (["--false-alarm", "0"], "between 0 and 1"),
    (["--samples", "199"], "samples must be a whole number >= 200"),
    (["--prompts", "0"], "at least 1"),
    (["--tokens", "0"], "max_new_tokens"),
    (["--seed", "-1"], "--seed"),
    (["--mode", "exact", "--verifier", "coupled"], "'coupled' draws with one number"),
    (["--mode", "exact", "--regex", "a+"], "audit them by samples"),
    (["--drafter", "ngram", "--engine", "transformers"], "drafts with a model, not with 'ngram'"),
    (["--mode", "exact", "--engine", "transformers"], "cannot enumerate transformers"),
    (["--temperature", "0", "--mode", "sampled"], "only --mode greedy"),
    (["--temperature", "0", "--mode", "greedy", "--mode", "exact"], "only --mode greedy"),
    (["--plot", "/no/such/folder/a.png"], "there is no such folder"),
    (["--plot", "a.jepg"], "a plot's suffix is one of"),
    (["--plot", "a"], "a plot's suffix is one of"),
    (["--plot", "a.png", "--mode", "greedy"], "add --mode sampled"),
    (["--plot", "a.png", "--temperature", "0"], "above 0"),
    (["--prompt-lookup", "3"], "--prompt-lookup goes with --engine transformers"),
    (["--early-exit", "1"], "--early-exit goes with --engine transformers"),
    ([*OTHERS, "--prompt-lookup", "3"], "exclude each other"),
    ([*OTHERS, "--early-exit", "0"], "--early-exit"),
    (
        ["--drafter", "none", "--engine", "transformers", "--early-exit", "9"],
        "the target's 3 layers",
    ),
    ([*OTHERS, "--verifier", "block"], "--verifier is about rounds of outpace"),
    ([*SERVED, "--verifier", "token"], "--verifier is about rounds of outpace"),
    ([*SERVED, "--bad-word", "a"], "cannot be sent to an endpoint"),
    ([*OTHERS, "--quantize", "int8"], "leave --quantize out"),
    ([*OTHERS, "--presence-penalty", "1"], "generate has no presence_penalty"),
    (["--engine", "http://localhost:1/v1"], "by which name"),
    (["--served-model", "x"], "goes with an endpoint"),
    (["--together", "4"], "--together goes with an endpoint"),
    ([*OTHERS, "--drafter", "none", "--prompt-lookup", "3"], "-k says nothing to --prompt-lookup"),
    (SERVED, "-k says nothing to the endpoint"),
    ([*OTHERS, "-k", "auto"], "give a number"),
    ([*OTHERS, "--target-alone"], "--target-alone is about drafts of outpace"),
    (["--together", "0", "--engine", "http://localhost:1/v1"], "--together"),
    (["--prompt-file", "/no/such/file"], "cannot read"),
    (["--logit-bias", "70"], "ID=BIAS"),
    (["--logit-bias", "999999=1"], "outside the target's vocabulary"),
]


def test_the_prompt_that_is_too_long_is_named(base, tmp_path, refused):
    path = tmp_path / "long.jsonl"
    path.write_text('"a"\n' + json.dumps("for i in x: " * 500) + "\n")
    for command in (base, ["bench", *base[1:5]]):
        refused([*command, "--prompt-file", str(path)], "prompt 2: the prompt has")


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_cannot_be_is_refused_before_weights_are_read(
    arguments, message, base, refused, monkeypatch
):
    def reading(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "load", reading)
    served = "-k" not in message and any(a.startswith("http") for a in arguments)
    refused([*(base[:-2] if served else base), *arguments], message)
    with pytest.raises(AssertionError, match="weights were read"):
        run(base)


@pytest.mark.parametrize("lacking", ["scipy", "matplotlib"])
def test_a_package_that_is_missing_is_named(lacking, base, tmp_path, refused, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == lacking else found(name, *rest),
    )
    arguments = [*base, "--plot", str(tmp_path / "a.png")]
    refused(arguments, f"an audit needs {lacking}: pip install 'outpace[audit]'")


def test_a_server_that_is_not_there_is_one_line_too(target, refused):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    refused([*target, "--engine", url, "--served-model", "x"], "does not answer")


def test_help(capsys):
    assert run(["audit", "--help"]) == 0
    out = words(capsys.readouterr().out)
    for option in ("--engine", "--mode", "--samples", "--false-alarm", "--plot", "--top-k"):
        assert option in out
