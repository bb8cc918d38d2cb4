"""Keyed noise: a uniform is a pure function of (seed, stream, position, index).

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), written over numpy arrays. There is no state: a
request's noise depends neither on its neighbours in the batch nor on
scheduling, and no two purposes ever share a uniform, because each has its own
stream.

Draft and acceptance noise is keyed by the position at which the round begins
and the node's index, so a discarded draft's noise is never used again, which
rules that look ahead (block verification) rely on. The target's draw is keyed
by the absolute position of the token it emits.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


class Stream(IntEnum):
    """Separate purposes never share noise."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[int, int]) -> tuple[U64, ...]:
    """Four 32-bit words (in uint64 arrays) for each counter of four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (b >> _SHIFT) ^ c1 ^ np.uint64(k0),
            b & _MASK,
            (a >> _SHIFT) ^ c3 ^ np.uint64(k1),
            a & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, positions: U64, streams: U64, indices: U64) -> F64:
    """Uniforms on [0, 1) with 53 bits, one per (position, stream, index) triple.

    Args:
        positions, streams, indices: arrays that broadcast together.
    """
    triple = np.broadcast_arrays(indices, positions & _MASK, streams, positions >> _SHIFT)
    low, high, _, _ = philox(
        (triple[0], triple[1], triple[2], triple[3]), (seed & 0xFFFFFFFF, seed >> 32)
    )
    bits = (high << np.uint64(21)) ^ (low >> np.uint64(11))
    uniform: F64 = bits.astype(np.float64) * 2.0**-53
    return uniform


class RequestNoise:
    """The noise of one request, computed for many positions at a time."""

    BLOCK = 64

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._width = 0
        self._blocks: dict[int, F64] = {}  # block number -> [BLOCK, 2 * width + 1]

    def at(self, stream: Stream, position: int, indices: int) -> F64:
        """Uniforms `[indices]` of one position (stream TARGET has index 0 only)."""
        if indices > self._width:
            self._width = indices
            self._blocks.clear()
        row = self._block(position // self.BLOCK)[position % self.BLOCK]
        start = (stream - 1) * self._width
        uniform: F64 = row[start : start + indices]
        return uniform

    def along(self, position: int, positions: int) -> F64:
        """Uniforms `[positions]` of stream TARGET at consecutive positions."""
        if position % self.BLOCK + positions <= self.BLOCK:
            start = position % self.BLOCK
            return self._block(position // self.BLOCK)[start : start + positions, -1]
        inside = self.BLOCK - position % self.BLOCK
        rest = self.along(position + inside, positions - inside)
        return np.concatenate([self.along(position, inside), rest])

    def _block(self, number: int) -> F64:
        if number not in self._blocks:
            # Requests move forward: the block before this one may still be asked for.
            self._blocks = {n: b for n, b in self._blocks.items() if n == number - 1}
            start = number * self.BLOCK
            index = np.arange(self._width, dtype=np.uint64)
            kinds = [Stream.DRAFT] * self._width + [Stream.ACCEPT] * self._width + [Stream.TARGET]
            self._blocks[number] = uniforms(
                self.seed,
                np.arange(start, start + self.BLOCK, dtype=np.uint64)[:, None],
                np.array(kinds, dtype=np.uint64),
                np.concatenate([index, index, np.zeros(1, np.uint64)]),
            )
        return self._blocks[number]
