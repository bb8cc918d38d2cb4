"""Drafters, one file each, behind one contract."""

from .base import Commit, Context, Drafter, certain
from .blueprint import Blueprint, Checkpoint, Setting
from .cascade import CascadeDrafter
from .early_exit import EarlyExitDrafter
from .foreign import SLEMDrafter, TLIDrafter
from .lookahead import LookaheadDrafter
from .memory import Memory
from .model import ModelDrafter
from .ngram import NgramDrafter
from .quantized import QuantizedDrafter
from .recycling import RecyclingDrafter
from .registry import BUILT_IN, Entry, entries, parse
from .skip import SkipDrafter
from .suffix import SuffixDrafter

__all__ = [
    "BUILT_IN",
    "Blueprint",
    "CascadeDrafter",
    "Checkpoint",
    "Commit",
    "Context",
    "Drafter",
    "EarlyExitDrafter",
    "Entry",
    "LookaheadDrafter",
    "Memory",
    "ModelDrafter",
    "NgramDrafter",
    "QuantizedDrafter",
    "RecyclingDrafter",
    "SLEMDrafter",
    "Setting",
    "SkipDrafter",
    "SuffixDrafter",
    "TLIDrafter",
    "certain",
    "entries",
    "parse",
]
