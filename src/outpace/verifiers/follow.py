"""Going down a draft along the tokens that the target wants: what rules without a ratio share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.base import upload
from ..types import Draft, Tree
from .base import Verdict


def follow(wanted: Sequence[int], tokens: Sequence[float], tree: Tree) -> list[int]:
    """The accepted path of one sequence.

    Args:
        wanted: N + 1 tokens of the target: entry 0 after the root, entry i + 1 after node i.
        tokens: of the draft's nodes.
    """
    path, at = list[int](), -1
    for node, parent in enumerate(tree.parents):  # parents come first
        if parent == at and tokens[node] == wanted[at + 1]:
            path.append(node)
            at = node
    return path


def judge(wanted: Tensor, draft: Draft) -> Verdict:
    """Follow wanted tokens `[B, N + 1]`; the last of them is the one that is not drafted."""
    n = draft.tokens.shape[1]
    rows = torch.cat([wanted, draft.tokens], 1).tolist()  # a host sync
    both = zip(rows, draft.trees, strict=True)
    paths = [follow(row[: n + 1], row[n + 1 :], tree) for row, tree in both]
    ends = [row[path[-1] + 1 if path else 0] for row, path in zip(rows, paths, strict=True)]
    return Verdict.of(paths, n, upload(torch.tensor(ends), wanted.device))
