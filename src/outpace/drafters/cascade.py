"""A cascade: several drafters, of which each round takes the one that promises most.

A study of speculative decoding in production (arXiv 2601.11580) found that an
oracle which picks an n-gram or a model drafter per round is far ahead of either.
Here running estimates stand for the oracle. Drafters that cost nothing are asked
first, and what they propose is known when it is decided: of a proposal as long as
this, so many tokens were emitted per round, and such rounds took so long. A
drafter that runs a model is judged by its own rounds of the same kind, those in which
the others proposed as much: where they find a long match, a model is right more
often, too. The highest tokens per second win, sequence by sequence; who has not been
tried for long is tried again.

Which drafter is taken depends on measured times and on what was accepted of other
requests, so the rule must be one whose texts follow from target and seed alone. Of
these `coupled` accepts most of what is drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import IncompatibleError, OptionError
from ..models.base import LanguageModel, upload
from ..models.cache import SlotCache
from ..models.loading import Progress
from ..sampling import DraftNoise, Warp
from ..trees import Builder
from ..types import Draft, Independent, Law, Rows, Shape, Tree
from .base import Commit, Context, Drafter, together
from .blueprint import Blueprint, Setting

_WINDOW = 20
"""Rounds that a running mean is about."""

_HOPE = 2
"""Rounds that outweigh the hope that half of a proposal passes."""

_PATIENCE = 16
"""Rounds after which a drafter that was not taken is tried again."""

_PROMISING = 0.5
"""Of the best rate; who is estimated to be below is tried a quarter as often."""

_TRUST = 16
"""Rounds of its own that outweigh what a sequence begins with, other sequences' estimates."""

Kind = tuple[int, int]
"""A member, and the bit length of its proposal; if that is not known, of the longest there is."""


@dataclass(slots=True)
class _Mean:
    """A running mean that begins as the plain one."""

    value: float = 0.0
    count: int = 0

    def add(self, x: float) -> None:
        self.count += 1
        weight = max(1 / _WINDOW, 1 / self.count)
        self.value += weight * (x - self.value)


