"""Greedy multi-path block verification: the best of several paths, verified as a block.

"Greedy multi-path block verification for faster decoding in speculative sampling",
2026 (arXiv 2602.16961). K paths were drawn independently from one draft. The tokens
behind every prefix have a strict order, and of the paths the largest is taken, token
by token from the left. With F(X) the draft's mass of smaller prefixes of X's length
and q(X) its own, X is the beginning of the chosen path with probability

    (F + q)^K - F^K = q S(F, q),   S(F, q) = Σ_j (F + q)^j F^(K-1-j), j < K

so its next token y, before which lies F(Xy) = F(X) + q(X) Σ_{z < y} q(z|X), has the law

    q~(y|X) = q(y|X) S(F(Xy), q(Xy)) / S(F(X), q(X))

and the chosen path is a chain drawn from q~, which block verification keeps the law
for, whatever the order. Ours is ascending by p/q, in float32, of equals by id: it
favours what the target wants. F and q are kept divided by F + q, so that nothing
underflows. With one path it is block verification, and where p is near q more paths
accept less: their choice skews a law that was right.

Where paths begin alike, the rows of the first of them count for all, so that copies that
were rounded differently do not matter. Where a path ends must follow from its own
tokens, or be the same for all: with lengths that are set path by path, the law is lost.

Tokens that were certain are no draws: those paths are verified by traversal.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Rule
from ..models.base import upload
from ..types import Draft, Draw, Independent, Law, PointMass, Rows, Shape, Tree
from .base import Noise, Verdict, without_tensors
from .block import judge_chains
from .traversal import TraversalVerifier


class MultiPathVerifier(TraversalVerifier):
    """Exact for paths that were drawn independently, and for point masses."""

    name: ClassVar[str] = "multipath"
    laws: ClassVar[tuple[type[Law], ...]] = (PointMass, Independent)
    siblings: ClassVar[Draw] = "with"
    takes: ClassVar[Shape] = Shape.PATHS

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        certain = isinstance(draft.law, PointMass)
        if certain or all(tree.is_chain for tree in draft.trees):
            return super().__call__(p, draft, noise)
        verdict = without_tensors(Rule.MULTIPATH, p, draft, noise)
        return verdict or _judge_paths(p, draft, noise)


def _judge_paths(p: Tensor, draft: Draft, noise: Noise) -> Verdict:
    assert isinstance(draft.law, Rows)
    paths = upload(_paths(draft.trees), p.device)  # [D, B, K]
    choice = _Choice(p, draft.law.q, draft.tokens, paths[0] >= 0)
    steps = [choice.step(here) for here in paths]
    rows = torch.stack([*(row for row, _ in steps), choice.row()], 1)  # [B, D + 1, V]
    laws = torch.stack([law for _, law in steps], 1)
    nodes = paths[:, choice.all, choice.best].T  # [B, D]
    at = nodes.clamp_min(0)
    alone = Noise(noise.accept.gather(1, at), noise.target)
    tokens, lengths = draft.tokens.gather(1, at), (nodes >= 0).sum(1)
    judged = judge_chains(rows, laws, tokens, lengths, alone)
    path = torch.where(judged.path >= 0, nodes, -1)
    behind = draft.tokens.shape[1] - path.shape[1]
    return Verdict(F.pad(path, (0, behind), value=-1), judged.accepted, judged.token)


class _Choice:
    """The largest path of each sequence, found step by step.

    Attributes:
        all: `[B]`, every sequence.
        best: `[B]` the first path that has the chosen beginning, which is the largest so far.
    """

    def __init__(self, p: Tensor, q: Tensor, tokens: Tensor, open_: Tensor) -> None:
        self._p, self._q, self._tokens = p, q, tokens
        self.all = torch.arange(len(p), device=p.device)
        self.best = torch.zeros_like(self.all)
        self._row = torch.zeros_like(self.all)
        self._open = open_  # [B, K] paths that have the chosen beginning
        self._count, self._most = open_.sum(1, keepdim=True), open_.shape[1]
        self._smaller = torch.zeros_like(self.all, dtype=torch.float64)  # F / (F + q)
        self._own = torch.ones_like(self._smaller)  # q / (F + q)

    def row(self) -> Tensor:
        """The target's `[B, V]` behind the chosen beginning."""
        return self._p[self.all, self._row].double()

    def step(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the next token.

        Args:
            nodes: `[B, K]`, each path's next one; -1 behind its end.

        Returns:
            The target's row and q~ `[B, V]` behind what was chosen before.
        """
        p, open_, at = self.row(), self._open & (nodes >= 0), nodes.clamp_min(0)
        first = at.gather(1, open_.int().argmax(1, keepdim=True)).squeeze(1)
        q = self._q[self.all, first].double()
        order = torch.where(q > 0, p / q, -1.0).float().sort(dim=1, stable=True).indices
        places = torch.arange(p.shape[1], device=p.device).expand_as(order)
        rank = torch.zeros_like(order).scatter_(1, order, places)
        sorted_ = q.gather(1, order)
        before = torch.zeros_like(q).scatter_(1, order, sorted_.cumsum(1) - sorted_)
        ranks = rank.gather(1, self._tokens.gather(1, at)).masked_fill(~open_, -1)
        best = ranks.argmax(1)
        law = self._skewed(q, before)
        self._open = open_ & (ranks == ranks.gather(1, best.unsqueeze(1)))
        self._go_on(best, at[self.all, best], open_.any(1), q, before)
        return p, law

    def _skewed(self, q: Tensor, before: Tensor) -> Tensor:
        """q~ of q and the mass before each token."""
        f, g = self._smaller.unsqueeze(1), self._own.unsqueeze(1)
        grown = self._over(f + g * before, g * q)
        return q * torch.nan_to_num(grown / self._over(f, g))

    def _over(self, f: Tensor, g: Tensor) -> Tensor:
        """S(f, g) = ((f + g)^K - f^K) / g, without cancellation."""
        total = power = torch.ones_like(f)
        for j in range(1, self._most):
            power = power * (f + g)
            total = torch.where(j < self._count, total * f + power, total)
        return total

    def _go_on(self, best: Tensor, node: Tensor, goes: Tensor, q: Tensor, before: Tensor) -> None:
        """Take the best paths' next nodes `[B]`, where there are any."""
        x = self._tokens[self.all, node]
        smaller = self._smaller + self._own * before[self.all, x]
        own = self._own * q[self.all, x]
        there = goes & (smaller + own > 0)
        self._smaller = torch.where(there, smaller / (smaller + own), self._smaller)
        self._own = torch.where(there, own / (smaller + own), self._own)
        self.best = torch.where(goes, best, self.best)
        self._row = torch.where(goes, node + 1, self._row)


def _paths(trees: tuple[Tree, ...]) -> Tensor:
    """`[D, B, K]` int64: the nodes of each sequence's paths from the root, -1 behind their ends."""
    found = []
    for tree in trees:
        paths, last = list[list[int]](), dict[int, list[int]]()
        for node, parent in enumerate(tree.parents):
            path = last.pop(parent, None) if parent >= 0 else None
            if path is None:
                path = []
                paths.append(path)
            path.append(node)
            last[node] = path
        found.append(paths)
    deep, wide = max(t.depth for t in trees), max(map(len, found))
    out = [[[-1] * wide for _ in trees] for _ in range(deep)]
    for b, paths in enumerate(found):
        for k, path in enumerate(paths):
            for d, node in enumerate(path):
                out[d][b][k] = node
    return torch.tensor(out)
