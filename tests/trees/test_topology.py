"""Trees by recipe: their parents by hand, and what every one of them keeps to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growing import rank_paths, trees
from outpace.errors import OptionError
from outpace.trees import (
    MOST_NODES,
    chain,
    cut,
    from_ranks,
    k_ary,
    paths_tree,
    ranks,
    to_ranks,
    widths,
)
from outpace.types import Shape, Tree


def assert_level_ordered(tree: Tree) -> None:
    """Level by level, a parent's children side by side, parents in order."""
    paths = rank_paths(tree)
    assert paths == sorted(paths, key=lambda path: (len(path), path))


def test_k_ary_by_hand():
    tree = k_ary([4, 2, 1])
    assert tree.parents == (-1, -1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert widths(tree) == (4, 8, 8)


def test_paths_by_hand():
    tree = paths_tree(3, 2)
    assert tree.parents == (-1, -1, -1, 0, 1, 2)
    assert tree.shape is Shape.PATHS


@pytest.mark.parametrize("tree", [k_ary([1, 1, 1]), paths_tree(1, 3), from_ranks([[0, 0, 0]])])
def test_without_branches_they_are_the_chain(tree):
    assert tree is chain(3)


@pytest.mark.parametrize("tree", [k_ary([]), paths_tree(3, 0), from_ranks([]), cut(chain(3), 0)])
def test_no_nodes_are_the_empty_chain(tree):
    assert tree is chain(0)
    assert ranks(tree) == widths(tree) == ()


def test_from_ranks_by_hand():
    tree = from_ranks([[1], [0, 0], [0], [0, 1, 0]])
    assert tree.parents == (-1, -1, 0, 0, 3)  # [0] [1] [0,0] [0,1] [0,1,0]
    assert ranks(tree) == (0, 1, 0, 1, 0)
    assert from_ranks([[1], [0, 1, 0], [0, 0]]) == tree


@given(st.lists(st.integers(1, 4), max_size=4))
def test_k_ary_is_every_path_of_its_ranks(given_widths):
    paths: list[tuple[int, ...]] = [()]
    every = []
    for width in given_widths:
        paths = [(*path, rank) for path in paths for rank in range(width)]
        every += paths
    tree = k_ary(given_widths)
    assert rank_paths(tree) == every
    assert_level_ordered(tree)


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 7))
def test_paths_are_cut_by_taking_the_first_nodes(count, length, depth):
    tree = paths_tree(count, length)
    assert rank_paths(tree) == [(i, *[0] * d) for d in range(length) for i in range(count)]
    assert cut(tree, depth) == paths_tree(count, min(length, depth))


@given(trees())
def test_ranks_on_the_way_make_the_tree_anew_level_by_level(tree):
    paths = rank_paths(tree)
    assert ranks(tree) == tuple(path[-1] for path in paths)
    again = from_ranks(paths)
    assert_level_ordered(again)
    assert sorted(rank_paths(again)) == sorted(paths)
    assert widths(tree) == widths(again)
    assert sum(widths(tree)) == len(tree)


@given(trees(), st.integers(0, 6))
def test_cut_keeps_the_nodes_that_are_no_deeper(tree, depth):
    kept = [path for path in rank_paths(tree) if len(path) <= depth]
    assert rank_paths(cut(tree, depth)) == kept
    ordered = from_ranks(rank_paths(tree))
    assert cut(ordered, depth).parents == ordered.parents[: len(kept)]


def test_a_tree_out_of_order_is_found():
    for parents in [(-1, 0, -1), (-1, -1, 1, 0)]:
        with pytest.raises(AssertionError):
            assert_level_ordered(Tree(parents))


@given(trees())
def test_a_tree_by_hand_is_written_as_it_is_read(tree):
    """Numbered level by level, as trees by hand are."""
    written = to_ranks(tree)
    assert sorted(rank_paths(from_ranks(written))) == sorted(rank_paths(tree))
    assert to_ranks(from_ranks(written)) == sorted(written, key=lambda way: (len(way), way))


def test_cut_is_remembered():
    assert cut(k_ary([3, 2]), 1) is cut(k_ary([3, 2]), 1)
    assert cut(k_ary([3, 2]), 2) == k_ary([3, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: k_ary([2, 0]), "a width of a tree must be a whole number >= 1, not 0"),
        (lambda: k_ary("42"), "a width of a tree must be a whole number"),
        (lambda: k_ary([2.5]), "a width of a tree must be a whole number"),
        (lambda: k_ary([8, 8, 8]), r"8,8,8 has 584 nodes .* 512 at most: lower or leave out"),
        (lambda: k_ary([10**9] * 10**3), "1000000000 nodes"),
        (lambda: paths_tree(0, 5), "count must be a whole number >= 1"),
        (lambda: paths_tree(2, -1), "length must be a whole number >= 0"),
        (lambda: paths_tree(103, 5), r"103 paths of 5 tokens has 515 nodes"),
        (lambda: from_ranks([[0], []]), "an empty path is the root"),
        (lambda: from_ranks([[0, -1]]), "a rank must be a whole number >= 0"),
        (lambda: from_ranks([[0], [0, 1]]), r"there is \[0, 1\] but not \[0, 0\] before it: add"),
        (lambda: from_ranks([[2], [0]]), r"there is \[2\] but not \[1\] before it: add"),
        (lambda: from_ranks([[0] * 513]), "513 nodes"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_as_many_nodes_as_a_pass_takes():
    assert len(paths_tree(1, MOST_NODES)) == len(k_ary([MOST_NODES])) == MOST_NODES
