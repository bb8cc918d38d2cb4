"""Trees that grow level by level: what a drafting model reads next, and what becomes of it.

A `Builder` decides the shape of drafts. For each draft of B sequences it begins a
`Growth`. Behind the F rows that were read last, the root's row at first, `width` tokens
each are drawn; `add` takes them, and says which of the nodes there are now the model
shall read next, in one pass for all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from torch import Tensor

from ..errors import OptionError
from ..types import Draw, Shape, Tree


@dataclass(frozen=True, slots=True)
class Children:
    """What was drawn behind F rows of each of B sequences, m tokens each.

    Attributes:
        tokens: `[B, F, m]` int64.
        masses: `[B, F, m]` natural logs of the drafting model's own probabilities, where the
            builder weighs.
        q: `[B, F, m, V]` the rows they were drawn from; None where they are certain.
    """

    tokens: Tensor
    masses: Tensor | None = None
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The nodes that the drafting model has read, and those that it is to read now.

    Attributes:
        tokens: `[B, R]` int64.
        depths: `[B, R]` int64 on the CPU; children of the root have depth 1.
        mask: `[B, R, R]` bool, as in `LanguageModel.forward`.
        computed: so many of them, from the first on, have been read.
    """

    tokens: Tensor
    depths: Tensor
    mask: Tensor
    computed: int


@dataclass(frozen=True, slots=True)
class Grown:
    """A draft.

    Attributes:
        tokens: `[B, N]` int64.
        q: `[B, N, V]` the rows they were drawn from; None where they are certain.
        trees: of each sequence.
        rows: where in the block each sequence's nodes were read, -1 for those that were not.
    """

    tokens: Tensor
    q: Tensor | None
    trees: tuple[Tree, ...]
    rows: tuple[Sequence[int], ...]


def check_draw(draw: Draw) -> Draw:
    """How children come about.

    Raises:
        OptionError: there is no such way.
    """
    if draw not in get_args(Draw):
        raise OptionError(f"draw must be one of {', '.join(get_args(Draw))}, not {draw!r}")
    return draw


class Growth(Protocol):
    """One draft of B sequences.

    Attributes:
        width: m, tokens to draw behind each row now.
        chains: how long each sequence's path is, if none branches and nothing is weighed.
        nodes: `[B, F, m]` int64, the node that each of them becomes, for noise of its own;
            0 where it is left out. None where nothing is drawn.
    """

    @property
    def width(self) -> int: ...

    @property
    def nodes(self) -> Tensor | None: ...

    @property
    def chains(self) -> Sequence[int] | None: ...

    def add(self, children: Children) -> Block | None:
        """Take a level; None when there is no further one."""
        ...

    def grown(self) -> Grown: ...


class Builder(Protocol):
    """Decides the shape of drafts.

    Attributes:
        nodes, depth: of a draft, at most.
        shape: what they may look like.
        draw: how the children of a node come about: "top" are the likeliest, which are
            certain; "without" and "with" are drawn, without and with replacement.
        weighs: whether it looks at the drafting model's probabilities.
    """

    nodes: int
    depth: int
    shape: Shape
    draw: Draw
    weighs: bool

    def begin(self, budgets: Sequence[int], temperatures: Sequence[float]) -> Growth | None:
        """A draft for sequences with such budgets, at least 1, and temperatures.

        None where nothing is worth drafting.
        """
        ...
