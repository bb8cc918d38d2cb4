"""The contract of a drafter: whatever proposes tokens, and knows how it drew them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import IncompatibleError
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..sampling import DraftNoise, Warp
from ..trees import Builder, chain
from ..types import Draft, Independent, Law, PointMass, Rows, Shape, Tree

if TYPE_CHECKING:
    from ..models.loading import Progress
    from .blueprint import Blueprint, Setting


@dataclass(frozen=True, slots=True)
class Context:
    """A sequence as a drafter sees it.

    Attributes:
        tokens: every committed token, a list that grows (read only).
        prompt_length: how many of them are the prompt's.
    """

    slot: int
    tokens: Sequence[int]
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What a round kept of one sequence's draft.

    Attributes:
        path: the nodes whose keys and values stay, from the root down. If the
            round emitted anything, the context holds their tokens and one more.
        features: the target's tapped states `[rows, H]` per tap, for the round's
            root and this path; none if the round emitted nothing.
        block: the tokens of the round's root and of all nodes, kept or not.
        top: `[len(block), tops]` int64, the target's likeliest tokens behind each
            of them, the likeliest first; there if the drafter has `tops`.
    """

    slot: int
    path: Sequence[int]
    features: tuple[Tensor, ...] = ()
    block: Sequence[int] = ()
    top: Tensor | None = None


def check_looked_at(drafter: Blueprint) -> None:
    """Whether what it proposes may be looked at before it is taken, if it runs no model.

    Raises:
        IncompatibleError: it draws. Tokens that were drawn and are dropped move the law.
    """
    if drafter.instant and Rows in drafter.laws:
        raise IncompatibleError(
            f"{drafter.name!r} draws tokens, and what runs no model is looked at before it is "
            "taken: say that it is not instant"
        )


class Drafter:
    """Proposes drafts for slots; the engine starts it once, then opens, feeds and closes slots.

    Whatever it proposes, texts keep the target's law as long as each draft says
    truly how it was drawn, and what it passes on of the target's own pass (`Draft.resume`,
    and rows in the target's cache) is what that pass would have computed.

    Attributes:
        laws: every law its drafts may carry.
        proposes: what its drafts may look like.
        taps: target layers whose output it wants to see.
        tops: how many of the target's likeliest tokens it wants to see per row.
        k: the draft length it takes where none is asked for.
        most: the longest path worth asking for where K follows from measurements.
        rule: the verifier that suits it. By default that is `match`: tokens that were
            not drawn pass as often by it as by any, and its seeded texts are plain
            decoding's.
        instant: whether a draft costs next to nothing, as no model runs. What it proposes
            may then be looked at before it is taken, so it must not be drawn.
        remembers: whether drafts follow from other requests. Their noise may have been
            this one's, by the same seed, so rules whose texts follow from the draft
            would not be exact: it goes with `match` and `coupled`.
        begun: the share of the target's layers that have run over a draft when it is done.
        draws: numbers that a draft is drawn with, at most, if they are more than K.
        whole: whether what it proposes must be taken as it is, or not at all.
        reads: whether it has a state of its own, and must read a text before it drafts.
        cost: what a drafted token may cost, of a target pass; known once it has started, and
            replaced by what is measured.
        requires: what it needs of a target or a machine, in a few words.
    """

    requires: str = "any model"
    name: str
    laws: tuple[type[Law], ...] = (PointMass,)
    proposes: Shape = Shape.CHAIN
    taps: tuple[int, ...] = ()
    tops: int = 0
    k: int = 4
    most: int = 16
    rule: str = "match"
    instant: bool = True
    remembers: bool = False
    begun: float = 0.0
    draws: int = 0
    whole: bool = False
    reads: bool = True
    cost: float = 0.0
    members: Sequence[Drafter] = ()
    """The drafters that it is made of."""
    taken: bool = False
    """Whether an engine has it."""

    def check_free(self) -> None:
        """Whether no engine has it, or a part of it: it keeps what is that engine's.

        Raises:
            IncompatibleError: one has.
        """
        if self.taken:
            raise IncompatibleError(
                f"the drafter {self.name!r} has been given to an engine already: make one for each"
            )
        for member in self.members:
            member.check_free()

    def take(self) -> None:
        """Called by the engine that will use it, once.

        Raises:
            IncompatibleError: another has it, or a part of it.
        """
        self.check_free()
        for member in self.members:
            member.take()
        self.taken = True

    @property
    def alone(self) -> LanguageModel | None:
        """A model that writes the target's tokens by itself, if it drafts with one."""
        return None

    def branch(self, builder: Builder) -> None:
        """Draft trees of this shape.

        Raises:
            IncompatibleError: it does not draft level by level.
        """
        refuse_tree(self.name)

    def check(self, setting: Setting) -> Sequence[str]:
        """Whether it can draft for a target whose weights are not read yet; remarks worth showing.

        Raises:
            OutpaceError: it cannot; the message says why, and what could.
        """
        return ()

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        """What drafts for a target: itself."""
        return self

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        """Called by the engine that has taken it, before any slot is opened.

        Args:
            cache: the target's. A drafter that runs the target's layers may write
                behind the committed length of a slot, as a pass does.

        Raises:
            IncompatibleError: it cannot draft for this target.
        """

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
        raise NotImplementedError

    def room(self, context: Context) -> int:
        """Tokens that it has positions for behind a text."""
        return sys.maxsize

    def catch_up(self, contexts: Sequence[Context]) -> None:
        """Read what it lacks of these texts, as it is about to draft; `draft` does so, too."""

    def observe(self, commits: Sequence[Commit]) -> None:
        """A round is over that it drafted in; the contexts already hold what it emitted.

        A commit without block drops the last draft: the round goes on with another. Who has
        taps is told of every round, and who has tops of those that it was looked at in, with
        the block that was scored. Others find in the context what came without them.
        """

    def close(self, slot: int) -> None:
        """The sequence is gone; its slot will be opened anew."""

    def forget(self) -> None:
        """Drop what is remembered of other requests; no slot is open."""


