"""Rules for draft trees in plain lists, with every decision open to enumeration and sabotage.

A twin asks `passes(node, threshold)` whether a node passes and looks at tokens and rows as it
needs them. So one and the same code gives the decision for given noise, and the whole law:
`leaves` runs it once for every way in which draws and decisions can go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from outpace.sampling import categorical
from outpace.types import Rows, Tree
from outpace.verifiers import TokenVerifier, Verdict

Row = list[float]
Texts = Callable[[tuple[int, ...]], Row]
STEPS = 40
"""Of the bisection for ρ."""
NEGLIGIBLE = 1e-14
"""Branches with less probability are not followed."""


class Chooser:
    """Goes one way at every choice, and remembers the others."""

    def __init__(self, way: tuple[int, ...], others: list[tuple[int, ...]]) -> None:
        self.way, self.others, self.gone, self.mass = way, others, 0, 1.0

    def choose(self, weights: Row) -> int:
        if self.gone == len(self.way):
            first, *rest = [i for i, w in enumerate(weights) if w > NEGLIGIBLE]
            self.others += [(*self.way, i) for i in rest]
            self.way = (*self.way, first)
        chosen = self.way[self.gone]
        self.gone += 1
        self.mass *= weights[chosen]
        return chosen


def leaves(run: Callable[[Chooser], Any]) -> Iterator[tuple[float, Any]]:
    """What a function of choices returns, for every way they can go, and each one's probability."""
    open_: list[tuple[int, ...]] = [()]
    while open_:
        chooser = Chooser(open_.pop(), open_)
        result = run(chooser)
        yield chooser.mass, result


@dataclass
class Drawing:
    """A draft whose tokens are drawn when they are looked at.

    Attributes:
        q: its law of a node, given the texts, the earlier siblings' tokens and the node.
        said: the rows that it reports, if not those.
    """

    tree: Tree
    p_table: Texts
    law: Callable[[tuple[int, ...], list[int], int], Row]
    choose: Callable[[Row], int]
    said: Callable[[tuple[int, ...], list[int], int], Row] | None = None
    drawn: dict[int, int] = field(default_factory=dict)

    def text(self, node: int) -> tuple[int, ...]:
        """What stands behind a node."""
        if node < 0:
            return ()
        return (*self.text(self.tree.parents[node]), self.token(node))

    def _before(self, node: int) -> tuple[tuple[int, ...], list[int], int]:
        parent = self.tree.parents[node]
        elder = [self.token(i) for i in children(self.tree, parent) if i < node]
        return self.text(parent), elder, node

    def token(self, node: int) -> int:
        if node not in self.drawn:
            before = self._before(node)
            self.drawn[node] = self.choose(self.law(*before))
        return self.drawn[node]

    def p(self, node: int) -> Row:
        return self.p_table(self.text(node))

    def q(self, node: int) -> Row:
        return (self.said or self.law)(*self._before(node))


@dataclass
class Fixed:
    """A draft that is there."""

    tree: Tree
    tokens: list[int]
    p_rows: list[Row]
    q_rows: list[Row]

    def token(self, node: int) -> int:
        return self.tokens[node]

    def p(self, node: int) -> Row:
        return self.p_rows[node + 1]

    def q(self, node: int) -> Row:
        return self.q_rows[node]


Given = Drawing | Fixed
Passes = Callable[[int, float], bool]
Said = tuple[list[int], Row]
"""The path, and weights of the token behind it."""


@cache
def children(tree: Tree, node: int) -> tuple[int, ...]:
    return tuple(i for i, parent in enumerate(tree.parents) if parent == node)


def scaled(row: Row) -> Row:
    total = sum(row)
    return [x / total for x in row]


def without(row: Row, other: Row) -> Row:
    """(row - other)+."""
    return [max(0.0, a - b) for a, b in zip(row, other, strict=True)]


class Twin(TokenVerifier):
    """A rule by `run`, for given noise as any verifier."""

    def run(self, draft: Given, passes: Passes) -> Said:
        raise NotImplementedError

    def decide(self, draft: Fixed, accept: Row) -> Said:
        return self.run(draft, lambda node, threshold: accept[node] < threshold)

    def __call__(self, p, draft, noise):
        if isinstance(draft.law, Rows):
            q = draft.law.q
        else:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[-1]).double()
        paths, ends = [], []
        for b, tree in enumerate(draft.trees):
            rows = Fixed(tree, draft.tokens[b].tolist(), p[b].tolist(), q[b].tolist())
            path, row = self.decide(rows, noise.accept[b].tolist())
            paths.append(path)
            weights = torch.tensor(row, dtype=torch.float64)
            ends.append(int(categorical(weights, noise.target[b, len(path)])))
        return Verdict.of(paths, draft.tokens.shape[1], torch.tensor(ends))


