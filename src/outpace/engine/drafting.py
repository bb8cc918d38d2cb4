"""The drafting half of a round: who drafts for whom and how far, and what became of it.

A controller chooses among the members of the engine's drafter; where there is but one of a
fixed K, it always drafts. A member is told of the rounds that it drafted in (one that looks at
the target's features of all): the rest it reads when it drafts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafters.base import Commit, Context, Drafter, together
from ..models.base import upload
from ..sampling import DraftNoise, Warp
from ..trees import chain, cut
from ..types import Draft, PointMass, Tree
from .clock import Clock
from .control import (
    LATE,
    Along,
    Ask,
    Controller,
    Late,
    Pick,
    Profile,
    Spent,
    Told,
    key_of,
    kind_of,
    late,
)

CHOOSE, DRAFT = "choose", "draft"
"""Laps of a round."""


class Lap(NamedTuple):
    """One of a member, that has looked or has read so many tokens."""

    member: int
    read: int = 0


DrawNoise = Callable[[int], DraftNoise | None]
"""What drafts of so many nodes are drawn with."""


@dataclass(slots=True)
class _Proposal:
    """What a drafter without a model proposed, compared with the text as far as there is any."""

    member: int
    tokens: Sequence[int]
    tree: Tree
    start: int  # the length of the context it was made for
    node: int = -1
    depth: int = 0

    def judged(self, text: Sequence[int]) -> int | None:
        """How many depths the text has judged; None as long as it goes where it was proposed."""
        end = min(self.start + self.tree.depth, len(text))
        if self.tree.is_chain:
            at = self.start + self.depth
            while at < end and text[at] == self.tokens[self.depth]:
                self.depth, at = self.depth + 1, at + 1
            if at < end:
                return self.depth + 1
        else:
            for token in text[self.start + self.depth : end]:
                below = [c for c, p in enumerate(self.tree.parents) if p == self.node]
                node = next((c for c in below if self.tokens[c] == token), None)
                if node is None:
                    return self.depth + bool(below)
                self.node, self.depth = node, self.depth + 1
        return self.depth if self.depth == self.tree.depth else None


@dataclass(slots=True)
class _Slot:
    """A sequence.

    Attributes:
        read: of each member that has opened it, how long the text was that it drafted for.
    """

    context: Context
    read: dict[int, int]
    proposals: list[_Proposal]


class Drafting:
    """The members of a drafter at work.

    Args:
        controller: chooses; without one the only member always drafts.
    """

    def __init__(self, drafter: Drafter, controller: Controller | None) -> None:
        self.members = members_of(drafter)
        self.controller = controller
        self._models = [(m, member) for m, member in enumerate(self.members) if not member.instant]
        self._drafter = drafter
        self._slots: dict[int, _Slot] = {}
        self._picks: Sequence[Pick | None] = []
        self._drafted: set[tuple[int, int]] = set()  # members and slots, in this round
        self._late: set[int] = set()  # of those looked at, who had much to read before
        self._ran = False  # whether one with a model has drafted
        self._comparing = 0  # proposals that the text has not judged yet
        # seconds behind a round that are no part of it by the engine's clock: what was told of the
        # last one, and of texts that have ended since
        self._telling = self._each = self._closing = 0.0
        self.rests = False
        """Whether in this round nobody drafts, nor is told anything but what it took."""
        self._counts = True  # that, for the controller
        # while the controller rests: of how many sequences rounds are, how many of those that
        # follow it need not be asked about, and what those took that it has not been told of
        self._resting = self._unasked = 0
        self._rested: list[float] = []
        # while a model drafts as was chosen: rounds that it need not be asked about either, how far
        # this one has drafted, and what came of that: depths that were judged, those of them that
        # passed, and tokens
        self._along: Along | None = None
        self._far, self._came = 0, (0, 0, 0)

    # --- sequences ---------------------------------------------------------------

    def open(self, context: Context, features: tuple[Tensor, ...], temperature: float) -> None:
        """A sequence begins. Who runs a model reads it when it is to draft."""
        self._tell()
        slot = self._slots[context.slot] = _Slot(context, {}, [])
        if self.controller is not None:
            self.controller.open(context.slot, key_of(temperature))
        for m, member in enumerate(self.members):
            if self.controller is None or member.taps:
                member.open(context, self._features(member, features))
                slot.read[m] = len(context.tokens)

    def close(self, slot: int) -> None:
        began = time.perf_counter()
        self._tell()
        if self.controller is not None:
            self.controller.close(slot)
        if slot in self._slots:  # its prompt was read
            closed = self._slots.pop(slot)
            self._comparing -= len(closed.proposals)
            for m in closed.read:
                self.members[m].close(slot)
        self._closing += time.perf_counter() - began

    # --- a round ------------------------------------------------------------------

    def rest(self, batch: int) -> bool:
        """Begin a round; whether nobody drafts in it, nor is told anything but what it took."""
        if self._along is not None:
            return False
        if self._unasked and batch == self._resting:
            self._unasked -= 1
            return True
        self._tell()
        self._compare(self._slots)
        c = self.controller
        self.rests, self._counts = c is not None and c.rests(batch), True
        if self.rests:
            assert c is not None
            self._resting, self._unasked = batch, c.rests_on(self._comparing > 0)
            self._drafted.clear()
        return self.rests

    def _tell(self, once: bool = False) -> None:
        """Tell the controller of rounds that it was not asked about; it is about the next one.

        Args:
            once: as of `spent`, of the last one in which it rests.
        """
        self._unasked = 0
        along, self._along = self._along, None
        if along is not None and along.went:
            assert self.controller is not None
            began = time.perf_counter()
            self.controller.went(along)
            slot = self._slots[along.slot]
            slot.read[along.choice.member] = len(slot.context.tokens)
            self._telling = self._each = (time.perf_counter() - began) / len(along.went)
        if self._rested:
            assert self.controller is not None
            self.controller.rested(*self._rested, once=once)
            self._rested = []

    def stand_by(self) -> None:
        """Begin a round of requests none of which is to be drafted for: the controller has no part
        in it either."""
        self._tell()
        self.rests, self._counts = True, False
        self._drafted.clear()

    def sit_out(self, batch: int) -> None:
        """Nobody drafts in this round."""
        self._tell()
        self._begin(batch)
        if self.controller is not None:
            self.controller.sits_out()

    def _begin(self, batch: int) -> None:
        self._drafted.clear()
        self._picks, self._late, self._ran = [None] * batch, set(), False

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        left: Sequence[int],
        warp: Warp,
        noise: DrawNoise,
        clock: Clock,
        crowded: bool = False,
    ) -> Draft:
        """What is proposed for these sequences.

        Args:
            budgets: the longest path worth drafting for each.
            left: tokens that each may still emit.
            crowded: whether others wait for a place.
        """
        if self.controller is None:
            self._begin(len(contexts))
            self._drafted = {(0, c.slot) for c in contexts}
            draft = self.members[0].draft(contexts, budgets, warp, noise(max(budgets)))
            clock.lap(DRAFT)
            return draft
        if self._along is not None:
            k = min(self._along.k, budgets[0])
            draft = self.members[self._along.choice.member].draft(contexts, [k], warp, noise(k))
            clock.lap(DRAFT)
            self._far = k if len(draft.trees[0]) else 0
            return draft
        looked: dict[int, Draft] = {}
        slots, lacking = [c.slot for c in contexts], self._lacking(contexts[0], left[0])
        self._begin(len(contexts))
        picks = self.controller.again(slots, budgets, lacking)
        if picks is None:
            looked = self._look(self.controller.looks(), contexts, budgets, warp, clock)
            asks = [
                Ask(c.slot, budget, rest, self._offers(b, looked), self._lags(c))
                for b, (c, budget, rest) in enumerate(zip(contexts, budgets, left, strict=True))
            ]
            picks = self.controller.choose(asks, crowded)
            # what is chosen among costs that, too, but not what is thought about it
            clock.lap(CHOOSE if self.controller.thought or not looked else Lap(min(looked)))
        self._picks = picks
        one = self._for_all(picks)
        if one is not None:
            picks = [Pick(one, 0) if pick is None else pick for pick in picks]
        if not looked and one is not None:
            lengths = [pick.k for pick in picks if pick is not None]
            drawn = noise(max(lengths))
            return self._run(one, contexts, range(len(contexts)), lengths, warp, drawn, clock)
        parts: list[tuple[Draft, Sequence[int]]] = []
        for m in sorted({*looked, *(pick.member for pick in picks if pick is not None)}):
            rows = [b for b, pick in enumerate(picks) if pick is not None and pick.member == m]
            own = [contexts[b] for b in rows]
            lengths = [pick.k for pick in picks if pick is not None and pick.member == m]
            if m in looked:
                others = [c.slot for b, c in enumerate(contexts) if b not in rows]
                self._drafted.update((m, c.slot) for c in own)
                self.members[m].observe([Commit(slot, ()) for slot in others])
                if self.members[m].tops:  # else one that knows nothing yet would never learn
                    self._drafted.update((m, slot) for slot in others)
                if rows:
                    parts.append((_shortened(looked[m], rows, lengths), rows))
                continue
            drawn, warp_of = noise(max(lengths)), warp
            if len(rows) < len(contexts):
                warp_of = warp.select(rows)
                drawn = drawn and drawn.select(upload(torch.tensor(rows), warp.device))
            parts.append((self._run(m, own, rows, lengths, warp_of, drawn, clock), rows))
        return together(parts, len(contexts), warp.device)

    def _for_all(self, picks: Sequence[Pick | None]) -> int | None:
        """Who runs for all sequences, if anybody does: for those that it is not to draft for one
        that begins the target's pass does, too, as that begins for all or for none."""
        members = {-1 if pick is None else pick.member for pick in picks}
        some = members - {-1}
        if len(some) != 1:
            return None
        (m,) = some
        return m if len(members) == 1 or self.members[m].begun else None

    def _run(
        self,
        m: int,
        contexts: Sequence[Context],
        rows: Sequence[int],
        lengths: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
        clock: Clock,
    ) -> Draft:
        """What one with a model drafts for some of the round's sequences. If it proposes nothing to
        any, for want of positions, it has not drafted: what that took is not what drafts take."""
        assert self.controller is not None
        self._ran = True
        self._drafted.update((m, c.slot) for c in contexts)
        self._catch_up(m, contexts, clock)
        draft = self.members[m].draft(contexts, lengths, warp, noise)
        if not any(map(len, draft.trees)):
            self._picks = [None if b in rows else pick for b, pick in enumerate(self._picks)]
            self.controller.refused()
        clock.lap(DRAFT)
        return draft

    def _look(
        self,
        members: Sequence[int],
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        clock: Clock,
    ) -> dict[int, Draft]:
        """What those without a model propose."""
        assert self.controller is not None
        found: dict[int, Draft] = {}
        for m in members:
            member = self.members[m]
            opened = 0
            for context in contexts:
                late = self._missed(m, context)
                if self._opened(m, context):
                    opened += late
                elif late:
                    self._late.add(m)
                self._slots[context.slot].read[m] = len(context.tokens)
            if opened:
                clock.lap(Lap(m, opened))
            lengths = [min(budget, self.controller.members[m].most) for budget in budgets]
            found[m] = member.draft(contexts, lengths, warp, None)
            tokens = found[m].tokens.tolist()
            for context, ids, tree in zip(contexts, tokens, found[m].trees, strict=True):
                if len(tree):
                    proposal = _Proposal(m, ids, tree, len(context.tokens))
                    self._slots[context.slot].proposals.append(proposal)
                    self._comparing += 1
            clock.lap(Lap(m))
        return found

    def _offers(self, b: int, looked: Mapping[int, Draft]) -> dict[int, Sequence[int]]:
        return {m: _counts(draft.trees[b]) for m, draft in looked.items()}

    def _lags(self, context: Context) -> dict[int, int | None]:
        """What those with a model have not read; None where they have no room."""
        lags: dict[int, int | None] = {}
        for m, member in self._models:
            if member.room(context) <= 0:
                lags[m] = None
            elif member.reads:
                lags[m] = self._missed(m, context)
        return lags

    def _lacking(self, context: Context, left: int) -> Late:
        """The same in short. Nobody lacks anything who has drafted in the round before; should one
        have no room for more, it refuses."""
        for m, _ in self._models:
            if (m, context.slot) not in self._drafted:
                return late(self._lags(context), left)
        return []

    def _missed(self, m: int, context: Context) -> int:
        """Tokens that a member has to read, if they are many."""
        late = len(context.tokens) - self._slots[context.slot].read.get(m, 0)
        return late if late > LATE and self.members[m].reads else 0

    def _opened(self, m: int, context: Context) -> bool:
        """Let a member open a sequence; whether it has not before."""
        read = self._slots[context.slot].read
        if m in read:
            return False
        self.members[m].open(context, ())
        read[m] = len(context.tokens)
        return True

    def _catch_up(self, m: int, contexts: Sequence[Context], clock: Clock) -> None:
        """Let a member read what it lacks, timed if it is much."""
        lacking = 0
        for c in contexts:
            late = self._missed(m, c)
            if not self._opened(m, c) and late:
                self.members[m].catch_up([c])
            lacking += late
            self._slots[c.slot].read[m] = len(c.tokens)
        if lacking:
            clock.lap(Lap(m, lacking))

    def _features(self, member: Drafter, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of all that are tapped those that a member wants."""
        if not features:
            return ()
        return tuple(features[self._drafter.taps.index(tap)] for tap in member.taps)

    # --- what came of it ----------------------------------------------------------

    @property
    def tops(self) -> int:
        """How many of the target's likeliest tokens are wanted of this round."""
        members = {m for m, _ in self._drafted}
        return max((self.members[m].tops for m in members), default=0)

    def drafter_of(self, b: int) -> str:
        """Who has proposed something for the round's b-th sequence."""
        pick = self._picks[b]
        return self.members[0 if pick is None else pick.member].name

    def judged(self, b: int, slot: int, accepted: int, ended: bool, emitted: int) -> None:
        """Of the round's b-th sequence so many drafted tokens were accepted.

        Args:
            ended: whether nothing was proposed behind them that the target has refused.
        """
        if self.controller is None:
            return
        if self._along is not None:
            self._came = accepted + (not ended), accepted, emitted
            return
        self.controller.emitted(slot, emitted)
        pick = self._picks[b]
        if pick is not None and not self.members[pick.member].instant:
            reached = accepted + (not ended)
            if reached:  # else nothing is known of what was drafted
                self.controller.told(Told(slot, pick.member, pick.kind, reached, accepted))

    def observe(self, commits: Sequence[Commit]) -> None:
        """The round is over for those that go on."""
        for m, member in enumerate(self.members):
            told = [c for c in commits if (m, c.slot) in self._drafted or member.taps]
            if told:
                member.observe([self._own(member, c) for c in told])
        self._compare([commit.slot for commit in commits])

    def _own(self, member: Drafter, commit: Commit) -> Commit:
        """What a member wants to know of a commit."""
        if len(self.members) == 1 or (commit.top is None and not commit.features):
            return commit
        top = None if commit.top is None or not member.tops else commit.top[:, : member.tops]
        return replace(commit, features=self._features(member, commit.features), top=top)

    def _compare(self, slots: Iterable[int]) -> None:
        """Proposals with the text that has followed; those that it has outrun are judged."""
        if not self._comparing:
            return
        assert self.controller is not None
        for slot in map(self._slots.__getitem__, slots):
            tokens, open_ = slot.context.tokens, []
            for p in slot.proposals:
                reached = p.judged(tokens)
                if reached is None:
                    open_.append(p)
                    continue
                told = Told(slot.context.slot, p.member, kind_of(p.tree.depth), reached, p.depth)
                self.controller.told(told)
            self._comparing -= len(slot.proposals) - len(open_)
            slot.proposals = open_

    def rested(self, seconds: float, once: bool = False) -> None:
        """What a round took in which it rests.

        Args:
            once: as of `spent`.
        """
        self._closing = 0.0  # texts that nobody drafts for take next to nothing
        if not self._counts:
            return
        self._rested.append(seconds)
        if once or not self._unasked:
            self._tell(once)

    def spent(
        self, laps: Mapping[Hashable, float], whole: float, rows: int, once: bool = False
    ) -> tuple[float, float]:
        """What the round took, in seconds; of it reading and choosing, which are no drafting.

        Args:
            once: whether something ran in it that runs but once, and takes long.
        """
        if self.controller is None:
            return 0.0, 0.0
        if self._along is not None:
            draft = laps[DRAFT]
            rest, self._telling = whole + self._telling - draft, self._each
            if not self._along.add(self._far, *self._came, draft, rest, rows, once):
                self._tell()
                self._along = self._goes_along()
            return 0.0, 0.0
        began = time.perf_counter()
        looks: dict[int, float] = {}
        draft = laps.get(DRAFT, 0.0) if self._ran else 0.0
        choosing, reading = laps.get(CHOOSE, 0.0), 0.0
        for lap, seconds in laps.items():
            if not isinstance(lap, Lap):
                continue
            if lap.read:
                reading += seconds
                if not once:
                    self.controller.read(lap.member, lap.read, seconds)
            else:
                looks[lap.member] = seconds
        rest = whole + self._telling - choosing - draft - reading - sum(looks.values())
        spent = Spent(looks, draft, reading, rest, rows, choosing + self._closing, self._late, once)
        self.controller.spent(self._picks, spent)
        if not once:  # else it is still to be paid
            self._telling, self._closing = time.perf_counter() - began, 0.0
            self._along = self._goes_along()
        return reading, choosing

    def _goes_along(self) -> Along | None:
        """Rounds of this text that the controller need not be asked about. Of those in which
        another model falls behind, or the text judges what was proposed, it must be told."""
        if self.controller is None or len(self._models) > 1 or self._comparing:
            return None
        return self.controller.along()


def members_of(drafter: Drafter) -> list[Drafter]:
    """Those that it is made of, or it alone."""
    if not drafter.members:
        return [drafter]
    return [part for member in drafter.members for part in members_of(member)]


def controller_of(drafter: Drafter, fixed: int | None, own: bool = False) -> Controller | None:
    """What chooses; None where there is nothing to choose.

    Args:
        fixed: the K of every round, if it is.
        own: whether each member has its own, up to this.
    """
    members = members_of(drafter)
    if fixed is not None and len(members) == 1:
        return None
    profiles = [
        Profile(
            m.name,
            m.instant,
            m.most if fixed is None else min(m.k if own else m.most, fixed),
            m.cost,
            m.begun > 0,
            m.whole,
        )
        for m in members
    ]
    return Controller(profiles, fixed)


def nothing(batch: int, device: torch.device) -> Draft:
    """The draft of plain decoding."""
    empty = torch.empty(batch, 0, dtype=torch.int64, device=device)
    return Draft(empty, PointMass(), (chain(0),) * batch)


def _counts(tree: Tree) -> Sequence[int]:
    """Nodes up to each depth, from 0."""
    if tree.is_chain:
        return range(len(tree) + 1)
    return [sum(depth <= d for depth in tree.depths) for d in range(tree.depth + 1)]


def _shortened(draft: Draft, rows: Sequence[int], lengths: Sequence[int]) -> Draft:
    """Of some sequences the nodes that are not deeper than this. They are certain."""
    if len(rows) == len(draft.trees):
        if all(t.depth <= k for t, k in zip(draft.trees, lengths, strict=True)):
            return draft
        if all(tree.is_chain for tree in draft.trees):
            shapes = tuple(chain(min(len(t), k)) for t, k in zip(draft.trees, lengths, strict=True))
            return Draft(draft.tokens[:, : max(lengths)], draft.law, shapes)
    trees, kept = [], []
    for b, length in zip(rows, lengths, strict=True):
        tree = draft.trees[b]
        trees.append(cut(tree, length))
        kept.append([node for node, depth in enumerate(tree.depths) if depth <= length])
    width = max(map(len, trees))
    at = torch.tensor([nodes + [0] * (width - len(nodes)) for nodes in kept])
    tokens = draft.tokens[torch.tensor(rows)].gather(1, at.to(draft.tokens.device))
    return Draft(tokens, draft.law, tuple(trees))
