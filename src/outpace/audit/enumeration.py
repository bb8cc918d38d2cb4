"""The exact law of what a round emits, by enumerating a rule's noise as a black box.

The rule is only ever called. Where its decisions change is found by bisection in
the noise, down to neighbouring floating-point numbers; the measures of the cells
between those points are the probabilities. Nothing of the rule's own arithmetic
is repeated here. What a cell is taken to decide is checked with random noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError, OutpaceError
from ..trees import chain
from ..types import Draft, Law, PointMass, Rows, Tree
from ..verifiers import Noise, Verdict, Verifier

TOP = 1 - 2.0**-53
"""The largest uniform there is."""

MOST_CELLS = 4096
"""Cells of one draft's acceptance noise, and parts of a function of one uniform."""

MOST_NUMBERS = 2**23
"""Of the rows that a rule is given at once."""

MOST_ITEMS = 2**16
"""Drafts, their nodes, and all extremes of the other nodes' noise."""

Emitted = dict[tuple[int, ...], float]
"""Probabilities of what a round emits."""

D = TypeVar("D", bound=Hashable)

Interval = tuple[float, float, D]
"""From, up to, and what is decided there."""


class NotEnumerableError(OutpaceError):
    """A rule does not decide as enumeration takes it to: one uniform serves two purposes."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Possible drafts of one shape.

    Attributes:
        probability: `[C]` of each.
        tokens: `[C, N]`.
        q: `[C, N, V]` the rows they are said to be drawn from; None for certain ones.
        p: `[C, N + 1, V]` the target's rows after the root and each node.
        tree: their shape.
        ids: `[V]` the tokens that columns and `tokens` stand for, if not for themselves.
    """

    probability: Tensor
    tokens: Tensor
    q: Tensor | None
    p: Tensor
    tree: Tree
    ids: Tensor | None = None

    def narrowed(self) -> Drafted:
        """The same without the tokens that no row has, but for the first and the last one."""
        wanted = (self.p > 0).any(0).any(0)
        if self.q is not None:
            wanted |= (self.q > 0).any(0).any(0)
        wanted[self.tokens.flatten()] = True
        wanted[[0, -1]] = True
        ids = wanted.nonzero().flatten()
        q = None if self.q is None else self.q[..., ids]
        tokens = torch.searchsorted(ids, self.tokens)
        return Drafted(self.probability, tokens, q, self.p[..., ids], self.tree, ids)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def judge(self, verifier: Verifier, which: Tensor, accept: Tensor, target: Tensor) -> Verdict:
        """Run the rule for drafts `which` `[M]` with noise `[M, N]` and `[M, N + 1]`."""
        most = max(1, MOST_NUMBERS // self.p[0].numel())
        if len(which) > most:
            parts = zip(*(torch.split(x, most) for x in (which, accept, target)), strict=True)
            said = [self.judge(verifier, *part) for part in parts]
            paths = [F.pad(v.path, (0, self.nodes - v.path.shape[1]), value=-1) for v in said]
            others = (torch.cat([getattr(v, f) for v in said]) for f in ("accepted", "token"))
            return Verdict(torch.cat(paths), *others)
        law: Law = PointMass() if self.q is None else Rows(self.q[which])
        draft = Draft(self.tokens[which], law, (self.tree,) * len(which))
        return verifier(self.p[which], draft, Noise(accept, target))

    def emitted(self, which: Tensor, verdict: Verdict) -> list[tuple[int, ...]]:
        """What a round emits of each."""
        columns = self.columns(which, verdict)
        if self.ids is None:
            return columns
        ids = self.ids.tolist()
        return [tuple(ids[c] for c in row) for row in columns]

    def columns(self, which: Tensor, verdict: Verdict) -> list[tuple[int, ...]]:
        """The same as columns of the rows."""
        decided = zip(
            self.tokens[which].tolist(),
            verdict.path.tolist(),
            verdict.accepted.tolist(),
            verdict.token.tolist(),
            strict=True,
        )
        return [(*(row[n] for n in path[:kept]), last) for row, path, kept, last in decided]


def intervals(
    decide: Callable[[Tensor, Tensor], list[D]],
    count: int,
    grid: int = 8,
    precision: float = 0.0,
) -> list[list[Interval[D]]]:
    """Where functions of a uniform are constant.

    Args:
        decide: what functions `[M]` decide at `[M]` uniforms.
        count: of functions.
        grid: points that are looked at first; a decision between two of them at
            which the same is decided is overlooked.
        precision: to which the points are found; 0 goes down to neighbouring numbers.

    Returns:
        For each function its intervals, ascending, which cover [0, 1).

    Raises:
        NotEnumerableError: there is no end of them, as where decisions are random.
    """
    at = [i / grid for i in range(grid)] + [TOP]
    everyone = torch.arange(count)
    seen = [decide(everyone, torch.full((count,), u, dtype=torch.float64)) for u in at]
    open_: list[tuple[int, float, float, D, D]] = [
        (item, at[i], at[i + 1], seen[i][item], seen[i + 1][item])
        for i in range(grid)
        for item in range(count)
        if seen[i][item] != seen[i + 1][item]
    ]
    points: list[list[tuple[float, D]]] = [[] for _ in range(count)]
    for _ in range(70):
        halves = [(low + high) / 2 for _, low, high, _, _ in open_]
        which = torch.tensor([item for item, *_ in open_], dtype=torch.int64)
        found = decide(which, torch.tensor(halves, dtype=torch.float64)) if open_ else []
        further = []
        for (item, low, high, below, above), half, here in zip(open_, halves, found, strict=True):
            if not low < half < high or high - low <= precision:
                points[item].append((high, above))
                continue
            if here != below:
                further.append((item, low, half, below, here))
            if here != above:
                further.append((item, half, high, here, above))
        open_ = further
        if len(open_) > MOST_CELLS * count:
            raise NotEnumerableError("what is decided changes wherever it is looked at")
    for item, _, high, _, above in open_:
        points[item].append((high, above))
    whole = []
    for item in range(count):
        edges = [(0.0, seen[0][item]), *sorted(points[item], key=lambda point: point[0])]
        ends = [low for low, _ in edges[1:]] + [1.0]
        whole.append([(low, end, here) for (low, here), end in zip(edges, ends, strict=True)])
    return whole


def inside(begin: float, end: float, precision: float = 0.0) -> float:
    """A point of an interval: its middle, or where that may be beyond it the beginning."""
    middle = (begin + end) / 2
    return middle if begin < middle < end - precision else begin


def round_law(verifier: Verifier, drafted: Sequence[Drafted]) -> Emitted:
    """What one round emits, over all drafts there are.

    Raises:
        OptionError: there are too many drafts.
        NotEnumerableError: noise is used for two purposes.
    """
    if any(len(d) * d.nodes * 2 ** max(0, d.nodes - 1) > MOST_ITEMS for d in drafted):
        raise OptionError(
            f"{max(map(len, drafted))} drafts of {max(d.nodes for d in drafted)} tokens are too "
            "many to enumerate: choose a smaller top_k or k, or audit by samples"
        )
    law: Emitted = {}
    for drafts in drafted:
        points = _accept_points(verifier, drafts)
        by = _by_target if not any(map(any, points)) else _by_both
        for emitted, mass in by(verifier, drafts, points):
            law[emitted] = law.get(emitted, 0.0) + mass
    return law


def _accept_points(verifier: Verifier, drafts: Drafted) -> list[list[set[float]]]:
    """For each draft and node, the points of its uniform at which a decision changes.

    Every other node's uniform is put at either end, in all combinations.
    """
    n = drafts.nodes
    ends = list(itertools.product((0.0, TOP), repeat=max(0, n - 1)))
    items = list(itertools.product(range(len(drafts)), range(n), ends))
    middle = torch.full((len(items), n + 1), 0.5, dtype=torch.float64)
    node = torch.tensor([item[1] for item in items], dtype=torch.int64)
    others = torch.tensor([[*e[:i], 0.0, *e[i:]] for _, i, e in items], dtype=torch.float64).view(
        len(items), n
    )
    which = torch.tensor([item[0] for item in items], dtype=torch.int64)

    def decide(some: Tensor, u: Tensor) -> list[tuple[int, ...]]:
        accept = others[some].scatter(1, node[some].unsqueeze(1), u.unsqueeze(1))
        verdict = drafts.judge(verifier, which[some], accept, middle[some])
        return _paths(verdict)

    points: list[list[set[float]]] = [[set() for _ in range(n)] for _ in range(len(drafts))]
    found = intervals(decide, len(items), grid=1) if items else []
    for (c, i, _), parts in zip(items, found, strict=True):
        points[c][i].update(low for low, _, _ in parts[1:])
    return points


def _paths(verdict: Verdict) -> list[tuple[int, ...]]:
    both = zip(verdict.path.tolist(), verdict.accepted.tolist(), strict=True)
    return [tuple(path[:kept]) for path, kept in both]


def _by_both(
    verifier: Verifier, drafts: Drafted, points: list[list[set[float]]]
) -> list[tuple[tuple[int, ...], float]]:
    """For rules that accept by one noise and draw the last token with another."""
    which, edges = [], []
    for c, nodes in enumerate(points):
        sides = [list(itertools.pairwise([0.0, *sorted(p), 1.0])) for p in nodes]
        cells = list(itertools.product(*sides))
        if len(cells) > MOST_CELLS:
            raise NotEnumerableError(f"a draft has {len(cells)} cells of acceptance noise")
        which += [c] * len(cells)
        edges += cells
    n = drafts.nodes
    index, bounds = torch.tensor(which), torch.tensor(edges, dtype=torch.float64)
    low, high = bounds[..., 0], bounds[..., 1]  # [M, N]
    inner = torch.tensor([[inside(*s) for s in cell] for cell in edges], dtype=torch.float64)

    def decide(some: Tensor, u: Tensor) -> list[tuple[int, ...]]:
        target = u.unsqueeze(1).expand(-1, n + 1)
        return list(
            drafts.emitted(index[some], drafts.judge(verifier, index[some], inner[some], target))
        )

    parts = intervals(decide, len(index))
    _check_cells(verifier, drafts, index, (low, high), parts)
    mass = drafts.probability.double()[index] * (high - low).prod(1)
    return [
        (said, float(m) * (end - begin))
        for m, cell in zip(mass, parts, strict=True)
        for begin, end, said in cell
    ]


def _check_cells(
    verifier: Verifier,
    drafts: Drafted,
    index: Tensor,
    bounds: tuple[Tensor, Tensor],
    parts: list[list[Interval[tuple[int, ...]]]],
) -> None:
    """Random noise within each cell decides as the cell does: the noises are independent."""
    generator = torch.Generator().manual_seed(0)
    low, high = bounds
    for _ in range(3):
        u = torch.rand(low.shape, generator=generator, dtype=torch.float64)
        target = torch.rand(len(index), generator=generator, dtype=torch.float64)
        noises = low + u * (high - low), target.unsqueeze(1).expand(-1, drafts.nodes + 1)
        said = drafts.emitted(index, drafts.judge(verifier, index, *noises))
        for emitted, at, cell in zip(said, target.tolist(), parts, strict=True):
            begin, end, expected = next(part for part in cell if part[0] <= at < part[1])
            edge = min(at - begin, end - at) < 1e-9
            if emitted != expected and not edge:
                raise NotEnumerableError(
                    f"with other noise of the same cell {emitted} was emitted, not {expected}: a "
                    "decision depends on noise of another purpose"
                )


def _by_target(
    verifier: Verifier, drafts: Drafted, points: list[list[set[float]]]
) -> list[tuple[tuple[int, ...], float]]:
    """For rules that use the target's noise alone, one uniform per depth."""
    n = drafts.nodes
    generator = torch.Generator().manual_seed(0)
    law: list[tuple[tuple[int, ...], float]] = []
    items: list[tuple[int, tuple[float, ...], float]] = [
        (c, (), float(mass)) for c, mass in enumerate(drafts.probability)
    ]
    while items:
        depth = len(items[0][1])
        which = torch.tensor([c for c, _, _ in items])
        noise = torch.tensor([u for _, u, _ in items], dtype=torch.float64).view(len(items), depth)

        def emitted(
            some: Tensor, u: Tensor, which: Tensor = which, noise: Tensor = noise
        ) -> list[tuple[int, ...]]:
            head = torch.cat([noise[some], u.unsqueeze(1)], 1)
            rest = torch.full((len(some), n - noise.shape[1]), 0.5, dtype=torch.float64)
            accept = torch.rand(len(some), n, generator=generator, dtype=torch.float64)
            verdict = drafts.judge(verifier, which[some], accept, torch.cat([head, rest], 1))
            return drafts.emitted(which[some], verdict)

        def decide(some: Tensor, u: Tensor, depth: int = depth) -> list[tuple[int, ...]]:
            return [said[: depth + 1] for said in emitted(some, u)]

        deeper = []
        for i, parts in enumerate(intervals(decide, len(items))):
            c, before, mass = items[i]
            chosen = [inside(begin, end) for begin, end, _ in parts]
            said = emitted(torch.full((len(parts),), i), torch.tensor(chosen, dtype=torch.float64))
            for (begin, end, expected), point, what in zip(parts, chosen, said, strict=True):
                if what[: depth + 1] != expected:
                    raise NotEnumerableError(
                        "what is emitted depends on acceptance noise after all"
                    )
                if len(what) == depth + 1:
                    law.append((what, mass * (end - begin)))
                else:
                    deeper.append((c, (*before, point), mass * (end - begin)))
        items = deeper
    return law


def worst_error(
    law: Emitted,
    p: Callable[[tuple[int, ...]], Tensor],
    length: int,
    ends: frozenset[int] = frozenset(),
) -> float:
    """Largest deviation from a target's law over all sequences of a length.

    A round that emitted fewer tokens is continued from the target.

    Args:
        p: rows `[V]` of the target after a prefix.
        ends: tokens behind which nothing counts.
    """
    said: Emitted = {}
    for emitted, mass in law.items():
        end = next((i + 1 for i, t in enumerate(emitted) if t in ends), length)
        _continue(said, emitted[: min(end, length)], mass, p, length, ends)
    target: Emitted = {}
    _continue(target, (), 1.0, p, length, ends)
    worst = abs(sum(law.values()) - 1)
    for sequence in said.keys() | target.keys():
        worst = max(worst, abs(said.get(sequence, 0.0) - target.get(sequence, 0.0)))
    return worst


def _continue(
    law: Emitted,
    prefix: tuple[int, ...],
    mass: float,
    p: Callable[[tuple[int, ...]], Tensor],
    length: int,
    ends: frozenset[int],
) -> None:
    if len(prefix) == length or (prefix and prefix[-1] in ends):
        law[prefix] = law.get(prefix, 0.0) + mass
        return
    row = p(prefix)
    for token in row.nonzero().flatten().tolist():
        _continue(law, (*prefix, token), mass * float(row[token]), p, length, ends)


def impossible_at_zero(verifier: Verifier, drafted: Sequence[Drafted]) -> list[tuple[int, ...]]:
    """What is emitted, though it has probability 0, when every uniform is exactly 0."""
    found = []
    for drafts in drafted:
        everyone, n = torch.arange(len(drafts)), drafts.nodes
        zeros = torch.zeros(len(drafts), n + 1, dtype=torch.float64)
        verdict = drafts.judge(verifier, everyone, zeros[:, :n], zeros)
        emitted = drafts.emitted(everyone, verdict)
        for c, columns in enumerate(drafts.columns(everyone, verdict)):
            rows = [0, *(node + 1 for node in verdict.path[c, : len(columns) - 1].tolist())]
            if any(float(drafts.p[c, r, t]) == 0 for r, t in zip(rows, columns, strict=True)):
                found.append(emitted[c])
    return found


def chains(
    q: Callable[[tuple[int, ...]], Tensor],
    p: Callable[[tuple[int, ...]], Tensor],
    k: int,
    report: Callable[[tuple[int, ...]], Tensor] | None = None,
) -> list[Drafted]:
    """Every chain of K tokens that q can draw; see `drawn`."""
    return drawn(q, p, chain(k), report)


def drawn(
    q: Callable[[tuple[int, ...]], Tensor],
    p: Callable[[tuple[int, ...]], Tensor],
    tree: Tree,
    report: Callable[[tuple[int, ...]], Tensor] | None = None,
) -> list[Drafted]:
    """Every draft of a shape that q can draw, each node on its own.

    Args:
        report: the rows that the draft claims to be drawn from, if not q.
    """
    found: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for parent in tree.parents:
        found = [
            (mass * float(row[token]), (*tokens, token))
            for mass, tokens in found
            for row in [q(_texts(tree, tokens)[parent + 1])]
            for token in row.nonzero().flatten().tolist()
        ]
    rows = report or q
    texts = [_texts(tree, t) for _, t in found]
    said = [torch.stack([rows(t[parent + 1]) for parent in tree.parents]) for t in texts if tree]
    return [
        Drafted(
            torch.tensor([mass for mass, _ in found], dtype=torch.float64),
            torch.tensor([t for _, t in found], dtype=torch.int64).view(len(found), len(tree)),
            torch.stack(said) if said else None,
            torch.stack([torch.stack([p(text) for text in t]) for t in texts]),
            tree,
        )
    ]


def certain(
    p: Callable[[tuple[int, ...]], Tensor], tokens: Sequence[int], tree: Tree | None = None
) -> list[Drafted]:
    """The one draft of a drafter that is certain."""
    tree = tree or chain(len(tokens))
    return [
        Drafted(
            torch.ones(1, dtype=torch.float64),
            torch.tensor([list(tokens)], dtype=torch.int64).view(1, len(tree)),
            None,
            torch.stack([p(text) for text in _texts(tree, tokens)]).unsqueeze(0),
            tree,
        )
    ]


def _texts(tree: Tree, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What stands before each row: the root's, then those of the nodes that have tokens."""
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, tree.parents, strict=False):
        texts.append((*texts[parent + 1], token))
    return texts