class Recursive(Twin):
    """Recursive rejection."""

    def left(self, row: Row, q: Row, x: int) -> Row:
        rest = without(row, q)
        return scaled(rest) if any(rest) else row

    def run(self, draft, passes):
        path, at = [], -1
        while True:
            row = draft.p(at)
            for child in children(draft.tree, at):
                x, q = draft.token(child), draft.q(child)
                if q[x] > 0 and passes(child, row[x] / q[x]):
                    path.append(child)
                    at = child
                    break
                row = self.left(row, q, x)
            else:
                return path, row


def hit(b: float, draws: int) -> float:
    return sum((1 - b) ** j for j in range(draws))


def overlap(p: Iterable[float], q: Iterable[float], rho: float) -> Row:
    return [min(b, a / rho) for a, b in zip(p, q, strict=True)]


@cache
def least_rho(p: tuple[float, ...], q: tuple[float, ...], draws: int) -> float:
    def enough(rho: float) -> bool:
        return hit(sum(overlap(p, q, rho)), draws) <= rho

    low, high = 1.0, float(draws)
    if enough(low):
        return low
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class KSeq(Twin):
    """K-SEQ."""

    def rho(self, p: Row, q: Row, draws: int) -> float:
        return least_rho(tuple(p), tuple(q), draws)

    def rest(self, p: Row, q: Row, rho: float, draws: int) -> Row:
        shared = overlap(p, q, rho)
        factor = hit(sum(shared), draws)
        return [max(0.0, a - factor * b) for a, b in zip(p, shared, strict=True)]

    def run(self, draft, passes):
        path, at = [], -1
        while True:
            row, family = draft.p(at), children(draft.tree, at)
            if not family:
                return path, row
            q = draft.q(family[0])
            rho = self.rho(row, q, len(family))
            for child in family:
                x = draft.token(child)
                if q[x] > 0 and passes(child, row[x] / (rho * q[x])):
                    path.append(child)
                    at = child
                    break
            else:
                rest = self.rest(row, q, rho, len(family))
                return path, rest if any(rest) else row


class Traversal(Twin):
    """Traversal verification."""

    def mass(self, rest: Row, q: Row, before: float) -> tuple[float, float]:
        """That of a node's weights after a child has failed, and what (w - q)+ is divided by."""
        whole = sum(rest) + 1 - before
        return sum(rest) / whole if whole > 0 else 0.0, whole

    def visit(self, draft: Given, passes: Passes, node: int, mass: float) -> Said | None:
        weights = [mass * x for x in draft.p(node)]
        for child in children(draft.tree, node):
            x, q = draft.token(child), draft.q(child)
            reach = min(1.0, weights[x] / q[x]) if q[x] > 0 else 0.0
            said = self.visit(draft, passes, child, reach) if reach > 0 else None
            if said is not None:
                return [node, *said[0]], said[1]
            rest = without(weights, q)
            after, whole = self.mass(rest, q, mass)
            if whole > 0:
                mass, weights = after, [a / whole for a in rest]
        return ([node], weights) if node < 0 or passes(node, mass) else None

    def run(self, draft, passes):
        said = self.visit(draft, passes, -1, 1.0)
        assert said is not None
        return said[0][1:], said[1] if any(said[1]) else draft.p(said[0][-1])


class Skewed:
    """The largest path of a draft, as a draft of its own."""

    def __init__(self, draft: Given, skew: bool) -> None:
        self.draft, self.skew = draft, skew
        self.rows: list[tuple[Row, Row]] = []
        open_ = [(head, head) for head in children(draft.tree, -1)]  # (path's head, next node)
        self.paths, f, g, end = len(open_), 0.0, 1.0, -1
        while open_:
            p, q = draft.p(end), draft.q(open_[0][1])
            ranked = self.ranked(p, q)
            most = max(ranked.index(draft.token(node)) for _, node in open_)
            self.rows.append((p, self.law(q, ranked, f, g)))
            smaller = f + g * sum(q[x] for x in ranked[:most])
            own = g * q[ranked[most]]
            f, g = smaller / (smaller + own), own / (smaller + own)
            open_ = [(head, node) for head, node in open_ if draft.token(node) == ranked[most]]
            end = open_[0][1]
            steps = [(head, children(draft.tree, node)) for head, node in open_]
            open_ = [(head, after[0]) for head, after in steps if after]
        self.path, self.behind = [], draft.p(end)
        while end >= 0:
            self.path.insert(0, end)
            end = draft.tree.parents[end]

    def ranked(self, p: Row, q: Row) -> list[int]:
        """Tokens in ascending order."""
        ratios = [np.float32(a / b) if b > 0 else np.float32(-1) for a, b in zip(p, q, strict=True)]
        return sorted(range(len(p)), key=lambda x: (ratios[x], x))

    def law(self, q: Row, ranked: list[int], f: float, g: float) -> Row:
        if not self.skew:
            return q
        row, before = [0.0] * len(q), 0.0
        for x in ranked:
            if q[x] > 0:
                row[x] = q[x] * self.over(f + g * before, g * q[x]) / self.over(f, g)
            before += q[x]
        return row

    def over(self, f: float, g: float) -> float:
        return sum((f + g) ** j * f ** (self.paths - 1 - j) for j in range(self.paths))