class CascadeDrafter(Drafter):
    """Takes in every round the drafter that promises most tokens per second.

    Each drafts up to its own K, or the engine's if that is less.

    Args:
        members: drafters; those without a model first.
        clock: tells the time in seconds.
    """

    rule = "coupled"
    instant = False
    remembers = True

    def __init__(
        self, members: Sequence[Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.members: Sequence[Drafter] = tuple(members)
        self._join()
        self.taps = tuple(sorted({tap for m in self.members for tap in m.taps}))
        self.tops = max(m.tops for m in self.members)
        self._clock = clock
        self._emitted: dict[Kind, _Mean] = {}  # tokens per round, of all sequences
        self._own: dict[int, dict[Kind, _Mean]] = {}  # of the one in a slot
        self._seconds: dict[Kind, _Mean] = {}  # per round
        self._lengths: dict[int, int] = {}  # of a context, when it was drafted for
        self._contexts: dict[int, Context] = {}
        self._taken: dict[int, tuple[Kind, Sequence[Kind]]] = {}  # and out of which
        self._idle: dict[int, dict[Kind, int]] = {}  # how often in a row it was not taken
        self._begun = 0.0
        self._spent: dict[int, float] = {}  # seconds of a member's draft in this round

    def _join(self) -> None:
        self.name, self.laws, self.proposes, self.k = _together(self.members)
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
        self.k = max(member.k for member in self.members)

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        for member in self.members:
            member.open(context, self._features(member, features))
        self._contexts[context.slot] = context
        self._own[context.slot] = {
            kind: _Mean(mean.value, min(mean.count, _TRUST)) for kind, mean in self._emitted.items()
        }
        self._idle[context.slot] = {}

    def close(self, slot: int) -> None:
        for member in self.members:
            member.close(slot)
        del self._contexts[slot], self._own[slot], self._idle[slot]
        self._taken.pop(slot, None)

    def forget(self) -> None:
        for member in self.members:
            member.forget()
        self._emitted.clear()
        self._seconds.clear()

    def _features(self, member: Drafter, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of all that are tapped those that a member wants."""
        if not features:
            return ()
        return tuple(features[self.taps.index(tap)] for tap in member.taps)

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        self._begun, self._spent = self._clock(), {}
        instant = {
            i: m.draft(contexts, [min(b, m.k) for b in budgets], warp, noise)
            for i, m in enumerate(self.members)
            if m.instant
        }
        chosen = [
            self._choose(c, {i: d.trees[b] for i, d in instant.items()}, budgets[b])
            for b, c in enumerate(contexts)
        ]
        parts: list[tuple[Draft, list[int]]] = []
        for i, member in enumerate(self.members):
            rows = [b for b, choice in enumerate(chosen) if choice and choice[0][0] == i]
            others = [c.slot for b, c in enumerate(contexts) if b not in rows]
            if i in instant:
                member.observe([Commit(slot, ()) for slot in others])
            if not rows:
                continue
            if i in instant:
                parts.append((_rows_of(instant[i], rows), rows))
                continue
            some = upload(torch.tensor(rows), warp.device)
            began = self._clock()
            part = member.draft(
                [contexts[b] for b in rows],
                [min(budgets[b], member.k) for b in rows],
                warp if len(rows) == len(contexts) else warp.select(rows),
                noise if noise is None or len(rows) == len(contexts) else noise.select(some),
            )
            self._spent[i] = self._clock() - began
            parts.append((part, rows))
        for context, choice in zip(contexts, chosen, strict=True):
            self._lengths[context.slot] = len(context.tokens)
            self._taken.pop(context.slot, None)
            if choice is not None:
                self._taken[context.slot] = choice
        return together(parts, len(contexts), warp.device)

    def _choose(
        self, context: Context, trees: dict[int, Tree], budget: int
    ) -> tuple[Kind, Sequence[Kind]] | None:
        """The member for a sequence, and out of which; who has nothing to propose is not asked."""
        if not budget:
            return None
        lengths = {i: max(tree.depths, default=0) for i, tree in trees.items()}
        longest = max(lengths.values(), default=0).bit_length()
        rates: dict[Kind, float] = {}
        for i, member in enumerate(self.members):
            kind = i, lengths[i].bit_length() if i in lengths else longest
            if length := lengths.get(i, min(budget, member.k)):
                rates[kind] = self._rate(context.slot, kind, length)
        if not rates:
            return None
        idle = self._idle[context.slot]
        best = max(rates, key=lambda kind: rates[kind])
        for kind in rates:
            patience = _PATIENCE if rates[kind] >= _PROMISING * rates[best] else 4 * _PATIENCE
            if idle.get(kind, 0) >= patience:
                best = kind
        return best, tuple(rates)

    def _rate(self, slot: int, kind: Kind, length: int) -> float:
        """Tokens per second; whoever is not known yet is tried."""
        seconds, emitted = self._seconds.get(kind), self._own[slot].get(kind)
        if seconds is None or emitted is None:
            return math.inf
        count = min(emitted.count, _WINDOW)
        tokens = (_HOPE * (1 + length / 2) + count * emitted.value) / (_HOPE + count)
        return tokens / seconds.value

    def observe(self, commits: Sequence[Commit]) -> None:
        shared = self._clock() - self._begun - sum(self._spent.values())
        told = [c for c in commits if c.slot in self._taken and c.block]
        for kind in {self._taken[c.slot][0] for c in told}:
            seconds = shared + self._spent.get(kind[0], 0.0)
            self._seconds.setdefault(kind, _Mean()).add(seconds)
        for commit in told:
            kind, others = self._taken.pop(commit.slot)
            emitted = len(self._contexts[commit.slot].tokens) - self._lengths[commit.slot]
            for means in (self._own[commit.slot], self._emitted):
                means.setdefault(kind, _Mean()).add(emitted)
            idle = self._idle[commit.slot]
            idle |= {other: idle.get(other, 0) + 1 for other in others} | {kind: 0}
        for member in self.members:
            member.observe(
                [
                    replace(c, features=self._features(member, c.features), top=_top(member, c))
                    for c in commits
                ]
            )


def _top(member: Drafter, commit: Commit) -> Tensor | None:
    """Of the target's likeliest tokens as many as a member wants."""
    return None if commit.top is None or not member.tops else commit.top[:, : member.tops]


def _rows_of(draft: Draft, rows: Sequence[int]) -> Draft:
    at = torch.tensor(rows, device=draft.tokens.device)
    return Draft(draft.tokens[at], draft.law, tuple(draft.trees[b] for b in rows))


def _together(
    members: Sequence[Blueprint],
) -> tuple[str, tuple[type[Law], ...], Shape, int]:
    """Name, laws, shapes and K of all."""
    if len(members) < 2:
        raise OptionError("a cascade needs two drafters at least: write A+B")
    drawn = [m.name for m in members if m.instant and Rows in m.laws]
    if drawn:
        raise IncompatibleError(
            f"{drawn[0]!r} draws tokens, and a cascade would look at them before it takes them: "
            "say that it is not instant"
        )
    laws = dict.fromkeys(law for m in members for law in m.laws)
    if Independent in laws:  # beside another's siblings they are but rows: see `together`
        laws[Rows] = None
    return (
        "+".join(m.name for m in members),
        tuple(laws),
        max(m.proposes for m in members),
        max(m.k for m in members),
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

    rule = CascadeDrafter.rule
    instant = CascadeDrafter.instant
    remembers = CascadeDrafter.remembers

    def __init__(self, members: Sequence[Blueprint]) -> None:
        self._members = members
        self.name, self.laws, self.proposes, self.k = _together(members)

    def branch(self, builder: Builder) -> None:
        _branch(self._members, builder)
        self.name, self.laws, self.proposes, self.k = _together(self._members)

    def check(self, setting: Setting) -> Sequence[str]:
        return _remarks(self._members, setting)

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        return CascadeDrafter([member.build(target, progress) for member in self._members])
