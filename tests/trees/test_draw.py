"""Drawings of trees: text to the letter, where nodes stand, and files that are written."""

from __future__ import annotations

import builtins
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from outpace.errors import OptionError
from outpace.trees import chain, chances, from_ranks, k_ary, paths_tree
from outpace.trees.draw import picture, places, summary, text
from outpace.types import Tree

SMALL = from_ranks([[0, 0], [0, 1, 0], [1]])  # [0] [1] [0,0] [0,1] [0,1,0]


def test_text_of_ranks():
    assert text(SMALL) == "\n".join(
        [
            "root",
            "├── 0",
            "│   ├── 0",
            "│   └── 1",
            "│       └── 0",
            "└── 1",
        ]
    )


def test_text_of_labels_and_weights():
    drawn = text(from_ranks([[0, 0], [1]]), ["the", "\n", " "], [0.5, 0.25, 0.01234])
    assert drawn == "\n".join(
        [
            "root",
            "├── the (0.5)",
            "│   └── ' ' (0.0123)",
            "└── '\\n' (0.25)",
        ]
    )


def test_text_of_a_tree_in_any_order():
    assert text(Tree((-1, 0, -1, 0)), list("abcd")) == "\n".join(
        ["root", "├── a", "│   ├── b", "│   └── d", "└── c"]
    )


def test_text_of_long_chains_and_of_nothing():
    assert text(chain(0)) == "root"
    lines = text(chain(512)).split("\n")
    assert lines[-1] == "    " * 511 + "└── 0"


def test_summary():
    assert summary(k_ary([4, 2, 1])) == "20 nodes, depth 3, widths 4 8 8"
    assert summary(chain(1)) == "1 node, depth 1, widths 1"
    assert summary(chain(0)) == "no nodes"


def test_places_by_hand():
    assert places(SMALL) == [(1.25, 0), (0.5, 1), (2, 1), (0, 2), (1, 2), (1, 3)]
    assert places(chain(2)) == [(0, 0), (0, 1), (0, 2)]
    assert places(chain(0)) == [(0, 0)]


@given(st.data())
def test_places_keep_apart_and_in_order(data):
    count = data.draw(st.integers(0, 12))
    tree = Tree(tuple(data.draw(st.integers(-1, node - 1)) for node in range(count)))
    at = places(tree)
    leaves = sorted(x for i, (x, _) in enumerate(at) if i - 1 not in tree.parents)
    assert leaves == list(range(len(leaves)))
    for level in set(tree.depths):
        across = sorted(x for x, depth in at if depth == level)
        assert all(b - a >= 1 for a, b in itertools.pairwise(across))
    for node in range(-1, count):
        below = [at[i + 1][0] for i, p in enumerate(tree.parents) if p == node]
        assert below == sorted(below)
        if below:
            assert at[node + 1][0] == (below[0] + below[-1]) / 2


TREES = [chain(0), chain(5), k_ary([4, 2, 1]), paths_tree(8, 5)]


@pytest.mark.parametrize("tree", TREES, ids=summary)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_picture_is_written(tree, weighted, tmp_path):
    weights = chances(tree, [[0.4] + [0.05] * 7]) if weighted else None
    path = tmp_path / "tree.png"
    picture(tree, path, weights=weights, title="a tree")
    shown = image.imread(path)
    assert min(shown.shape[:2]) > 50
    assert shown[..., :3].min() < 0.3 < shown[..., :3].max()


def test_a_picture_says_labels_weights_and_levels(tmp_path):
    path = tmp_path / "tree.svg"
    with_text = {
        "labels": ["the", "<a>", "\n", "$\\frac$", "x"],
        "weights": [0.5, 0.25, 0, 0.1, 0.05],
    }
    picture(SMALL, str(path), title="a small tree", **with_text)
    drawn = path.read_text()
    for comment in (
        "a small tree",
        "root",
        "the",
        "0.25",
        "$\\frac$",
        "depth 3",
        "2 nodes",
        "1 node",
    ):
        assert f"<!-- {comment} -->" in drawn


def test_a_wide_tree_is_drawn_without_letters(tmp_path):
    path = tmp_path / "tree.svg"
    picture(k_ary([512]), path)
    assert "<!-- 511 -->" not in path.read_text()
    assert "<!-- 512 nodes -->" in path.read_text()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tree.jepg", "cannot write tree.jepg: a plot's suffix is one of"),
        ("tree", "a plot's suffix is one of"),
        ("none/tree.png", "there is no such folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused(file, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        picture(SMALL, tmp_path / file)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_that_name_is_named(tmp_path):
    (tmp_path / "tree.png").mkdir()
    with pytest.raises(OptionError, match="cannot write the plot to"):
        picture(SMALL, tmp_path / "tree.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    found = builtins.__import__

    def lacking(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(OptionError, match=r"needs matplotlib: pip install 'outpace\[audit\]'"):
        picture(SMALL, tmp_path / "tree.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": ["a"]}, "1 labels for a tree of 5 nodes: give one per node"),
        ({"weights": [0.5] * 6}, "6 weights for a tree of 5 nodes: give one per node"),
    ],
)
def test_as_many_labels_and_weights_as_nodes(options, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        text(SMALL, **options)
    with pytest.raises(OptionError, match=message):
        picture(SMALL, tmp_path / "tree.png", **options)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_weights_that_cannot_be_shown_are_refused(wrong, tmp_path):
    with pytest.raises(OptionError, match="weights must be numbers from 0"):
        picture(SMALL, tmp_path / "tree.png", weights=[0.5, 0.1, 0.1, wrong, 0.1])


def test_weights_of_zero_can_be_shown(tmp_path):
    picture(SMALL, tmp_path / "tree.png", weights=np.zeros(5))
    assert (tmp_path / "tree.png").exists()
