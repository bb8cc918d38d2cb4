"""The contract of a verifier: a pure function that decides what one round emits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..models.base import upload
from ..sampling import Keys, categorical
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


def without_tensors(
    p: Tensor, draft: Draft, noise: Noise, lengths: Tensor, *, by_block: bool
) -> Verdict | None:
    """A verdict on chains that needs no tensor code: by the kernels, or where nothing was drafted.

    Args:
        lengths: `[B]` int64, of the chains.
        by_block: whether by block verification, else by token verification.
    """
    if not draft.tokens.shape[1]:
        return Verdict(draft.tokens, lengths, categorical(p[:, 0], noise.target[:, 0]))
    q = draft.law.q if isinstance(draft.law, Rows) else None
    library = kernels.loaded(p, *([] if q is None else [q]))
    if library is None:
        return None
    noises = noise.accept, noise.target
    return Verdict(*kernels.verify(library, by_block, p, q, draft.tokens, lengths, *noises))


def row_depths(draft: Draft, device: torch.device) -> Tensor:
    """`[B, N + 1]` int64: how deep each row's next token lies, 0 behind the root; 0 for padding."""
    n = draft.tokens.shape[1]
    depths = [(0, *t.depths, *(0 for _ in range(n - len(t)))) for t in draft.trees]
    return upload(torch.tensor(depths), device)
