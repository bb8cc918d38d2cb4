"""SuffixDecoding: continuations by their frequency, from this text and from past outputs.

Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI
applications", 2024. Wherever the last tokens stood before, in the request's own
text or in what was generated earlier, something followed. For a match of n
tokens that makes a tree of continuations with counts. A node's estimated
probability is the product, from the root down, of counts over those of all
that went on from the parent; the likeliest nodes are taken, up to factor * n of
them, so that a long match drafts far and a short one hardly. The tree with the
highest sum of estimates wins, over all n and both indexes.

Deviations: counts are over the most recent places of a run (64 at most), not
over all there ever were, and the past is a ring, not a suffix tree. So a token
costs the same to add whatever is held, memory has a hard bound, and what is
evicted is what is oldest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import Tensor

from ..errors import OptionError
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..trees import check_nodes, tree_of
from ..types import Shape, Tree
from .base import CertainDrafter, Context
from .blueprint import Setting, path_of
from .memory import LENGTHS, Memory
from .occurrences import Occurrences

_LONGEST, _PLACES = 64, 64
"""Tokens that a match is followed back, and places of a run that are looked at."""

Guess = tuple[float, list[int], list[int]]
"""The sum of estimates, tokens and parents of a tree."""


class SuffixDrafter(CertainDrafter):
    """Drafts what followed the last tokens in this text and in past outputs, by frequency.

    Args:
        nodes: of a tree, at most.
        factor: nodes per token of the match.
        least: estimated probability of a node, at least.
        capacity: tokens of past outputs that are remembered.
        file: keeps them on disk.
        branching: whether drafts may branch.
        memory: past outputs to share with other engines, instead of one's own.
    """

    name = "suffix"
    k = 16
    remembers = True

    def __init__(
        self,
        nodes: int = 16,
        factor: float = 4.0,
        least: float = 0.1,
        capacity: int = 2**20,
        file: str | None = None,
        branching: bool = False,
        *,
        memory: Memory | None = None,
    ) -> None:
        check_nodes(nodes)
        if file is not None and memory is not None:
            raise OptionError("file is the memory's own: give one of them")
        if not 0 < factor < float("inf"):
            raise OptionError(f"factor must be above 0, not {factor!r} (nodes per matched token)")
        if not 0 < least <= 1:
            raise OptionError(f"least must be in (0, 1], not {least!r} (a probability)")
        self.proposes = Shape.TREE if branching else Shape.CHAIN
        self.memory = memory or Memory(capacity, None if file is None else path_of(file))
        self.most = nodes
        self._nodes, self._factor, self._least = nodes, factor, least
        self._open: dict[int, tuple[Context, Occurrences]] = {}

    def check(self, setting: Setting) -> Sequence[str]:
        self.memory.fits(setting.source.vocab_size)
        return ()

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        self.memory.serve(target.vocab_size)

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        text = Occurrences(LENGTHS)
        text.extend(context.tokens)
        self._open[context.slot] = context, text

    def close(self, slot: int) -> None:
        context, _ = self._open.pop(slot)
        self.memory.add(context.tokens, context.prompt_length)

    def forget(self) -> None:
        self.memory.forget()

    def propose(self, context: Context, budget: int) -> tuple[list[int], Tree]:
        text = self._open[context.slot][1]
        text.extend(context.tokens[text.count :])
        best: Guess = (0.0, [], [])
        if budget:
            tail = context.tokens[-_LONGEST:]
            best = self._best(text, tail, budget, best)
            if best[0] < min(budget, self._nodes):
                with self.memory.reading() as past:
                    best = self._best(past, tail, budget, best)
        _, tokens, parents = best
        return tokens, tree_of(parents)

    def _best(self, index: Occurrences, tail: Sequence[int], budget: int, best: Guess) -> Guess:
        """The best tree of an index, or the one there is, unless it is better."""
        longer = _LONGEST + 1
        for length in LENGTHS:
            longest, longer = longer - 1, length  # longer matches were looked at before
            if len(tail) < length:
                continue
            if (reach := min(budget, self._most(longest))) <= best[0]:
                return best  # shorter matches make smaller trees
            found = [
                (matched, run)
                for at in index.after(tail[-length:], _PLACES)
                if (matched := index.matched(at, tail, longest)) >= length
                and (run := index.continuation(at, reach))
            ]
            for n in sorted({matched for matched, _ in found}, reverse=True):
                most = self._most(n)
                if most <= best[0]:
                    return best
                guess = self._guess([run for matched, run in found if matched >= n], most)
                if guess[0] > best[0]:
                    best = guess
        return best

    def _most(self, matched: int) -> int:
        """Nodes of a tree behind a match of so many tokens, at most."""
        return min(self._nodes, max(1, int(self._factor * matched)))

    def _guess(self, followed: list[list[int]], most: int) -> Guess:
        """The likeliest nodes of the tree of continuations."""
        if followed.count(followed[0]) == len(followed):
            tokens = followed[0][:most]
            return float(len(tokens)), tokens, list(range(-1, len(tokens) - 1))
        total, parents = 0.0, list[int]()
        tokens = []
        open_ = self._children(followed, 0, 1.0, -1)
        heapq.heapify(open_)
        while open_ and len(tokens) < most:
            estimate, _, depth, parent, runs = heapq.heappop(open_)
            node = len(tokens)
            tokens.append(runs[0][depth])
            parents.append(parent)
            total -= estimate
            for child in self._children(runs, depth + 1, -estimate, node):
                heapq.heappush(open_, child)
        return total, tokens, parents

    def _children(
        self, runs: list[list[int]], depth: int, estimate: float, parent: int
    ) -> list[tuple[float, int, int, int, list[list[int]]]]:
        """What follows, the likeliest first: minus its estimate, a tie breaker, and the rest."""
        by_token: dict[int, list[list[int]]] = {}
        for run in runs:
            if len(run) > depth:
                by_token.setdefault(run[depth], []).append(run)
        whole = sum(map(len, by_token.values()))
        found = [
            (-estimate * len(some) / whole, i, depth, parent, some)
            for i, some in enumerate(by_token.values())
            if estimate * len(some) / whole >= self._least
        ]
        found.sort(key=lambda child: child[:2])
        return found if self.proposes else found[:1]
