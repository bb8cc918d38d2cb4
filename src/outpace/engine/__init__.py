"""The round, requests and slots, statistics."""

from .drafting import members_of, nothing
from .engine import Engine
from .request import Request
from .stats import Stats

__all__ = ["Engine", "Request", "Stats", "members_of", "nothing"]
