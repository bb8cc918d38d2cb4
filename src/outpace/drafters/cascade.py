"""A cascade: several drafters, of which each round takes the one that promises most.

A study of speculative decoding in production (arXiv 2601.11580) found that an
oracle which picks an n-gram or a model drafter per round is far ahead of either.
Here the engine's controller stands for the oracle: it chooses among the members for every
sequence and round, and how far they draft (`outpace.engine.control`).

Which one it is depends on measured times and on what was accepted of other requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import IncompatibleError, OptionError
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..models.loading import Progress
from ..trees import Builder
from ..types import Independent, Law, Rows, Shape
from .base import Drafter, check_looked_at
from .blueprint import Blueprint, Setting


class CascadeDrafter(Drafter):
    """Several drafters. Where no K is asked for, each has its own.

    Args:
        members: drafters; of equally good ones the first is taken.
    """

    instant = False
    remembers = True

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members: Sequence[Drafter] = tuple(members)
        self._join()
        self.taps = tuple(sorted({tap for m in self.members for tap in m.taps}))
        self.tops = max(m.tops for m in self.members)

    def _join(self) -> None:
        self.name, self.laws, self.proposes, self.k, self.rule = _together(self.members)
        self.most = max(m.most for m in self.members)
        self.draws = max(m.draws for m in self.members)

    def check(self, setting: Setting) -> Sequence[str]:
        return _remarks(self.members, setting)

    def branch(self, builder: Builder) -> None:
        _branch(self.members, builder)
        self._join()

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        self.members = tuple(member.build(target, progress) for member in self.members)
        return self

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        for member in self.members:
            member.start(target, cache)
        self._join()

    def forget(self) -> None:
        for member in self.members:
            member.forget()


def _together(
    members: Sequence[Blueprint],
) -> tuple[str, tuple[type[Law], ...], Shape, int, str]:
    """Name, laws, shapes, K and rule of all."""
    if len(members) < 2:
        raise OptionError("a cascade needs two drafters at least: write A+B")
    for member in members:
        check_looked_at(member)
    laws = dict.fromkeys(law for m in members for law in m.laws)
    if Independent in laws:  # beside another's siblings they are but rows: see `together`
        laws[Rows] = None
    return (
        "+".join(m.name for m in members),
        tuple(laws),
        max(m.proposes for m in members),
        max(m.k for m in members),
        next((m.rule for m in members if Rows in m.laws), members[0].rule),
    )


def _branch(members: Sequence[Blueprint], builder: Builder) -> None:
    """Those that can draft such trees.

    Raises:
        IncompatibleError: none can.
    """
    refusals = []
    for member in members:
        try:
            member.branch(builder)
        except IncompatibleError as error:
            refusals.append(error)
    if len(refusals) == len(members):
        raise refusals[-1]


def _remarks(members: Sequence[Blueprint], setting: Setting) -> list[str]:
    return [remark for member in members for remark in member.check(setting)]


class Cascade:
    """A cascade to be; see `Blueprint`."""

    instant = CascadeDrafter.instant
    remembers = CascadeDrafter.remembers

    def __init__(self, members: Sequence[Blueprint]) -> None:
        self._members = members
        self.name, self.laws, self.proposes, self.k, self.rule = _together(members)

    def branch(self, builder: Builder) -> None:
        _branch(self._members, builder)
        self.name, self.laws, self.proposes, self.k, self.rule = _together(self._members)

    def check(self, setting: Setting) -> Sequence[str]:
        return _remarks(self._members, setting)

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        return CascadeDrafter([member.build(target, progress) for member in self._members])
