"""The exact law of one round, by enumerating a verifier's noise as a black box.

The verifier is only ever called. Where its decisions change is found by
bisection in the noise, down to neighbouring floating-point numbers; the
measures of the cells between those points are the probabilities. Nothing of
the rule's own arithmetic is repeated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.trees import chain
from outpace.types import Draft, PointMass, Rows, Tree
from outpace.verifiers import Noise, Verdict

TOP = 1 - 2.0**-53  # the largest uniform there is
Table = Callable[[tuple[int, ...]], Tensor]  # prefix -> row [V]


class NotIndependent(Exception):
    """A verifier uses one uniform for two purposes."""


@dataclass(frozen=True)
class Drafted:
    """One possible draft: its probability, tokens, and reported rows (None: point mass)."""

    probability: float
    tokens: tuple[int, ...]
    rows: tuple[Tensor, ...] | None


def drafts_of(q: Table, k: int, vocab: int, report: Table | None = None) -> list[Drafted]:
    """Every chain of K tokens that q can draw; `report` are the rows it claims (q itself)."""
    found = []
    for tokens in itertools.product(range(vocab), repeat=k):
        probability = 1.0
        for i, token in enumerate(tokens):
            probability *= float(q(tokens[:i])[token])
        if probability > 0:
            rows = tuple((report or q)(tokens[:i]) for i in range(k))
            found.append(Drafted(probability, tokens, rows))
    return found


class RoundLaw:
    """The law of what one round emits: `[(emitted tokens, probability)]` in `emitted`."""

    def __init__(self, verifier, p: Table, drafts: Sequence[Drafted], vocab: int) -> None:
        self._verifier, self._vocab = verifier, vocab
        self.emitted: dict[tuple[int, ...], float] = {}
        for length in sorted({len(d.tokens) for d in drafts}):
            self._add([d for d in drafts if len(d.tokens) == length], length, p)

    def _add(self, drafts: list[Drafted], k: int, p: Table) -> None:
        self._k = k
        tokens = torch.tensor([d.tokens for d in drafts], dtype=torch.int64)
        self._tokens = tokens.reshape(len(drafts), k)
        self._p = torch.stack(
            [torch.stack([p(d.tokens[:i]) for i in range(k + 1)]) for d in drafts]
        )
        point = drafts[0].rows is None
        self._q = None
        if not point and k:
            self._q = torch.stack([torch.stack(d.rows) for d in drafts])  # type: ignore[arg-type]
        for c, (cells, tops) in enumerate(zip(*self._cells(), strict=True)):
            for (measure, path, _), points in zip(cells, tops, strict=True):
                edges = [0.0, *points, 1.0]
                for y in range(self._vocab):
                    mass = drafts[c].probability * measure * max(0.0, edges[y + 1] - edges[y])
                    if mass:
                        key = (*(drafts[c].tokens[n] for n in path), y)
                        self.emitted[key] = self.emitted.get(key, 0.0) + mass

    def _call(self, rows: Tensor, accept: Tensor, target: Tensor) -> Verdict:
        """Run the verifier for these drafts with this noise; target noise is one per row."""
        law = PointMass() if self._q is None else Rows(self._q[rows])
        draft = Draft(self._tokens[rows], law, (chain(self._k),) * len(rows))
        noise = Noise(accept, target.unsqueeze(1).repeat(1, self._k + 1))
        return self._verifier(self._p[rows], draft, noise)

    def _cells(self):
        """Per draft: [(measure, path, inner point)] and per cell the V - 1 breakpoints."""
        count, k = len(self._tokens), self._k
        thresholds = self._thresholds()
        rows, accept, info = [], [], []
        for c in range(count):
            for bits in itertools.product((True, False), repeat=k):
                edges = [
                    (0.0, float(t)) if b else (float(t), 1.0)
                    for b, t in zip(bits, thresholds[c], strict=True)
                ]
                measure = 1.0
                for low, high in edges:
                    measure *= high - low
                if measure > 0:
                    rows.append(c)
                    accept.append([(low + high) / 2 for low, high in edges])
                    info.append((c, measure, edges))
        index = torch.tensor(rows)
        inner = torch.tensor(accept, dtype=torch.float64).reshape(len(rows), k)
        middle = self._call(index, inner, torch.full((len(rows),), 0.5, dtype=torch.float64))
        points = self._breakpoints(index, inner)
        self._check_cells(index, info, middle, points)
        cells: list[list] = [[] for _ in range(count)]
        tops: list[list] = [[] for _ in range(count)]
        for row, (c, measure, _) in enumerate(info):
            path = middle.path[row][: int(middle.accepted[row])].tolist()
            cells[c].append((measure, path, inner[row]))
            tops[c].append(points[row].tolist())
        return cells, tops

    def _thresholds(self) -> Tensor:
        """`[C, K]`: node i is accepted (those before it being so) iff its uniform is below."""
        count, k = self._tokens.shape
        rows = torch.arange(count).repeat_interleave(k)
        node = torch.arange(k).repeat(count)
        before = node.unsqueeze(1) > torch.arange(k)
        here = node.unsqueeze(1) == torch.arange(k)

        def accepted(u: Tensor) -> Tensor:
            noise = torch.where(before, 0.0, TOP).double()
            noise = torch.where(here, u.unsqueeze(1), noise)
            middle = torch.full((len(rows),), 0.5, dtype=torch.float64)
            return self._call(rows, noise, middle).accepted > node

        if not count * k:
            return torch.zeros(count, k, dtype=torch.float64)
        low, high = torch.zeros(len(rows)).double(), torch.full((len(rows),), TOP).double()
        never, always = ~accepted(low), accepted(high)
        for _ in range(80):
            mid = (low + high) / 2
            yes = accepted(mid)
            low, high = torch.where(yes, mid, low), torch.where(yes, high, mid)
        found = torch.where(always, 1.0, torch.where(never, 0.0, high))
        return found.reshape(count, k)

    def _breakpoints(self, rows: Tensor, accept: Tensor) -> Tensor:
        """`[R, V - 1]`: below breakpoint y the last token is at most y."""
        vocab = self._vocab
        wide = rows.repeat_interleave(vocab - 1)
        noise = accept.repeat_interleave(vocab - 1, 0)
        y = torch.arange(vocab - 1).repeat(len(rows))
        low, high = torch.zeros(len(wide)).double(), torch.full((len(wide),), TOP).double()
        always = self._call(wide, noise, high).token <= y
        never = self._call(wide, noise, low).token > y
        for _ in range(80):
            mid = (low + high) / 2
            yes = self._call(wide, noise, mid).token <= y
            low, high = torch.where(yes, mid, low), torch.where(yes, high, mid)
        found = torch.where(always, 1.0, torch.where(never, 0.0, high))
        return found.reshape(len(rows), vocab - 1)

    def _check_cells(self, rows: Tensor, info: list, middle: Verdict, points: Tensor) -> None:
        """Random noise within each cell decides as the cell does: the noises are independent."""
        generator = torch.Generator().manual_seed(0)
        edges = torch.tensor([i[2] for i in info], dtype=torch.float64).reshape(len(info), -1, 2)
        for _ in range(3):
            u = torch.rand(len(info), self._k, generator=generator, dtype=torch.float64)
            accept = edges[..., 0] + u * (edges[..., 1] - edges[..., 0])
            target = torch.rand(len(info), generator=generator, dtype=torch.float64)
            verdict = self._call(rows, accept, target)
            expected = (target.unsqueeze(1) >= points).sum(1)
            near = (target.unsqueeze(1) - points).abs().amin(1) < 1e-9
            if not torch.equal(verdict.accepted, middle.accepted):
                raise NotIndependent("a decision depends on noise of another purpose")
            if not ((verdict.token == expected) | near).all():
                raise NotIndependent("the last token depends on acceptance noise")


def worst_error(verifier, p: Table, drafts: Sequence[Drafted], vocab: int) -> float:
    """Largest deviation from the target's law over all sequences of the longest round.

    A round that emits fewer tokens is continued from p.
    """
    law = RoundLaw(verifier, p, drafts, vocab).emitted
    return error_of(law, p, max(len(d.tokens) for d in drafts) + 1, vocab)


def error_of(law: dict[tuple[int, ...], float], p: Table, length: int, vocab: int) -> float:
    """The same of a law that was enumerated."""
    worst = abs(sum(law.values()) - 1)
    for sequence in itertools.product(range(vocab), repeat=length):
        got, rest = 0.0, 1.0
        for m in range(length, 0, -1):
            got += law.get(sequence[:m], 0.0) * rest
            rest *= float(p(sequence[: m - 1])[sequence[m - 1]])
        worst = max(worst, abs(got - rest))
    return worst


def impossible_at_zero(verifier, p: Table, drafts: Sequence[Drafted], vocab: int) -> list:
    """Tokens with p = 0 that are emitted when every uniform is exactly 0."""
    found = []
    for d in drafts:
        k = len(d.tokens)
        law = PointMass() if d.rows is None else Rows(torch.stack(d.rows).unsqueeze(0))
        draft = Draft(torch.tensor([d.tokens]).reshape(1, k), law, (chain(k),))
        rows = torch.stack([p(d.tokens[:i]) for i in range(k + 1)]).unsqueeze(0)
        zeros = torch.zeros(1, k + 1, dtype=torch.float64)
        verdict = verifier(rows, draft, Noise(zeros[:, :k], zeros))
        n = int(verdict.accepted)
        emitted = [*d.tokens[:n], int(verdict.token)]
        found += [(emitted, i) for i, t in enumerate(emitted) if float(rows[0, i, t]) == 0]
    return found


def law_by_depth(verifier, p: Table, tokens: Sequence[int], tree: Tree, vocab: int) -> dict:
    """What one round emits of a certain draft, by rules that use the target's noise alone.

    As above nothing but the rule's answers is used: at each depth, with noise that led there,
    the points at which the next token changes are found by bisection.
    """
    paths = [(), *(_path_to(tree, n) for n in range(len(tree)))]
    rows = torch.stack([p(tuple(tokens[n] for n in path)) for path in paths]).unsqueeze(0)
    draft = Draft(torch.tensor([list(tokens)]).view(1, len(tree)), PointMass(), (tree,))

    def emitted(noise: Sequence[float]) -> tuple[int, ...]:
        u = torch.full((1, len(tree) + 1), 0.5, dtype=torch.float64)
        u[0, : len(noise)] = torch.tensor(noise, dtype=torch.float64)
        verdict = verifier(rows, draft, Noise(u[:, :-1], u))
        path = verdict.path[0, : int(verdict.accepted)].tolist()
        return (*(tokens[n] for n in path), int(verdict.token))

    def point(noise: list[float], depth: int, y: int) -> float:
        """Below it the token at this depth is at most y."""
        low, high = 0.0, TOP
        if emitted([*noise, high])[depth] <= y:
            return 1.0
        if emitted([*noise, low])[depth] > y:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            below = emitted([*noise, middle])[depth] <= y
            low, high = (middle, high) if below else (low, middle)
        return high

    law: dict[tuple[int, ...], float] = {}

    def go(noise: list[float], measure: float) -> None:
        depth = len(noise)
        edges = [0.0, *(point(noise, depth, y) for y in range(vocab - 1)), 1.0]
        for low, high in itertools.pairwise(edges):
            if high <= low:
                continue
            inner = [*noise, (low + high) / 2]
            said = emitted(inner)
            if len(said) == depth + 1:
                law[said] = law.get(said, 0.0) + measure * (high - low)
            else:
                go(inner, measure * (high - low))

    go([], 1.0)
    return law


def _path_to(tree: Tree, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_path_to(tree, tree.parents[node]), node)
