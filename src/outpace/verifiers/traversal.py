"""Traversal verification: a tree's paths judged jointly, from the leaves up.

Weng, Mei, Zhang, Zhao et al., "Traversal verification for speculative tree
decoding", 2025 (arXiv 2505.12398), algorithm 2. Every node u has weights over the
tokens behind it. The root's are p; those of a node that is reached are m p with

    m = min(1, w(x) / q(x)),   w the parent's weights, x ~ q the node's token

The children of a node are visited in turn, each with all that is below it. After a
child where nothing was accepted, and with m the mass of the weights w of u,

    w <- R / (ΣR + 1 - m),   R = (w - q)+

When no child is left, the node itself is tested: with probability m, the mass of its
weights, the path ends there and one more token is drawn from them. The root always
passes. Law: the target's, for rows that are each node's law given its path and its
earlier siblings, so with and without replacement. A node is asked only when all below
it has failed, so nearly always more is accepted than going down by token verification;
where below the root a younger sibling has children, it may be less (found by
enumeration). On chains it is block verification, decision by decision.

The paper draws children without replacement and strikes a rejected one out of q;
here that is in the rows. Where ΣR + 1 - m is 0 a rejection has probability 0, and the
weights stay. The comparison is strict, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels import Rule
from ..models.base import upload
from ..sampling import categorical
from ..types import Draft, Shape, Tree
from .base import Noise, Verdict, chances_of, laws_of, parents_of, without_tensors
from .block import BlockVerifier


class TraversalVerifier(BlockVerifier):
    """Exact for chains and trees, for point masses and for rows; block verification of trees."""

    name: ClassVar[str] = "traversal"
    takes: ClassVar[Shape] = Shape.TREE

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        if all(tree.is_chain for tree in draft.trees):
            return super().__call__(p, draft, noise)
        verdict = without_tensors(Rule.TRAVERSAL, p, draft, noise)
        return verdict or _Traversal(p, draft, noise).verdict()


class _Traversal:
    """All sequences at once, each in the order of its own tree; on the device there is no wait.

    Weights are kept per depth, `[B, D + 2, V]` times a scale. The last place is where
    sequences write that have nothing to do.
    """

    def __init__(self, p: Tensor, draft: Draft, noise: Noise) -> None:
        self.p, self.draft, self.noise = p, draft, noise
        self.rows = torch.arange(len(p), device=p.device)
        self.chances = chances_of(draft)
        self.nowhere = 1 + max(tree.depth for tree in draft.trees)
        size = len(p), self.nowhere + 1
        self.weights = torch.zeros(*size, p.shape[-1], dtype=torch.float64, device=p.device)
        self.weights[:, 0] = p[:, 0]
        self.scale, self.mass = (torch.ones_like(self.weights[:, :, 0]) for _ in range(2))
        self.end = torch.full_like(self.rows, -1)
        self.depth = torch.zeros_like(self.rows)  # of the end

    def verdict(self) -> Verdict:
        for enters, nodes, depths in _schedule(self.draft.trees, self.p.device):
            idle = (nodes < 0) | (self.end >= 0)
            (self._enter if enters else self._leave)(nodes.clamp_min(0), depths, idle)
        parents, kept, at = parents_of(self.draft), list[Tensor](), self.end
        for node in reversed(range(parents.shape[1])):
            kept.append(at == node)
            at = torch.where(kept[-1], parents[:, node], at)
        row, u = self.weights[self.rows, self.depth], self.noise.target[self.rows, self.depth]
        return Verdict.through(torch.stack(kept[::-1], 1), categorical(row, u))

    def _enter(self, nodes: Tensor, depths: Tensor, idle: Tensor) -> None:
        """A node's first weights, m p."""
        rows, above, here = self.rows, depths - 1, torch.where(idle, self.nowhere, depths)
        wanted = self.scale[rows, above] * self.weights[rows, above, self.draft.tokens[rows, nodes]]
        chance = self.chances[rows, nodes]
        mass = torch.where(chance > 0, wanted / chance, 0.0).clamp_max(1)
        self.weights[rows, here] = self.p[rows, nodes + 1].double()
        self.scale[rows, here] = self.mass[rows, here] = mass

    def _leave(self, nodes: Tensor, depths: Tensor, idle: Tensor) -> None:
        """The test of a node whose children have failed, and what its failure leaves above."""
        rows, above = self.rows, depths - 1
        passes = ~idle & (self.noise.accept[rows, nodes] < self.mass[rows, depths])
        self.end = torch.where(passes, nodes, self.end)
        self.depth = torch.where(passes, depths, self.depth)
        law = laws_of(self.draft, nodes, self.p.shape[-1])
        weights = self.scale[rows, above].unsqueeze(1) * self.weights[rows, above]
        rest = (weights - law).clamp_min_(0)
        over = rest.sum(1)
        whole = over + (1 - self.mass[rows, above])
        there = torch.where(idle | passes | ~(whole > 0), self.nowhere, above)
        self.weights[rows, there] = rest
        self.scale[rows, there] = 1 / whole
        self.mass[rows, there] = over / whole


def _schedule(
    trees: tuple[Tree, ...], device: torch.device
) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """Visits in the order of all trees: whether nodes are entered or left, which, their depths.

    Both are `[B]`; where a tree has nothing to do they are -1 and 1.
    """
    orders = [list(_visits(tree)) for tree in trees]
    done, entering, columns = [0] * len(trees), list[bool](), list[list[tuple[int, int]]]()
    while any(i < len(order) for i, order in zip(done, orders, strict=True)):
        ahead = [o[i] if i < len(o) else None for i, o in zip(done, orders, strict=True)]
        enters = any(visit is not None and visit[0] for visit in ahead)
        takes = [visit is not None and visit[0] == enters for visit in ahead]
        entering.append(enters)
        columns.append([v[1:] if v and t else (-1, 1) for v, t in zip(ahead, takes, strict=True)])
        done = [i + t for i, t in zip(done, takes, strict=True)]
    nodes, depths = upload(torch.tensor(columns).permute(2, 0, 1).contiguous(), device)
    return zip(entering, nodes, depths, strict=True)


def _visits(tree: Tree) -> Iterator[tuple[bool, int, int]]:
    """Depth first, each node twice: whether it is entered (or left), the node, its depth."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, parent in enumerate(tree.parents):
        children[parent + 1].append(node)
    todo = [(True, node) for node in reversed(children[0])]
    while todo:
        enters, node = todo.pop()
        yield enters, node, tree.depths[node]
        if enters:
            todo.append((False, node))
            todo += [(True, child) for child in reversed(children[node + 1])]
