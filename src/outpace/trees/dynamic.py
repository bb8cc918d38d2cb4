"""Trees that follow the drafting model's own probabilities.

Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees",
2024, section 4: a node is worth the product of the probabilities on the way to it, an
estimate of how likely it is to be accepted. Of each level the `width` worthiest nodes
get their likeliest children; in the end the worthiest `nodes` of all stay. Wang et
al., "OPT-Tree: speculative decoding with adaptive draft tree structure", 2024, shows that
these have the largest expected length, and stops where a level adds no more than δ
(`gain`) to it.

Dropping tokens after they were drawn would not be exact. So nothing is drawn here: the
children are the likeliest ones, certain given what stands before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OptionError
from ..types import Draw, Shape
from .growth import Block, Children, Grown
from .topology import check_nodes, tree_of


class DynamicBuilder:
    """Drafts of the worthiest nodes.

    Args:
        nodes: that stay.
        depth: of the longest path.
        width: nodes of a level that get children.
        branches: children that each gets.
        gain: tokens that a further level must add to the expected length; 0 goes on to `depth`.

    Raises:
        OptionError: a number that cannot be.
    """

    weighs = True
    shape = Shape.TREE
    draw: Draw = "top"

    def __init__(
        self, nodes: int, depth: int, width: int = 10, branches: int = 10, gain: float = 0.0
    ) -> None:
        self.nodes, self.depth = check_nodes(nodes), check_nodes(depth, "depth")
        self._width = min(check_nodes(width, "width"), nodes)
        self._branches = min(check_nodes(branches, "branches"), nodes)
        if not 0 <= gain < math.inf:
            raise OptionError(f"gain must be a number >= 0, not {gain} (0 goes on to the depth)")
        self._gain = gain

    def begin(self, budgets: Sequence[int], temperatures: Sequence[float]) -> DynamicGrowth:
        """Of a sequence that may go less deep the tree is smaller, too, by the same share."""
        budgets = [min(budget, self.depth) for budget in budgets]
        counts = [-(-self.nodes * budget // self.depth) for budget in budgets]
        return DynamicGrowth(budgets, counts, self._width, self._branches, self._gain)


class DynamicGrowth:
    """A draft that grows where it is likeliest to be accepted. See `Growth`."""

    nodes = None
    chains = None

    def __init__(
        self,
        budgets: Sequence[int],
        counts: Sequence[int],
        width: int,
        branches: int,
        gain: float,
    ) -> None:
        self.width = branches
        self._budgets, self._most, self._gain = list(budgets), width, gain
        self._counts = torch.tensor(counts).unsqueeze(1)  # [B, 1]
        self._largest = max(counts)
        self._depth = 0
        self._expected = [0.0] * len(budgets)
        # Of all candidates [B, C], level by level:
        self._tokens: list[Tensor] = []
        self._worth: list[Tensor] = []  # natural logs
        self._parents: list[Tensor] = []  # candidates
        # Of all that is read [B, R]:
        self._read: list[Tensor] = []  # candidates
        self._mask: Tensor | None = None

    def add(self, children: Children) -> Block | None:
        assert children.masses is not None
        batch, rows, width = children.tokens.shape
        worth = children.masses.double().clamp_max(0)  # where rounding made it more than certain
        worth = worth.masked_fill(worth.isnan(), -torch.inf)
        parents = worth.new_full((batch, rows), -1, dtype=torch.int64)
        if self._read:
            parents = self._read[-1]
            worth = worth + torch.cat(self._worth, 1).gather(1, parents).unsqueeze(-1)
        self._depth += 1
        over = torch.tensor([self._depth > budget for budget in self._budgets])
        worth = worth.flatten(1).masked_fill(over.unsqueeze(1).to(worth.device), -torch.inf)
        first = sum(t.shape[1] for t in self._tokens)
        self._tokens.append(children.tokens.flatten(1))
        self._worth.append(worth)
        self._parents.append(parents.repeat_interleave(width, 1))
        if self._gain:
            self._stop()
        if self._depth >= max(self._budgets):
            return None
        best = worth.topk(min(self._most, worth.shape[1]), -1).indices.sort(-1).values
        return self._block(best + first)

    def _stop(self) -> None:
        """Go no deeper where the last level added no more than `gain` to the expected length.

        Each sequence for itself: what others say may follow from noise of the same seed.
        """
        worth = torch.cat(self._worth, 1)
        best = worth.topk(min(self._largest, worth.shape[1]), -1).values.exp()
        expected = (best * self._within(best)).sum(-1).tolist()  # a host sync
        for b, (now, before) in enumerate(zip(expected, self._expected, strict=True)):
            if now - before <= self._gain:
                self._budgets[b] = min(self._budgets[b], self._depth)
        self._expected = expected

    def _within(self, ordered: Tensor) -> Tensor:
        """Which of the worthiest `[B, C]` stay for how many they are."""
        places = torch.arange(ordered.shape[1], device=ordered.device)
        return places < self._counts.to(ordered.device)

    def _block(self, best: Tensor) -> Block:
        """To read these candidates `[B, F]` behind what has been read."""
        batch, count = best.shape
        own = torch.eye(count, dtype=torch.bool, device=best.device).expand(batch, -1, -1)
        if self._mask is None:
            self._mask = own
        else:
            parents = torch.cat(self._parents, 1).gather(1, best)  # [B, F]
            row = self._row_of(parents)
            above = self._mask.gather(1, row.unsqueeze(-1).expand(-1, -1, self._mask.shape[1]))
            nothing = self._mask.new_zeros(batch, self._mask.shape[1], count)
            self._mask = torch.cat(
                [torch.cat([self._mask, nothing], 2), torch.cat([above, own], 2)], 1
            )
        done = sum(r.shape[1] for r in self._read)
        self._read.append(best)
        tokens = torch.cat(self._tokens, 1).gather(1, torch.cat(self._read, 1))
        depths = [torch.full((batch, r.shape[1]), d) for d, r in enumerate(self._read, 1)]
        return Block(tokens, torch.cat(depths, 1), self._mask, done)

    def _row_of(self, candidates: Tensor) -> Tensor:
        """Where candidates `[B, F]` were read, -1 for those that were not."""
        read = torch.cat(self._read, 1)
        count = sum(t.shape[1] for t in self._tokens)
        rows = read.new_full((len(read), count), -1)
        rows.scatter_(1, read, torch.arange(read.shape[1], device=read.device).expand_as(read))
        return rows.gather(1, candidates)

    def grown(self) -> Grown:
        worth, parents = torch.cat(self._worth, 1), torch.cat(self._parents, 1)
        # Of equally worthy ones the first: a child is worth no more than its parent, and behind it.
        order = worth.sort(stable=True, dim=-1, descending=True).indices[:, : self._largest]
        impossible = worth.gather(1, order).isinf() | ~self._within(order)
        kept = (order + impossible * worth.shape[1]).sort(-1).values % worth.shape[1]  # [B, N]
        rows = self._row_of(kept) if self._read else torch.full_like(kept, -1)
        possible = (~impossible).sum(-1, keepdim=True).expand_as(kept)
        seen = torch.stack([kept, parents.gather(1, kept), rows, possible], 1)
        shapes, places = [], []
        for nodes, above, read, counts in seen.tolist():  # a host sync
            count = counts[0]
            place = {-1: -1} | {node: i for i, node in enumerate(nodes[:count])}
            shapes.append(tree_of([place[parent] for parent in above[:count]]))
            places.append(read[:count])
        return Grown(torch.cat(self._tokens, 1).gather(1, kept), None, tuple(shapes), tuple(places))
