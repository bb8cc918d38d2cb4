"""The command line as a stranger types it: output, JSON, and one-line errors with code 2."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from checkpoints import swap_two_tokens
from outpace.cli import main
from outpace.cli.main import run
from outpace.cli.show import TokenView, harmless
from outpace.types import TokenEvent


@pytest.fixture
def base(pair):
    return ["--model", str(pair / "target"), "--drafter", str(pair / "draft"), "--dtype", "fp32"]


def test_generate_prints_the_text_alone(base, pair, capsys):
    import outpace

    assert run(["generate", "for i", *base, "-n", "20"]) == 0
    out = capsys.readouterr().out
    plain = outpace.load(str(pair / "target"), dtype="float32")
    assert out == plain.generate("for i", max_new_tokens=20).text + "\n"


def test_json_has_everything(base, capsys):
    arguments = ["-n", "12", "-t", "0.9", "--seed", "4", "--top-k", "20", "--top-p", "0.9"]
    assert run(["generate", "for i", *base, *arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == "".join(t["text"] for t in value["tokens"])
    assert value["seed"] == 4
    assert value["finish_reason"] in ("length", "stop")
    assert {"token_id", "logprob", "provenance", "depth"} <= set(value["tokens"][0])
    keys = {"acceptance_rate", "alpha", "tokens_per_pass", "full_accept_fraction"}
    assert keys | {"draft_seconds", "target_seconds", "tokens_per_second"} <= set(value["stats"])
    assert value["control"]["reason"]
    assert value["control"]["estimates"][0]["name"]


def test_prompt_from_a_file_and_from_stdin(base, tmp_path, capsys, monkeypatch):
    import io

    assert run(["generate", "for i", *base, "-n", "5"]) == 0
    want = capsys.readouterr().out
    path = tmp_path / "prompt.txt"
    path.write_text("for i")
    assert run(["generate", "--file", str(path), *base, "-n", "5"]) == 0
    assert capsys.readouterr().out == want
    for arguments in (["generate"], ["generate", "--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("for i"))
        assert run([*arguments, *base, "-n", "5"]) == 0
        assert capsys.readouterr().out == want


def test_stats_go_to_stderr(base, capsys):
    assert run(["generate", "for i", *base, "-n", "5", "--stats"]) == 0
    captured = capsys.readouterr()
    assert "acceptance rate" in captured.err
    assert "acceptance rate" not in captured.out


def test_drafter_none_is_plain_decoding(base, capsys):
    assert run(["generate", "for i", *base, "--drafter", "none", "-n", "5", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {t["provenance"] for t in value["tokens"]} == {"plain"}
    assert value["control"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "no/such/place"], "does not exist"),
        (["generate", "x", "-k", "-1"], "k must be a whole number >= 0"),
        (["generate", "x", "-k", "many"], "k must be a whole number >= 0, not 'many'"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a number >= 0"),
        (["generate", "x", "--top-p", "2"], "top_p must be"),
        (["generate", "x", "--seed", "-3"], "seed must be"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temprature", "1"], "No such option"),
        (["generate", "x", "--file", "y"], "not both"),
        (["generate", "--file", "/no/such/file"], "cannot read the prompt"),
        (["generate", "x", "--dtype", "int3"], "unknown dtype"),
        (["generate", "x", "--device", "abacus"], "unknown device"),
        (["generate", "x", "--chat"], "no chat template"),
        (["generat", "x"], "No such command"),
        (["bench", "--prompts", "0"], "at least 1"),
        (["bench", "--drafter", "none"], "give --drafter"),
        (["train", "demo", "--out", "x", "--stage", "none"], "unknown stage"),
    ],
)
def test_errors_are_one_line_with_code_2(arguments, message, pair, refused):
    if arguments[0] in ("generate", "bench") and "--model" not in arguments:
        arguments = [*arguments, "--model", str(pair / "target")]
        if "--drafter" not in arguments:
            arguments += ["--drafter", str(pair / "draft")]
    refused(arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 3000], "shorten the prompt to at most 511"),
        (["x", "--chat"], "no chat template"),
        (["x", "--system", "y"], "no chat template"),
        (["x", "-k", "-2"], "k must be"),
    ],
)
def test_requests_are_checked_before_weights_are_read(
    arguments, message, base, refused, monkeypatch
):
    from outpace.models.checkpoint import Weights

    def reading(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "load", reading)
    refused(["generate", *base, *arguments], message)


def test_a_vocabulary_mismatch_is_one_line_with_an_example(pair, tmp_path, refused):
    shutil.copytree(pair / "draft", tmp_path / "other")
    swap_two_tokens(tmp_path / "other")
    target, other = str(pair / "target"), str(tmp_path / "other")
    message = "is 'a' to the target and 'b' to the draft"
    refused(["generate", "x", "--model", target, "--drafter", other], message)


def test_a_truncated_checkpoint_is_one_line(pair, tmp_path, refused):
    shutil.copytree(pair / "target", tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    refused(["generate", "x", "--model", str(tmp_path / "cut")], "truncated or corrupt")


def test_bench_measures_any_drafter(pair, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"for i in range(3): for i in range"')
    arguments = ["bench", "--model", str(pair / "target"), "--drafter", "ngram:2"]
    arguments += ["--prompt-file", str(prompts)]
    assert run([*arguments, "-r", "1", "-n", "8", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [r["mode"] for r in value["rows"]] == ["target only", "speculative"]
    assert (value["drafter"], value["k"], value["verifier"]) == ("ngram:2", "auto", "match")
    assert value["identical"] == 1


def test_bench_prints_the_three_ways(base, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"for i"\n{"prompt": "def"}\n')
    arguments = ["bench", *base, "--prompt-file", str(prompts), "-r", "1", "-n", "8"]
    assert run([*arguments, "--no-color"]) == 0
    out = capsys.readouterr().out
    for word in ("draft only", "target only", "speculative", "speedup", "equals plain text on 2"):
        assert word in " ".join(out.split())
    assert run([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [r["mode"] for r in value["rows"]] == ["draft only", "target only", "speculative"]
    assert value["identical"] == value["prompts"] == 2
    for wrong in ("not json", '{"prompt": null}', '{"prompt": ["a"]}', "3"):
        prompts.write_text(f'"fine \u2028 line"\n{wrong}\n')
        assert run(arguments) == 2
        assert "line 2 of prompts.jsonl" in capsys.readouterr().err


def test_on_a_terminal_tokens_stream_in_colour(base):
    """A real pseudo-terminal: colours by provenance, the statistics line, the whole text."""
    command = [sys.executable, "-m", "outpace", "generate", "for i", *base, "-n", "120", "-k", "4"]
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    text = shown.decode(errors="replace")
    plain = subprocess.run([*command, "--no-color"], capture_output=True, check=True, text=True)
    assert "\x1b[" not in plain.stdout
    events = subprocess.run([*command, "--json"], capture_output=True, check=True, text=True)
    for word in ("draft accepted", "correction", "bonus"):  # of the legend
        text = text.replace(word, "")
    seen = set()
    for event in json.loads(events.stdout)["tokens"]:
        shown_alone = event["text"].strip()
        if shown_alone and shown_alone.isascii() and shown_alone.isprintable():
            colour = {"draft": 32, "correction": 31, "bonus": 36}.get(event["provenance"])
            assert colour is None or re.search(
                f"\x1b\\[{colour}m[^\x1b]*{re.escape(shown_alone)}", text
            )
            seen.add(colour)
    assert {32, 31} <= seen
    assert re.search(r"120 tokens · \d+ tokens/s", text)


def test_the_statistics_move_with_the_tokens():
    out, said = io.StringIO(), []
    console = Console(file=out, force_terminal=True, width=80)
    with TokenView(console, lambda: f"{len(said)} tokens", "for ") as view:
        for token in ("i ", "in ", "x:\n", "pass"):
            said.append(token)
            view.add(TokenEvent(token, 5, -0.1, "draft", 1))
            view._live.refresh()  # a terminal sees some twelve a second
    for count in range(1, 5):
        assert f"{count} tokens" in out.getvalue()


@pytest.mark.parametrize("character", ["\u3000", "\u00a0", "\u202f", "\u200d", "é", "🙂", "\n"])
def test_letters_and_spaces_of_any_script_are_shown(character):
    assert harmless(f"a{character}b") == f"a{character}b"


@pytest.mark.parametrize("character", ["\x1b", "\x07", "\x9b", "\r", "\u202e", "\u2028", "\ud800"])
def test_what_commands_a_terminal_is_not(character):
    assert harmless(f"a{character}b") == "a\ufffdb"


@pytest.mark.parametrize("arguments", [[], ["train"]])
def test_without_arguments_comes_the_help(arguments, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage" in captured.out
    assert captured.err == ""


def test_a_fault_of_our_own_is_told_from_a_verdict(monkeypatch, capsys):
    """1 is what an audit says of an engine that is not the target's."""

    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(main, "run", broken)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 70
    assert "RuntimeError: out of memory" in capsys.readouterr().err


def outside(arguments, **options):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "outpace", *arguments]
    return subprocess.run(command, capture_output=True, check=False, **options)


def test_streams_that_are_closed_or_know_no_unicode(base):
    closed = outside(["generate", *base], preexec_fn=lambda: os.close(0))
    assert closed.returncode == 2
    assert closed.stderr == b"outpace: no prompt: standard input is closed\n"
    bad = outside(["generate", b"\xff", *base])
    assert bad.returncode == 2
    assert bad.stderr.count(b"\n") == 1
    assert b"not valid Unicode" in bad.stderr
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    options = ["-t", "2", "--seed", "1", "-n", "60"]
    plain = outside(["generate", "gr\u00f6", *base, *options], env=ascii_only)
    assert plain.returncode == 0
    assert b"?" in plain.stdout


def test_version_and_help(capsys):
    import outpace

    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"outpace {outpace.__version__}"
    for command in ("generate", "bench", "demo", "train"):
        assert run([command, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out