def refuse_tree(name: str) -> NoReturn:
    """For drafters that have no levels.

    Raises:
        IncompatibleError: always.
    """
    raise IncompatibleError(
        f"the drafter {name!r} takes no tree: that is for drafters that run a model over the "
        "target's tokens ('outpace drafters' has the options of the others)"
    )


class CertainDrafter(Drafter):
    """A drafter that draws nothing and looks at one sequence at a time."""

    def propose(self, context: Context, budget: int) -> tuple[Sequence[int], Tree]:
        """Nodes and their shape for a sequence, up to `budget` tokens along a path."""
        raise NotImplementedError

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        proposals = [self.propose(c, b) for c, b in zip(contexts, budgets, strict=True)]
        return certain(proposals, warp.device)


def certain(proposals: Sequence[tuple[Sequence[int], Tree]], device: torch.device) -> Draft:
    """A draft of tokens that were not drawn: each sequence's nodes, and their shape."""
    width = max(len(tokens) for tokens, _ in proposals)
    rows = [[*tokens, *[0] * (width - len(tokens))] for tokens, _ in proposals]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), width)
    return Draft(tokens, PointMass(), tuple(tree for _, tree in proposals))


def together(
    parts: Sequence[tuple[Draft, Sequence[int]]], batch: int, device: torch.device
) -> Draft:
    """One draft of several, each for some of the sequences; the others get nothing."""
    if len(parts) == 1 and len(parts[0][1]) == batch:
        return parts[0][0]
    width = max((d.tokens.shape[1] for d, _ in parts), default=0)
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    trees = [chain(0)] * batch
    laws = [d.law.q for d, _ in parts if isinstance(d.law, Rows)]
    q = None
    if laws:
        q = torch.zeros(batch, width, laws[0].shape[-1], dtype=laws[0].dtype, device=device)
    for draft, rows in parts:
        n = draft.tokens.shape[1]
        at = torch.tensor(rows, device=device)
        tokens[at, :n] = draft.tokens.to(device)
        if q is not None:
            certain = F.one_hot(tokens[at, :n], q.shape[-1]).to(q.dtype)
            q[at, :n] = draft.law.q.to(q) if isinstance(draft.law, Rows) else certain
        for b, tree in zip(rows, draft.trees, strict=True):
            trees[b] = tree
    if q is None:
        return Draft(tokens, PointMass(), tuple(trees))
    chains = [all(tree.is_chain for tree in d.trees) for d, _ in parts]
    apart = [isinstance(d.law, Independent) for d, _ in parts]
    law = Independent if all(map(max, apart, chains)) and any(apart) else Rows
    return Draft(tokens, law(q), tuple(trees))
