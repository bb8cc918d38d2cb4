"""Calls of the kernels over rows of logits and probabilities, on the CPU.

Draws and races give the indices that the tensor code in `sampling` gives on the CPU, and rules
those of `verifiers` but where their sums round apart; they are used wherever the kernels happen
to be loaded. A softmax rounds differently from PyTorch's, so who wants it says so.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor

from .compiler import loaded_library

_Number = ctypes.c_int64


def loaded(*rows: Tensor) -> ctypes.CDLL | None:
    """The kernels, if this process has loaded them and they take such tensors."""
    if any(x.device.type != "cpu" or x.dtype != torch.float32 for x in rows):
        return None
    return loaded_library()


Filters = tuple[Tensor, Tensor, Tensor]
"""Per sequence `[B]` top-k int64 (V is off), top-p and min-p float32 (1 and 0 are off)."""


def warp(
    library: ctypes.CDLL, logits: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> Tensor:
    """Softmax of logits over temperature `[B, T, V]`, filtered; temperature 0 is argmax.

    Args:
        logits: `[B, T, V]`, float32.
        temperatures: `[B]`, float32.
    """
    assert len(temperatures) == len(logits)
    logits, p = logits.contiguous(), logits.new_empty(logits.shape)
    kept = [None] * 3 if filters is None else [_at(f) for f in filters]
    library.outpace_warp(_at(logits), *_sizes(logits), _at(temperatures), *kept, _at(p))
    return p


def draw(library: ctypes.CDLL, p: Tensor, u: Tensor) -> Tensor:
    """See `sampling.categorical`."""
    p, u = p.contiguous(), u.double().expand(p.shape[:-1]).contiguous()
    tokens = p.new_empty(p.shape[:-1], dtype=torch.int64)
    rows, width = _Number(tokens.numel()), _Number(p.shape[-1])
    library.outpace_draw(_at(p), rows, width, _at(u), _at(tokens))
    return tokens


def race(library: ctypes.CDLL, p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `sampling.race`; `positions` `[B, T]` are absolute."""
    held = [x.contiguous() for x in (p, seeds, positions)]
    tokens = p.new_empty(p.shape[:-1], dtype=torch.int64)
    library.outpace_race(_at(held[0]), *_sizes(p), *map(_at, held[1:]), _at(tokens))
    return tokens


class Rule(IntEnum):
    """The rules that the kernels know; see the verifiers of these names."""

    TOKEN = 0
    KSEQ = 1
    TRAVERSAL = 2
    MULTIPATH = 3
    MATCH = 4
    COUPLED = 5


def children(
    library: ctypes.CDLL,
    p: Tensor,
    scores: Tensor,
    count: int,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `sampling.without_replacement`.

    Args:
        p, scores: `[B, F, V]`.
        uniforms: `[B, F, count]`; without them tokens race with seeds at positions `[B]`.
    """
    held = [None if x is None else x.contiguous() for x in (p, scores, uniforms, seeds, positions)]
    at = [None if x is None else _at(x) for x in held]
    q = p.new_empty(*p.shape[:2], count, p.shape[2])
    tokens = p.new_empty(q.shape[:3], dtype=torch.int64)
    library.outpace_children(*at[:2], *_sizes(p), _Number(count), *at[2:], _at(q), _at(tokens))
    return tokens, q


def verify(
    library: ctypes.CDLL,
    rule: Rule,
    p: Tensor,
    q: Tensor | None,
    drafted: Tensor,
    parents: Tensor,
    accept: Tensor,
    target: Tensor,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, accepted and token of a `Verdict`.

    Args:
        q: None where every drafted token was certain.
        parents: `[B, N]` int64, of every node; -2 is padding.
        seeds, positions: `[B]`, for a rule that races; the position is the next token's.
    """
    batch, nodes = drafted.shape
    all_of = p, q, drafted, parents, accept, target, seeds, positions
    held = [None if x is None else x.contiguous() for x in all_of]
    at = [None if x is None else _at(x) for x in held]
    path, found = drafted.new_empty(batch, nodes), drafted.new_empty(2, batch)
    library.outpace_verify(
        int(rule),
        *at[:4],
        *_sizes(drafted),
        _Number(p.shape[-1]),
        *at[4:],
        _at(path),
        *map(_at, found),
    )
    return path, found[0], found[1]


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _sizes(x: Tensor) -> list[ctypes.c_int64]:
    return [_Number(n) for n in x.shape]
