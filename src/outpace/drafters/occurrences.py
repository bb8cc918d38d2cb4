"""Where runs of tokens stood before: the index behind n-gram and suffix drafters.

Every run of a few lengths is hashed, and the positions at which runs of one hash
end are chained, the newest first (the match finder of LZ77 compressors, Ziv and
Lempel, 1977). Tokens lie in a ring: what is oldest is overwritten, so memory is
bounded by construction, and nothing has to be deleted. A token costs a few writes
per length, whatever the index holds; so does a look-up per position it returns.
A chain may lead to what was overwritten, or to a run of the same hash: whoever
follows it compares tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

SEPARATOR = -1
"""Stands between texts, so that no run crosses from one into the next."""

_BASE = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_BULK = 64
"""So many tokens are better hashed at once."""


class Occurrences:
    """An index of the last `capacity` tokens of a growing text.

    Args:
        lengths: of the runs that can be looked up, the longest first.
        capacity: tokens that are kept, rounded up to a power of two; None keeps all.
    """

    def __init__(self, lengths: Sequence[int], capacity: int | None = None) -> None:
        self.lengths = tuple(lengths)
        self._keeps_all = capacity is None
        self._clear(capacity or _BULK)

    def _clear(self, capacity: int) -> None:
        self.capacity = 1 << max(6, (capacity - 1).bit_length())
        self.tokens = array("i", [SEPARATOR]) * self.capacity
        self.count = 0  # of all tokens there ever were
        self._mask = self.capacity - 1
        self._shift = 64 - self._mask.bit_length()
        self._chains = {n: _Chain(n, self.capacity) for n in self.lengths}

    @property
    def bytes_per_token(self) -> float:
        """Memory for each token of the capacity."""
        arrays = [self.tokens, *(a for c in self._chains.values() for a in (c.newest, c.older))]
        return sum(a.itemsize * len(a) for a in arrays) / self.capacity

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if self._keeps_all and self.count + len(tokens) >= self.capacity:
            tokens = [*self.tokens[: self.count], *tokens]
            self._clear(len(tokens) + 1)
        if len(tokens) < _BULK:
            for token in tokens:
                self._append(token)
            return
        for start in range(0, len(tokens), self.capacity):
            self._append_many(np.asarray(tokens[start : start + self.capacity], np.int32))

    def _append(self, token: int) -> None:
        tokens, mask, at = self.tokens, self._mask, self.count & self._mask
        for n, chain in self._chains.items():
            gone = tokens[(at - n) & mask] + 2
            chain.hash = (chain.hash * _BASE + token + 2 - gone * chain.power) & _WORD
            bucket = ((chain.hash * _BASE) & _WORD) >> self._shift
            chain.older[at] = chain.newest[bucket]
            chain.newest[bucket] = at
        tokens[at] = token
        self.count += 1

    def _append_many(self, new: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """The same for an array `[n]`, at most the capacity."""
        mask, count = self._mask, len(new)
        at = (np.arange(self.count, self.count + count) & mask).astype(np.int32)
        held = np.frombuffer(self.tokens, np.int32)
        longest = max(self.lengths)
        before = held[(np.arange(self.count - longest + 1, self.count)) & mask]
        text = np.concatenate([before, new]).astype(np.uint64) + np.uint64(2)
        for n, chain in self._chains.items():
            hashes = np.zeros(count, np.uint64)
            for back in range(n):
                part = text[longest - 1 - back : len(text) - back]
                hashes += part * np.uint64(pow(_BASE, back, 1 << 64))
            buckets = (hashes * np.uint64(_BASE)) >> np.uint64(self._shift)
            chain.link(at, buckets)
            chain.hash = int(hashes[-1])
        held[at] = new
        self.count += count

    def behind(self, length: int, most: int) -> Iterator[int]:
        """Where runs of the hash of the last `length` tokens end, the newest first.

        Args:
            most: positions to yield, at most.

        Yields:
            Positions in `tokens`, without the end of the text itself.
        """
        if self.count < length:
            return
        last = (self.count - 1) & self._mask
        chain = self._chains[length]
        yield from self._follow(chain, chain.older[last], most, 0)

    def after(self, run: Sequence[int], most: int) -> Iterator[int]:
        """The same for a run that need not be the text's end."""
        chain, value = self._chains[len(run)], 0
        for token in run:
            value = (value * _BASE + token + 2) & _WORD
        yield from self._follow(chain, chain.newest[((value * _BASE) & _WORD) >> self._shift], most)

    def _follow(self, chain: _Chain, at: int, most: int, age: int = -1) -> Iterator[int]:
        """Down a chain, as long as it leads to what is older than `age`."""
        mask, now = self._mask, self.count
        for _ in range(most):
            older = (now - 1 - at) & mask
            if at < 0 or older <= age:  # the chain's end was overwritten
                return
            yield at
            at, age = chain.older[at], older

    def matched(self, at: int, text: Sequence[int], most: int) -> int:
        """How many tokens up to position `at` are the last ones of a text, at most `most`.

        The newest token must be a separator, or the ring not be full: one end touches the other.
        """
        tokens, mask, n = self.tokens, self._mask, 0
        tail = text[-most:]
        if tokens[at + 1 - len(tail) : at + 1].tolist() == tail:
            return len(tail)
        for token in reversed(tail):
            if tokens[(at - n) & mask] != token:
                break
            n += 1
        return n

    def continuation(self, at: int, most: int) -> list[int]:
        """Up to `most` tokens behind a position, to the end of its text.

        Of the text that is still growing, what lies behind its end is what will stand
        there if it goes on to repeat itself.
        """
        start = (at + 1) & self._mask
        wanted = min(most, (self.count - start) & self._mask)
        found = self.tokens[start : start + wanted].tolist()
        if len(found) < wanted:
            found += self.tokens[: wanted - len(found)].tolist()
        if SEPARATOR in found:
            return found[: found.index(SEPARATOR)]
        while found and len(found) < most:
            found += found[: most - len(found)]
        return found


class _Chain:
    """Positions by the hash of the `length` tokens that end there."""

    def __init__(self, length: int, capacity: int) -> None:
        self.newest = array("i", [-1]) * capacity  # by hash
        self.older = array("i", [-1]) * capacity  # by position
        self.power = pow(_BASE, length, 1 << 64)
        self.hash = 0
        for _ in range(length):
            self.hash = (self.hash * _BASE + SEPARATOR + 2) & _WORD

    def link(
        self,
        at: np.ndarray[tuple[int], np.dtype[np.int32]],
        buckets: np.ndarray[tuple[int], np.dtype[np.uint64]],
    ) -> None:
        """Put positions at the head of their chains, in order."""
        newest, older = (np.frombuffer(a, np.int32) for a in (self.newest, self.older))
        order = np.argsort(buckets, kind="stable")
        sorted_, places = buckets[order], at[order]
        before = newest[sorted_]
        same = sorted_[1:] == sorted_[:-1]
        before[1:][same] = places[:-1][same]
        older[places] = before
        ends = np.append(~same, True)
        newest[sorted_[ends]] = places[ends]
