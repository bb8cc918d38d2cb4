"""The round, sequences and slots, statistics."""

from .engine import Engine
from .sequence import Sequence
from .stats import Stats

__all__ = ["Engine", "Sequence", "Stats"]
