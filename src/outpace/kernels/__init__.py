"""Compiled kernels: how they are compiled, room for weights, and calls of the small ones."""

from .arena import Arena
from .compiler import SOURCES, load_library
from .rows import Filters, Rule, children, draw, loaded, race, verify, warp

__all__ = [
    "SOURCES",
    "Arena",
    "Filters",
    "Rule",
    "children",
    "draw",
    "load_library",
    "loaded",
    "race",
    "verify",
    "warp",
]