class MultiPath(Twin):
    """Greedy multi-path block verification."""

    skew = True

    def run(self, draft, passes):
        chosen = Skewed(draft, self.skew)
        path, rows = chosen.path, chosen.rows
        masses = [1.0]
        for node, (p, q) in zip(path, rows, strict=True):
            x = draft.token(node)
            masses.append(min(1.0, masses[-1] * p[x] / q[x]) if q[x] > 0 else 0.0)
        if not path or passes(path[-1], masses[-1]):
            return path, chosen.behind
        for i in reversed(range(len(path))):
            rest = without([masses[i] * a for a in rows[i][0]], rows[i][1])
            whole = sum(rest) + 1 - masses[i]
            if i == 0 or passes(path[i - 1], sum(rest) / whole if whole > 0 else masses[i]):
                return path[:i], rest if any(rest) else rows[i][0]
        raise AssertionError("the root always passes")


# --- laws ----------------------------------------------------------------------------------------

Emitted = dict[tuple[int, ...], float]


def law_of(rule: Twin, drawing: Callable[[Callable[[Row], int]], Drawing]) -> Emitted:
    """What a round emits, and how likely."""

    def run(chooser: Chooser) -> tuple[tuple[int, ...], Row]:
        draft = drawing(chooser.choose)

        def passes(node: int, threshold: float) -> bool:
            t = min(1.0, max(0.0, threshold))
            return chooser.choose([1 - t, t]) == 1

        path, row = rule.run(draft, passes)
        return draft.text(path[-1] if path else -1), scaled(row)

    law: Emitted = {}
    for mass, (text, row) in leaves(run):
        for x, w in enumerate(row):
            if w:
                law[(*text, x)] = law.get((*text, x), 0.0) + mass * w
    return law


def deviation(law: Emitted, p: Texts) -> float:
    """The largest error of a text's probability, where what was emitted is continued from p."""
    beyond: Emitted = {}
    for said, mass in law.items():
        for i in range(len(said)):
            beyond[said[:i]] = beyond.get(said[:i], 0.0) + mass

    def worst(text: tuple[int, ...], continued: float, wanted: float) -> float:
        error = abs(continued + beyond.get(text, 0.0) - wanted)
        if text not in beyond:
            return error
        after = ((*text, x) for x in range(len(p(text))))
        steps = zip(after, p(text), strict=True)
        return max(
            error, *(worst(t, continued * w + law.get(t, 0.0), wanted * w) for t, w in steps)
        )

    return worst((), 0.0, 1.0)


def accepted(law: Emitted) -> float:
    """How many drafted tokens a round keeps, expected."""
    return sum(mass * (len(said) - 1) for said, mass in law.items())


# --- drafts --------------------------------------------------------------------------------------


def shapes(nodes: int) -> Iterator[tuple]:
    """Every ordered forest of so many nodes, as tuples of tuples."""
    if nodes == 0:
        yield ()
    for inside in range(nodes):
        for first in shapes(inside):
            for rest in shapes(nodes - 1 - inside):
                yield (first, *rest)


def numbered(shape: tuple, source: random.Random) -> Tree:
    """The tree of a shape, its nodes in some order: parents and elder siblings come first."""
    parents: list[int] = []
    open_ = [[-1, list(shape)]]
    while open_:
        family = source.choice(open_)
        inner = family[1].pop(0) if family[1] else None
        if not family[1]:
            open_.remove(family)
        if inner is not None:
            parents.append(family[0])
            open_.append([len(parents) - 1, list(inner)])
    return Tree(tuple(parents))


def table(vocab: int, seed: str) -> Texts:
    """A random row per text; small whole weights make zeros and ties common."""

    @cache
    def row(text: tuple[int, ...]) -> Row:
        source = random.Random(f"{seed} {text}")
        while not any(weights := [source.randint(0, 3) for _ in range(vocab)]):
            pass
        return scaled(weights)

    return row


def replaced(q: Texts) -> Callable[[tuple[int, ...], list[int], int], Row]:
    """Children are drawn with replacement."""
    return lambda text, elder, node: q(text)


def struck(q: Texts) -> Callable[[tuple[int, ...], list[int], int], Row]:
    """Without replacement; where nothing is left, the first token that was not taken is certain."""

    def law(text, elder, node):
        row = [0.0 if x in elder else w for x, w in enumerate(q(text))]
        if any(row):
            return scaled(row)
        first = next((x for x in range(len(row)) if x not in elder), 0)
        return [float(x == first) for x in range(len(row))]

    return law


def fixed(vocab: int, seed: str) -> Callable[[tuple[int, ...], list[int], int], Row]:
    """Every token is certain."""

    def law(text, elder, node):
        certain = random.Random(f"{seed} {node}").randrange(vocab)
        return [float(x == certain) for x in range(vocab)]

    return law
