"""Trees by one string: what is meant, what is refused and what is said then, and by which rule."""

from __future__ import annotations

import json
import re

import pytest

import outpace
from outpace import OptionError
from outpace.assembly import Assembly
from outpace.drafters import CascadeDrafter, ModelDrafter, NgramDrafter
from outpace.engine import Engine
from outpace.models import MarkovModel
from outpace.trees import (
    DynamicBuilder,
    SequoiaBuilder,
    StaticBuilder,
    chain,
    from_ranks,
    k_ary,
    parse_tree,
    paths_tree,
    tree_entries,
)
from outpace.types import Shape
from outpace.verifiers import make_verifier

HAND = [[0], [0, 0], [1]]
SHAPES = {
    "4x2x1": k_ary([4, 2, 1]),
    "widths:3": k_ary([3]),
    "widths:3x2": k_ary([3, 2]),
    "chain:5": chain(5),
    "chains:3,2": paths_tree(3, 2),
    "chains:length=2,count=3": paths_tree(3, 2),
    "[[0],[0,0],[1]]": from_ranks(HAND),
    "  [[1], [0, 0]] ": from_ranks(HAND),
}


@pytest.mark.parametrize("text", SHAPES)
def test_a_string_stands_for_a_shape(text):
    builder = parse_tree(text)
    assert isinstance(builder, StaticBuilder)
    assert (builder.tree, builder.draw, builder.weighs) == (SHAPES[text], "without", False)
    assert (builder.nodes, builder.shape) == (len(SHAPES[text]), SHAPES[text].shape)


def test_a_shape_may_be_given_as_it_is(tmp_path):
    tree = from_ranks(HAND)
    for given in (tree, HAND, tuple(map(tuple, HAND))):
        assert parse_tree(given).tree == tree
    own = DynamicBuilder(5, 2)
    assert parse_tree(own) is own
    for number, written in enumerate((HAND, {"paths": HAND})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(written))
        assert parse_tree(path).tree == parse_tree(str(path)).tree == tree
    bare = tmp_path / "ranks"
    bare.write_text(json.dumps(HAND))
    assert parse_tree(str(bare)).tree == tree


@pytest.mark.parametrize(
    ("text", "draw"),
    [
        ("4x2", "top"),
        ("4x2:draw=with", "with"),
        ("4x2:with", "with"),
        ("chains:2,3", "top"),
        ("chains:2,3,without", "without"),
        ("chains:2,draw=with,length=3", "with"),
        ("[[0]]", "top"),
        ("sequoia:8", "top"),
        ("sequoia:8,draw=without", "without"),
        ("dynamic:8", "top"),
    ],
)
def test_how_children_come_about_may_be_said(text, draw):
    """By position or by name; else it is as the rule likes it best."""
    assert parse_tree(text, "top").draw == draw


def test_trees_that_are_not_known_before():
    dynamic = parse_tree("dynamic:12,3,width=2")
    assert isinstance(dynamic, DynamicBuilder)
    assert (dynamic.nodes, dynamic.depth, dynamic.shape) == (12, 3, Shape.TREE)
    sequoia = parse_tree("sequoia:12,depth=4,temperature=0.5")
    assert isinstance(sequoia, SequoiaBuilder)
    assert (sequoia.nodes, sequoia.depth, sequoia.temperature) == (12, 4, 0.5)
    assert parse_tree("sequoia").nodes == SequoiaBuilder.most
    assert parse_tree("opt:gain=0").weighs


