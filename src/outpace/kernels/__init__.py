"""Compiled kernels: the sources, how they are compiled, and calls of the small ones."""

from .arena import Arena
from .compiler import SOURCES, load_library
from .rows import draw, loaded, softmax, verify

__all__ = ["SOURCES", "Arena", "draw", "load_library", "loaded", "softmax", "verify"]
