"""Keyed noise: the generator is Philox4x32-10, and no two purposes share a uniform."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outpace.sampling import RequestNoise, Stream, uniforms
from outpace.sampling.noise import philox

# Known answers published with the Random123 library (philox4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    words = philox(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in words) == answer


def one(seed: int, stream: int, position: int, index: int) -> float:
    """The slow twin: one uniform at a time."""
    arrays = (np.array([x], np.uint64) for x in (position, stream, index))
    return float(uniforms(seed, *arrays)[0])


@given(
    st.integers(0, 2**64 - 1),
    st.lists(
        st.tuples(
            st.sampled_from([Stream.DRAFT, Stream.ACCEPT, Stream.TARGET]),
            st.integers(0, 300),
            st.integers(1, 9),
        ),
        max_size=6,
    ),
)
def test_blocks_equal_the_twin_in_any_order(seed, asked):
    noise = RequestNoise(seed)
    for stream, position, count in asked:
        if stream is Stream.TARGET:
            got = noise.along(position, count)
            want = [one(seed, stream, position + i, 0) for i in range(count)]
        else:
            got = noise.at(stream, position, count)
            want = [one(seed, stream, position, i) for i in range(count)]
        assert got.tolist() == want


def test_what_a_round_asks_for_may_change(monkeypatch):
    """K goes up and down within a text: that computes nothing anew, but for what is longer than
    twice all before."""
    calls = []
    monkeypatch.setattr(
        "outpace.sampling.noise.uniforms", lambda *a: (calls.append(a), uniforms(*a))[1]
    )
    noise = RequestNoise(3)
    for position, count in enumerate([1, 4, 2, RequestNoise.LEAST, 5, 1]):
        noise.at(Stream.DRAFT, position, count)
        noise.at(Stream.ACCEPT, position, count)
        noise.along(position, count + 1)
    assert len(calls) == 1
    for more in range(1, RequestNoise.LEAST + 1):
        noise.at(Stream.DRAFT, 0, RequestNoise.LEAST + more)
    assert len(calls) == 2


def test_no_uniform_is_used_twice():
    positions = np.arange(2000, dtype=np.uint64)[:, None, None]
    streams = np.array([1, 2, 3], np.uint64)[:, None]
    values = np.stack(
        [uniforms(s, positions, streams, np.arange(8, dtype=np.uint64)) for s in (0, 1, 2**40)]
    )
    assert len(np.unique(values)) == values.size
    assert values.min() >= 0
    assert values.max() < 1


def test_uniform_and_uncorrelated():
    positions = np.arange(50_000, dtype=np.uint64)[:, None]
    values = uniforms(5, positions, np.array([1, 2, 3], np.uint64), np.zeros(1, np.uint64))
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-6
    correlation = np.corrcoef(np.concatenate([values[1:], values[:-1]], 1).T)
    assert np.abs(correlation - np.eye(6)).max() < 0.03
