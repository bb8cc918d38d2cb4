"""The contract of a drafter: whatever proposes tokens, and knows how it drew them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ..sampling import DraftNoise, Warp
from ..types import Draft, Law


@dataclass(frozen=True, slots=True)
class Context:
    """A sequence as a drafter sees it: its slot and every committed token (read only)."""

    slot: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """What a round kept of one sequence's draft.

    Attributes:
        path: the nodes whose keys and values stay, from the root down. If the
            round emitted anything, the context holds their tokens and one more.
        features: the target's tapped states `[rows, H]` per tap, for the round's
            root and this path; none if the round emitted nothing.
    """

    slot: int
    path: Sequence[int]
    features: tuple[Tensor, ...] = ()


class Drafter(Protocol):
    """Proposes drafts for slots; the engine opens, feeds and closes them.

    Attributes:
        laws: every law its drafts may carry.
        proposes_trees: whether its drafts may branch.
        taps: target layers whose output it wants to see.
    """

    name: str
    laws: ClassVar[tuple[type[Law], ...]]
    proposes_trees: ClassVar[bool]
    taps: tuple[int, ...]

    def start(self, slots: int, max_len: int) -> None:
        """Called once by the engine that will use it, before any slot is opened."""

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        """A sequence begins; `features` are the prompt's tapped states, last token excepted."""

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        """Propose up to `budgets[b]` tokens along a path for each sequence.

        Args:
            warp: the sequences' own sampling parameters.
            noise: what tokens are drawn with; None when every sequence is greedy.
        """
        ...

    def observe(self, commits: Sequence[Commit]) -> None:
        """The round is over; the contexts already hold what it emitted."""

    def close(self, slot: int) -> None:
        """The sequence is gone; its slot will be opened anew."""
