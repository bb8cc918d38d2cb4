"""The round, requests and slots, statistics."""

from .engine import Engine
from .request import Request
from .stats import Stats

__all__ = ["Engine", "Request", "Stats"]
