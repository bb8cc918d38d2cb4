"""Compiled kernels: how they are compiled, room for weights, and calls of the small ones."""

from .arena import Arena
from .compiler import SOURCES, load_library
from .rows import draw, loaded, race, softmax, verify

__all__ = ["SOURCES", "Arena", "draw", "load_library", "loaded", "race", "softmax", "verify"]
