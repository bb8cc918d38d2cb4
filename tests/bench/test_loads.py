"""Loads are what they are called, fit the shipped pair, and hold no text it was trained on."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

import outpace
from outpace.bench.loads import LOADS, load_prompts
from outpace.bench.prompts import held_out_prompts
from outpace.models.loading import ASSETS
from outpace.models.tokenizer import Tokenizer
from outpace.training.corpus import standard_library

pytestmark = pytest.mark.xdist_group("loads")
"""Reading the library is what takes time."""

COUNT = 8
EDIT = re.compile(r"(?P<before>.+)\n *# (?P<old>\w+) renamed to (?P<new>\w+)\n(?P<head>.+)", re.S)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[str]]:
    return {load: load_prompts(load, COUNT) for load in LOADS}


@pytest.fixture(scope="module")
def held() -> list[str]:
    return [f.text for f in standard_library(held_out=True)]


def rows_of(prompt: str) -> list[tuple[str, str, int]]:
    head, *rows, begun = prompt.split("\n")
    assert (head, begun) == ("FUNCTIONS = [", "    (")
    return [ast.literal_eval(row.strip().removesuffix(",")) for row in rows]


def describes(rows: list[tuple[str, str, int]], text: str) -> bool:
    """Whether these rows, one behind the other, are functions of this file, and one is left."""
    if not all(f"def {name}(" in text for name, _, _ in rows):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    nodes.sort(key=lambda n: n.lineno)
    found = [
        (n.name, ", ".join(a.arg for a in n.args.args), n.end_lineno - n.lineno + 1) for n in nodes
    ]
    return any(found[i : i + len(rows)] == rows for i in range(len(found) - len(rows)))


@pytest.mark.parametrize("load", LOADS)
def test_prompts_fit_the_shipped_pair(prompts, load):
    tokenizer = Tokenizer.load(ASSETS / "target")
    assert all(60 <= len(tokenizer.encode(p)) <= 700 for p in prompts[load])
    assert all(p == p.rstrip() for p in prompts[load])


def test_no_two_prompts_are_alike(prompts):
    assert len({p for load in LOADS for p in prompts[load]}) == COUNT * len(LOADS)


def test_fewer_prompts_are_the_first_of_more(prompts):
    assert load_prompts("free", 3) == prompts["free"][:3]


def test_functions_are_the_held_out_ones(prompts):
    assert prompts["function"] == held_out_prompts(COUNT)


def test_an_edit_shows_the_whole_function_and_begins_the_renamed_one(prompts, held):
    for prompt in prompts["edit"]:
        edit = EDIT.fullmatch(prompt)
        assert edit is not None
        before, old, new, head = edit.group("before", "old", "new", "head")
        after = re.sub(rf"\b{old}\b", new, before)
        assert any(before in text for text in held)
        assert after.startswith(head)
        rest = after[len(head) :]
        for word, text in ((old, before), (new, head), (new, rest)):
            assert re.search(rf"\b{word}\b", text)
        assert not re.search(rf"\b{new}\b", before)
        trees = [ast.dump(ast.parse(textwrap.dedent(t))) for t in (before, after)]
        assert trees[0].replace(f"'{old}'", f"'{new}'") == trees[1]


def test_a_table_describes_functions_of_a_held_out_file(prompts, held):
    for prompt in prompts["data"]:
        rows = rows_of(prompt)
        assert len(rows) == 10
        assert any(describes(rows, text) for text in held)


def test_free_text_breaks_off_within_a_file_and_not_at_a_function(prompts, held):
    for prompt in prompts["free"]:
        text = next(text for text in held if prompt in text)
        following = text[text.index(prompt) + len(prompt) :].lstrip(" ")
        near = (prompt.split("\n")[-1], following.split("\n")[1])
        assert all(line.strip() for line in near)
        assert not any(re.match(r"\s*(async |def |class |@)", line) for line in near)


def test_what_cannot_be_had_is_refused():
    with pytest.raises(outpace.OptionError, match=r"unknown load 'edits': did you mean 'edit'\?"):
        load_prompts("edits", 1)
    with pytest.raises(outpace.OptionError, match="choose from function, edit, data, free"):
        load_prompts("zzz", 1)
    with pytest.raises(outpace.OptionError, match="of load 'data', 100000 were asked for"):
        load_prompts("data", 100_000)
