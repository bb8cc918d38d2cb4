"""Shapes of drafts: chains, trees, their masks and positions, and how trees grow."""

from .dynamic import DynamicBuilder
from .growth import Block, Builder, Children, Grown, Growth
from .registry import TreeEntry, TreeLike, parse_tree, tree_entries
from .static import StaticBuilder
from .topology import ancestor_mask, block_mask, block_positions, chain, merged, tree_of

__all__ = [
    "Block",
    "Builder",
    "Children",
    "DynamicBuilder",
    "Grown",
    "Growth",
    "StaticBuilder",
    "TreeEntry",
    "TreeLike",
    "ancestor_mask",
    "block_mask",
    "block_positions",
    "chain",
    "merged",
    "parse_tree",
    "tree_entries",
    "tree_of",
]
