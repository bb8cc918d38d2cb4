"""Causal masks read from a table equal those computed; windows count positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace.models.cache import BLOCK, BUCKET, extent
from outpace.models.masks import CausalTable, additive, visible, within

CPU = torch.device("cpu")


def computed(lengths, rows, length, repeats):
    seen = visible(torch.tensor(lengths), rows, length, None)
    return additive(seen, torch.float32).repeat_interleave(repeats, 2)


@given(
    st.integers(0, 700),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, BLOCK),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_a_mask_from_the_table_equals_its_computed_twin(base, more, rows, repeats, padding):
    table = CausalTable(repeats, torch.float32, CPU)
    table([3], 1, BUCKET, 0)  # a table that has to grow
    length = extent(base, rows)
    lengths = [n for n in (base, *(base + m for m in more)) if extent(n, rows) == length]
    mask = table(lengths, rows, length, padding)
    own = mask[:, :, : rows * repeats]
    assert torch.equal(own, computed(lengths, rows, length, repeats))
    assert mask.shape[2] == rows * repeats + padding
    assert (mask[:, :, rows * repeats :] >= own[:, :, -1:]).all()  # padding sees no less
    beyond = computed([n + 1 for n in lengths], rows, length, repeats)
    assert not torch.equal(own, beyond)


def test_a_causal_block_is_a_tree_without_branches():
    tree = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    starts = torch.tensor([3, 9])
    assert torch.equal(visible(starts, 5, 64, None), visible(starts, 5, 64, tree))


def test_a_window_counts_positions_not_indices():
    """Two nodes of a tree at one position are equally far from what lies before."""
    positions = torch.tensor([[5, 6, 6, 7]])
    near = within(3, torch.tensor([5]), positions, 12, 4)[0]
    seen = [row.nonzero().flatten().tolist() for row in near[:, :9]]
    assert seen[0] == [3, 4, 5, 6, 7, 8]
    assert seen[1] == [4, 5, 6, 7, 8] == seen[2]
    assert seen[3] == [5, 6, 7, 8]