def test_every_tree_is_listed_as_it_is_written():
    for entry in tree_entries():
        assert entry.summary.endswith(".")
        name = entry.usage.partition(":")[0]
        usage = {"chain": "chain:3", "chains": "chains:2,3", "sequoia": "sequoia"}
        parse_tree(usage.get(name, entry.usage))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamc:8", "did you mean 'dynamic'?"),
        ("nothing-like-it", "known are chain, chains"),
        ("", "there is no tree ''"),
        ("4", "widths like '4x2x1'"),
        ("4x", "widths like '4x2x1'"),
        ("x" * 5000, "there is no tree"),
        ("4x0", "a width of a tree must be a whole number >= 1"),
        ("9x9x9", "819 nodes or more, and a pass takes 512 at most"),
        ("99999999999x2", "512 at most"),
        ("widths:abc", "widths are numbers like '4x2x1', not 'abc'"),
        ("4x2:depth=3", "has no option 'depth': it has widths, draw"),
        ("4x2:draw=sideways", "must be one of top, without, with, not 'sideways'"),
        ("4x2:with,draw=top", "draw is given twice"),
        ("chains:2,2,maybe", "must be one of top, without, with, not 'maybe'"),
        ("chains:2", "needs length: write 'chains:length'"),
        ("chains:100,100", "100 paths of 100 tokens"),
        ("chain:0", "length must be a whole number >= 1"),
        ("chain:x", "length of the tree 'chain' must be a whole number, not 'x'"),
        ("dynamic:0", "nodes must be a whole number >= 1"),
        ("dynamic:513", "nodes=513 is more than a pass takes: at most 512"),
        ("dynamic:branchs=2", "no option 'branchs': it has nodes, depth, width, branches"),
        ("dynamic:draw=with", "no option 'draw'"),
        ("dynamic:1,2,3,4,5", "takes 4 values at most"),
        ("opt:gain=-1", "gain must be a number >= 0, not -1"),
        ("opt:gain=nan", "gain must be a number >= 0"),
        ("sequoia:temperature=0", "temperature must be a number > 0"),
        ("sequoia:nodes=600", "at most 512"),
        ("nowhere.json", "cannot read the tree in nowhere.json (No such file or directory): check"),
        ("[", "the tree is not JSON"),
        ("[" * 100_000, "the tree is not JSON"),
        ("[1, 2]", "is no list of paths of ranks: give one like [[0], [0, 0], [1]]"),
        ('["0"]', "not made of whole numbers"),
        ("[[0.5]]", "a rank must be a whole number >= 0"),
        ("[[true]]", "a rank must be a whole number >= 0"),
        ("[[0], [2]]", "there is [2] but not [1] before it: add that"),
        ("[[0], []]", "an empty path is the root"),
        ("[]", "the tree has no nodes"),
        (f"[{[0] * 600}]", "600 nodes or more, and a pass takes 512 at most"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        parse_tree(text)


@pytest.mark.parametrize("given", [5, {}, [0, 1], [["a"]], [None]])
def test_what_is_no_tree_at_all_is_refused(given):
    with pytest.raises(OptionError, match=r"\[\[0\], \[0, 0\], \[1\]\]|paths of ranks"):
        parse_tree(given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"5", "is no list of paths"),
        (b"null", "is no list of paths"),
        (b'{"tree": [[0]]}', "is no list of paths"),
        (b"[[0]", "is not JSON"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "tree.json"
    path.write_bytes(content)
    for given in (path, str(path)):
        with pytest.raises(OptionError, match=message) as caught:
            parse_tree(given)
        assert str(path) in str(caught.value)
    with pytest.raises(OptionError, match="cannot read the tree"):
        parse_tree(tmp_path)


# --- with drafters and rules -----------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr("outpace.assembly.load_model", lambda *a, **b: pytest.fail("were read"))


def paths(pair) -> tuple[str, str]:
    return str(pair / "target"), str(pair / "draft")


@pytest.mark.parametrize(
    ("tree", "drafter", "verifier", "message"),
    [
        ("4x2", None, None, "a tree is for a drafter, and there is none: give one, or no tree"),
        ("4x2", "ngram", None, "the drafter 'ngram' takes no tree"),
        ("4x2", "slem:DRAFT", None, "takes no tree: that is for drafters that run a model"),
        ("4x2", "suffix+ngram", None, "takes no tree"),
        ("4x2", "DRAFT", "block", "proposes trees and the verifier 'block' takes chains only"),
        ("4x2", "DRAFT", "multipath", "takes paths of one length only"),
        ("4x2:draw=top", "DRAFT", "multipath", "takes paths of one length only"),
        ("4x2:draw=without", "DRAFT", "kseq", r"'kseq' is not exact for drafts .* \(Rows\)"),
        ("chains:2,2,without", "DRAFT", "multipath", r"'multipath' is not exact .* \(Rows\)"),
        ("chains:2,2,with", "DRAFT", "coupled", "race with the same noise"),
        ("dynamic", "DRAFT", "block", "takes chains only"),
        ("sequoia", "DRAFT", "multipath", "takes paths of one length only"),
        ("sequoia", "ngram+DRAFT", None, "is measured for one drafter, and ngram"),
        ("dynamc", "DRAFT", None, "did you mean 'dynamic'?"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    pair, no_weights, tree, drafter, verifier, message
):
    target, draft = paths(pair)
    name = drafter and drafter.replace("DRAFT", draft)
    with pytest.raises(outpace.OutpaceError, match=message):
        outpace.load(target, name, tree=tree, verifier=verifier)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree", "4x2", "--drafter", "none"], "a tree is for a drafter, and there is none"),
        (["--tree", "4x2", "--drafter", "ngram"], "the drafter 'ngram' takes no tree"),
        (["--tree", "[[1]]", "--drafter", "DRAFT"], "there is [1] but not [0] before it"),
        (["--tree", "4x2", "--drafter", "DRAFT", "--verifier", "block"], "takes chains only"),
    ],
)
def test_a_command_says_so_in_one_line(pair, refused, no_weights, options, message):
    target, draft = paths(pair)
    given = [draft if o == "DRAFT" else o for o in options]
    refused(["generate", "x", "--model", target, *given], message)


@pytest.mark.parametrize(
    ("tree", "verifier", "draw", "rule"),
    [
        ("4x2", None, "without", "traversal"),
        ("4x2", "token", "without", "token"),
        ("4x2", "traversal", "without", "traversal"),
        ("4x2", "match", "top", "match"),
        ("4x2", "greedy", "top", "greedy"),
        ("4x2", "coupled", "without", "coupled"),
        ("chains:2,2", "kseq", "with", "kseq"),
        ("chains:2,2", "multipath", "with", "multipath"),
        ("chains:2,2,with", None, "with", "traversal"),
        ("chain:3", None, "without", "token"),
        ("4x2:draw=top", None, "top", "match"),
        ("4x2:draw=without", "match", "without", "match"),
        ("dynamic:6", None, "top", "match"),
        ("dynamic:6", "token", "top", "token"),
    ],
)
def test_children_come_about_as_suits_the_rule(pair, tree, verifier, draw, rule):
    target, draft = paths(pair)
    assembly = Assembly(target, draft, tree=tree, verifier=verifier)
    assert assembly._tree.draw == draw
    assert assembly.verifier.name == rule


def test_room_to_measure_sequoias_tree_is_looked_for_before_weights_are_read(pair):
    target, draft = paths(pair)
    with pytest.raises(outpace.ContextLengthError, match="of depth 8 is measured on texts of more"):
        Assembly(target, draft, tree="sequoia:6", max_len=12)
    Assembly(target, draft, 0, tree="sequoia:6", max_len=12)  # nothing is drafted
    Assembly(target, draft, tree="sequoia:6,depth=3", max_len=12)


def test_k_is_the_depth_and_may_be_less(pair):
    target, draft = paths(pair)
    for k, depth in ((None, 3), (2, 2), (9, 3)):
        generator = outpace.load(target, draft, k, tree="2x2x1", dtype="float32")
        result = generator.generate("for i", max_new_tokens=12, eos_token_ids=())
        assert generator.engine.drafter.builder.depth == 3
        steps = result.stats.draft_steps / result.stats.drafted_rounds
        assert depth - 1 < steps <= depth


def test_a_cascade_draws_its_trees_with_noise_for_every_node():
    """Given before or after it is put together."""
    target, near = (MarkovModel.random(4, 2, seed) for seed in (0, 1))
    late = CascadeDrafter([NgramDrafter(1), ModelDrafter(near)])
    late.branch(parse_tree("3x2"))
    early = CascadeDrafter([NgramDrafter(1), ModelDrafter(near, tree=parse_tree("3x2"))])
    for cascade in (late, early):
        assert (cascade.draws, cascade.proposes) == (9, Shape.TREE)
        Engine(target, cascade, None, make_verifier("match"))
