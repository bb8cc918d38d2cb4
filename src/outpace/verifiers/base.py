"""The contract of a verifier: a pure function that decides what one round emits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..models.base import upload
from ..sampling import Keys, categorical, race
from ..types import Draft, Draw, Law, Rows, Shape


@dataclass(frozen=True, slots=True)
class Noise:
    """Uniforms on [0, 1), float64, for one round of B sequences.

    Attributes:
        accept: `[B, N]`, one per draft node.
        target: `[B, N + 1]`; entry d is for the token emitted at depth d + 1.
        keys: of races, for rules that are `coupled`.
    """

    accept: Tensor
    target: Tensor
    keys: Keys | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round emits: the accepted path, then one more token.

    Attributes:
        path: `[B, D]` int64 node indices from the root down, -1 behind the end.
        accepted: `[B]` int64, the path's length.
        token: `[B]` int64, the correction (a draft token was rejected) or the
            bonus (the path ended at a leaf).
    """

    path: Tensor
    accepted: Tensor
    token: Tensor

    @classmethod
    def through(cls, kept: Tensor, token: Tensor) -> Verdict:
        """From the nodes of each path, true in `[B, N]`, and what comes behind them `[B]`."""
        nodes = torch.arange(kept.shape[1], device=kept.device)
        ordered = torch.where(kept, nodes, len(nodes)).sort(1).values
        return cls(torch.where(ordered < len(nodes), ordered, -1), kept.sum(1), token)

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], nodes: int, token: Tensor) -> Verdict:
        """From paths on the host, and what comes behind them `[B]`."""
        padded = [[*path, *[-1] * (nodes - len(path))] for path in paths]
        path = torch.tensor(padded, dtype=torch.int64).view(len(paths), nodes)
        accepted = torch.tensor([len(path) for path in paths])
        return cls(upload(path, token.device), upload(accepted, token.device), token)


class Verifier(Protocol):
    """Pure: p rows, draft and noise in, verdict out.

    Attributes:
        lossless: whether the emitted law is the target's.
        laws, takes: the laws and shapes of the drafts that it may be put together with.
        siblings: how children of a node are best drawn for it.
        takes_sampling: whether it is for requests above temperature 0.
        coupled: whether drafts are drawn with the noise that it will use itself.
        invariant: whether texts follow from target and seed alone, whatever was drafted.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    laws: ClassVar[tuple[type[Law], ...]]
    takes: ClassVar[Shape]
    siblings: ClassVar[Draw]
    takes_sampling: ClassVar[bool]
    coupled: ClassVar[bool]
    invariant: ClassVar[bool]

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        """Decide one round.

        Args:
            p: `[B, N + 1, V]`: row 0 is the target's law after the root, row
                i + 1 after node i.
        """
        ...


def without_tensors(rule: kernels.Rule, p: Tensor, draft: Draft, noise: Noise) -> Verdict | None:
    """A verdict that needs no tensor code: by the kernels, or where nothing was drafted."""
    tokens, keys = draft.tokens, noise.keys if rule is kernels.Rule.COUPLED else None
    if not tokens.shape[1]:
        if keys is None:
            token = categorical(p[:, 0], noise.target[:, 0])
        else:
            token = race(p, keys, torch.zeros_like(keys.first).unsqueeze(1)).squeeze(1)
        return Verdict(tokens, torch.zeros_like(token), token)
    q = draft.law.q if isinstance(draft.law, Rows) else None
    library = kernels.loaded(p, *([] if q is None else [q]))
    if library is None:
        return None
    noises = [noise.accept, noise.target]
    if keys is not None:
        noises += [keys.seeds, keys.first]
    return Verdict(*kernels.verify(library, rule, p, q, tokens, parents_of(draft), *noises))


def parents_of(draft: Draft) -> Tensor:
    """`[B, N]` int64 where the tokens are: the parent of each node, -2 for padding."""
    n = draft.tokens.shape[1]
    parents = [(*t.parents, *(-2 for _ in range(n - len(t)))) for t in draft.trees]
    return upload(torch.tensor(parents).view(len(parents), n), draft.tokens.device)


def laws_of(draft: Draft, nodes: Tensor, size: int) -> Tensor:
    """`[B, V]` float64: the laws that nodes `[B]` were drawn from, of V tokens."""
    rows = torch.arange(len(nodes), device=nodes.device)
    if isinstance(draft.law, Rows):
        return draft.law.q[rows, nodes].double()
    certain = torch.zeros(len(rows), size, dtype=torch.float64, device=nodes.device)
    return certain.scatter_(1, draft.tokens[rows, nodes].unsqueeze(1), 1)


def chances_of(draft: Draft) -> Tensor:
    """`[B, N]` float64: what each node's own law gives its token."""
    if isinstance(draft.law, Rows):
        return draft.law.q.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1).double()
    return torch.ones_like(draft.tokens, dtype=torch.float64)


def row_depths(draft: Draft, device: torch.device) -> Tensor:
    """`[B, N + 1]` int64: how deep each row's next token lies, 0 behind the root; 0 for padding."""
    n = draft.tokens.shape[1]
    depths = [(0, *t.depths, *(0 for _ in range(n - len(t)))) for t in draft.trees]
    return upload(torch.tensor(depths), device)
