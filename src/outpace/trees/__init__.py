"""Shapes of drafts: chains, trees, their masks and positions."""

from .topology import ancestor_mask, block_mask, block_positions, chain, merged, tree_of

__all__ = ["ancestor_mask", "block_mask", "block_positions", "chain", "merged", "tree_of"]
