"""Shapes of drafts: chains, trees, their masks and positions; how trees grow, which is best."""

from .dynamic import DynamicBuilder
from .growth import Block, Builder, Children, Grown, Growth
from .registry import TreeEntry, TreeLike, parse_tree, tree_entries
from .sequoia import Choice, Costs, best_tree, chances, choose, expected_tokens
from .static import SequoiaBuilder, StaticBuilder
from .times import PassTimes
from .topology import (
    MOST_NODES,
    ancestor_mask,
    block_mask,
    block_positions,
    chain,
    check_nodes,
    cut,
    from_ranks,
    k_ary,
    merged,
    paths_tree,
    ranks,
    to_ranks,
    tree_of,
    widths,
)

__all__ = [
    "MOST_NODES",
    "Block",
    "Builder",
    "Children",
    "Choice",
    "Costs",
    "DynamicBuilder",
    "Grown",
    "Growth",
    "PassTimes",
    "SequoiaBuilder",
    "StaticBuilder",
    "TreeEntry",
    "TreeLike",
    "ancestor_mask",
    "best_tree",
    "block_mask",
    "block_positions",
    "chain",
    "chances",
    "check_nodes",
    "choose",
    "cut",
    "expected_tokens",
    "from_ranks",
    "k_ary",
    "merged",
    "parse_tree",
    "paths_tree",
    "ranks",
    "to_ranks",
    "tree_entries",
    "tree_of",
    "widths",
]
