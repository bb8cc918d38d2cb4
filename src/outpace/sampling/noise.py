"""Keyed noise: a uniform is a pure function of (seed, stream, position, index).

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). There is no state: a request's noise depends neither
on its neighbours in the batch nor on scheduling, and no two purposes ever share
a uniform, because each has its own stream.

Draft and acceptance noise is keyed by the position at which the round begins
and the node's index, so a discarded draft's noise is never used again, which
rules that look ahead (block verification) rely on. The target's draw is keyed
by the absolute position of the token it emits, and so are races, where draft
and target share noise on purpose.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]


class Stream(IntEnum):
    """Separate purposes never share noise."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    RACE = 4


_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Four 32-bit words for each counter of four 32-bit words.

    Args:
        counter: arrays of uint64, or tensors of int64 (whose products wrap to the same bits).
        key: two 32-bit words, numbers or the same kind of array.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((b >> 32) & _MASK) ^ c1 ^ k0,
            b & _MASK,
            ((a >> 32) & _MASK) ^ c3 ^ k1,
            a & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform_bits(seed: Any, position: Any, stream: Any, index: Any) -> Any:
    """53 random bits for each of these, which broadcast together, all arrays or all tensors."""
    counter = (index, position & _MASK, stream, (position >> 32) & _MASK)
    low, high, _, _ = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return (high << 21) ^ (low >> 11)


def uniforms(seed: int, positions: U64, streams: U64, indices: U64) -> F64:
    """Uniforms on [0, 1) with 53 bits, one per (position, stream, index) triple.

    Args:
        positions, streams, indices: arrays that broadcast together.
    """
    positions, streams, indices = np.broadcast_arrays(positions, streams, indices)
    uniform: F64 = uniform_bits(seed, positions, streams, indices).astype(np.float64) * 2.0**-53
    return uniform


class RequestNoise:
    """The noise of one request, computed for many positions at a time, and more indices than
    were asked for: what a round asks for changes, and a call takes as long for 16 as for one."""

    BLOCK, LEAST = 128, 16

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._width = self.LEAST
        self._blocks: dict[int, F64] = {}  # block number -> [BLOCK, 2 * width + 1]

    def at(self, stream: Stream, position: int, indices: int) -> F64:
        """Uniforms `[indices]` of one position (stream TARGET has index 0 only)."""
        if indices > self._width:
            self._width = max(indices, 2 * self._width)
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
