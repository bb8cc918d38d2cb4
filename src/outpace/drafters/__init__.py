"""Drafters, one file each, behind one contract."""

from .base import Commit, Context, Drafter
from .model import ModelDrafter

__all__ = ["Commit", "Context", "Drafter", "ModelDrafter"]
