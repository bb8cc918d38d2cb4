"""Control: who drafts in the next round, and how far."""

from .along import Along
from .controller import Controller
from .estimates import key_of
from .plan import LATE, Ask, Late, Pick, Profile, Spent, Told, kind_of, late
from .report import Report

__all__ = [
    "LATE",
    "Along",
    "Ask",
    "Controller",
    "Late",
    "Pick",
    "Profile",
    "Report",
    "Spent",
    "Told",
    "key_of",
    "kind_of",
    "late",
]
