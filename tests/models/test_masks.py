"""The short way to a causal mask equals the general one; windows count positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from outpace.models.masks import additive, causal, visible, within

CPU = torch.device("cpu")


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_causal_equals_its_general_twin(lengths, rows, repeats, padding):
    length = max(lengths) + rows + 5
    seen = visible(lengths, rows, length, None, CPU)
    twin = F.pad(additive(seen, torch.float32).repeat(1, 1, repeats, 1), (0, 0, 0, padding))
    short = causal(lengths, rows, length, repeats, padding, torch.float32, CPU)
    assert torch.equal(short, twin)
    tree = torch.ones(len(lengths), rows, rows, dtype=torch.bool).tril()
    assert torch.equal(seen, visible(lengths, rows, length, tree, CPU))


def test_a_window_counts_positions_not_indices():
    """Two nodes of a tree at one position are equally far from what lies before."""
    positions = torch.tensor([[5, 6, 6, 7]])
    near = within(3, [5], positions, 12)[0]
    seen = [row.nonzero().flatten().tolist() for row in near[:, :9]]
    assert seen[0] == [3, 4, 5, 6, 7, 8]
    assert seen[1] == [4, 5, 6, 7, 8] == seen[2]
    assert seen[3] == [5, 6, 7, 8]
