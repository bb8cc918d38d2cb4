"""Shapes of drafts: chains, trees, their masks and positions."""

from .topology import ancestor_mask, block_mask, block_offsets, chain

__all__ = ["ancestor_mask", "block_mask", "block_offsets", "chain"]
