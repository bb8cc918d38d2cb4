"""What a controller is asked, what it answers, and what it is told afterwards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

LATE = 32
"""Tokens a drafter may lack before it is timed how long it takes to read them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A drafter as it is seen here.

    Attributes:
        instant: whether it runs no model; see `Drafter`.
        most: the longest path worth asking for.
        cost: what a drafted token may cost, of a target pass, before it was measured.
        begun: whether its rounds begin the target's pass, so that their rest is another.
        whole: whether what it proposes must be taken as it is, or not at all.
    """

    name: str
    instant: bool
    most: int
    cost: float = 0.0
    begun: bool = False
    whole: bool = False


class Ask(NamedTuple):
    """A sequence that takes part in a round.

    Attributes:
        slot: where it runs.
        budget: the longest path worth drafting; 0 where nothing may be drafted.
        left: tokens that it may still emit.
        offers: of the drafters without a model that were looked at, how many nodes their
            proposal has up to each depth, from 0; `(0,)` where there is none.
        lags: of the drafters with a model, tokens that they would have to read first; None where
            they cannot draft.
    """

    slot: int
    budget: int
    left: int
    offers: Mapping[int, Sequence[int]] = MappingProxyType({})
    lags: Mapping[int, int | None] = MappingProxyType({})


Late = Sequence[tuple[int, int | None]]
"""Drafters that have much to read of a text, by how much that is for each token that may follow: up
to 2, up to 8, up to 32 and so on. None is for those that have no room for it."""


def late(lags: Mapping[int, int | None], left: int) -> Late:
    """By what they lack (`Ask.lags`), and the tokens that may still be emitted."""
    return [
        (m, None if lag is None else max(0, round(math.log(lag / max(left, 1), 4))))
        for m, lag in lags.items()
        if lag is None or lag
    ]


class Pick(NamedTuple):
    """Who drafts for a sequence, and how far.

    Attributes:
        member: the drafter's index.
        k: the longest path.
        kind: of a drafter with a model, what kind of round it is; see `kind_of`.
    """

    member: int
    k: int
    kind: int = 0


class Told(NamedTuple):
    """What became of a drafter's proposal.

    Attributes:
        reached, accepted: depths that were judged, and of these the first that passed. One
            that was not judged, because the text ended there, counts as neither.
    """

    slot: int
    member: int
    kind: int
    reached: int
    accepted: int


class Spent(NamedTuple):
    """Seconds of a round.

    Attributes:
        looks: of the drafters that were looked at.
        draft: of the drafter with a model that drafted, if one did; `reading` what it lacked.
        rest: of all else.
        rows: of the target's pass.
        choosing: of the choice; behind looks as far as it was thought about. What ending texts took
            since the round before is in it, too.
        late: of those that were looked at, who had much to read before.
        once: whether it has something in it that runs but once, as a GPU's graph is recorded. It
            says nothing of others like it then, and whether it pays is not for it to show.
    """

    looks: Mapping[int, float]
    draft: float
    reading: float
    rest: float
    rows: int
    choosing: float = 0.0
    late: Collection[int] = ()
    once: bool = False

    @property
    def seconds(self) -> float:
        looks = sum(self.looks.values()) if self.looks else 0.0
        return looks + self.choosing + self.draft + self.reading + self.rest


def kind_of(depth: int) -> int:
    """Of a round, by how far somebody who runs no model proposes: not at all, up to 7 tokens, up to
    15, up to 31 and so on."""
    return max(min(depth, 1), depth.bit_length() - 2)
