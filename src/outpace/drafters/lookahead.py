"""Lookahead decoding: Jacobi iteration in the target's own passes fills a pool of n-grams.

Fu et al., "Break the sequential dependency of LLM inference using lookahead
decoding", 2024. Beside what it verifies, each pass carries a window of guesses for
the tokens to come: `levels` of them, W columns wide, each the target's answer to
the one before. Column w and level l stand w + l tokens behind the last token; a
guess sees the first level up to its column, then its column's own levels. So
the window is a tree, and a round proposes it with everything else: where a guess
happens to be right it is accepted. The target's likeliest token behind the last
level completes an n-gram per column, which goes to the pool under the token
before it. What the pool has for the last token is verified in the same pass.

Deviations: columns move on by as many tokens as a round emits, so that guesses
stay at their positions; n-grams of the prompt go to the pool, too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from torch import Tensor

from ..errors import OptionError
from ..models.base import LanguageModel
from ..models.cache import SlotCache
from ..trees import MOST_NODES, merged
from ..types import Shape, Tree, check_whole_number
from .base import CertainDrafter, Commit, Context

Gram = tuple[int, ...]

_SMALL, _LARGE = (3, 2, 2), (5, 7, 7)
"""n, window and guesses."""

_KEYS = 1 << 16
"""Tokens that a pool has n-grams for; the least recently used go."""


class LookaheadDrafter(CertainDrafter):
    """Guesses several tokens ahead in every pass, and drafts n-grams of earlier guesses.

    Where nothing is given, n, window and guesses are 3, 2 and 2 for a target on a CPU,
    which pays for every row of a pass, and the paper's 5, 7 and 7 elsewhere.

    Args:
        n: tokens of an n-gram, the one that it is found by included.
        window: columns of guesses.
        guesses: n-grams verified per round, and kept per token.
    """

    name = "lookahead"
    proposes = Shape.TREE
    tops = 1
    whole = True  # the window is part of what it proposes

    def __init__(
        self, n: int | None = None, window: int | None = None, guesses: int | None = None
    ) -> None:
        self._given = n, window, guesses
        n, window, guesses = self._fill(_LARGE)
        check_whole_number("n", n, 3, "tokens of an n-gram")
        check_whole_number("window", window, 1, "columns of guesses")
        check_whole_number("guesses", guesses, 1, "n-grams per round")
        if (rows := (n - 1) * (window + guesses)) > MOST_NODES:
            raise OptionError(f"{rows} rows are more than a pass takes: at most {MOST_NODES}")
        self._states: dict[int, _State] = {}

    def _fill(self, default: tuple[int, int, int]) -> tuple[int, int, int]:
        """The sizes, what is not given being this."""
        n, window, guesses = (
            d if x is None else x for x, d in zip(self._given, default, strict=True)
        )
        self.k = self.most = max(n - 1, window + n - 3)  # as deep as the n-grams and the window are
        self._sizes = n, window, guesses
        return self._sizes

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        self._fill(_SMALL if target.device.type == "cpu" else _LARGE)

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        self._states[context.slot] = _State(context, *self._sizes)

    def close(self, slot: int) -> None:
        del self._states[slot]

    def propose(self, context: Context, budget: int) -> tuple[list[int], Tree]:
        return self._states[context.slot].propose(budget)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._states[commit.slot].learn(commit)


class _State:
    """One sequence's window and pool."""

    def __init__(self, context: Context, n: int, window: int, guesses: int) -> None:
        self._context = context
        self._levels, self._window = n - 1, window
        self._guesses = guesses
        self._pool: OrderedDict[int, OrderedDict[Gram, None]] = OrderedDict()
        self._learned = 0  # tokens whose n-grams are in the pool
        self._seen = len(context.tokens)
        # Column w of level l; at first tokens of the prompt, which later rounds replace.
        self._rows: deque[list[int]] = deque(self._fresh(window, i) for i in range(self._levels))
        self._ripe = [0] * window  # per column, levels that are answers to each other
        self._at: list[int] = []  # block rows of the last level, if the window was proposed

    def _fresh(self, count: int, salt: int) -> list[int]:
        """Tokens to begin with: of the text, in an order that follows from it alone."""
        tokens = self._context.tokens
        return [
            tokens[(7919 * (i + 1) + 104729 * salt + len(tokens)) % len(tokens)]
            for i in range(count)
        ]

    def propose(self, budget: int) -> tuple[list[int], Tree]:
        missed = len(self._context.tokens) - self._seen
        if missed:  # rounds that it sat out
            self._seen += missed
            self._move(missed, None)
        self._learn_text()
        tokens, tree = merged(self._grams(budget))
        parents = list(tree.parents)
        self._at = []
        if budget < self._levels:
            return tokens, tree
        columns = min(self._window, budget - self._levels + 2)
        last: list[int] = []  # of the level before, by column; the first level begins at the root
        for level in range(self._levels):
            row: list[int] = []
            for column in range(columns):
                if level == column == 0:
                    row.append(-1)
                    continue
                parents.append(last[column] if level else row[-1])
                row.append(len(tokens))
                tokens.append(self._rows[level][column])
            last = row
        self._at = [node + 1 for node in last]
        return tokens, Tree(tuple(parents))

    def _grams(self, budget: int) -> list[Gram]:
        """What the pool has for the last token, the newest first."""
        key = self._context.tokens[-1]
        if not budget or key not in self._pool:
            return []
        self._pool.move_to_end(key)
        return [gram[:budget] for gram in reversed(self._pool[key])]

    def learn(self, commit: Commit) -> None:
        emitted = len(self._context.tokens) - self._seen
        self._seen = len(self._context.tokens)
        at, self._at = self._at, []
        if not emitted:
            return  # guesses stay where they are
        if commit.top is None or not at:
            self._move(emitted, None)
            return
        best = commit.top[:, 0].tolist()
        answers = [best[row] for row in at]
        keys = [commit.block[0], *self._rows[0][1:]]
        for column, answer in enumerate(answers):
            self._ripe[column] += 1
            if self._ripe[column] >= self._levels:
                rest = [self._rows[level][column] for level in range(1, self._levels)]
                self._add(keys[column], (*rest, answer))
        self._move(emitted, answers)

    def _move(self, emitted: int, answers: list[int] | None) -> None:
        """On by one level, and by as many columns as more than one token was emitted."""
        if answers is not None:
            short = self._window - len(answers)
            answers = answers + self._fresh(short, 0)
            self._ripe[self._window - short :] = [0] * short
            self._rows.popleft()
            self._rows.append(answers)
            emitted -= 1
        if emitted > 0:
            for i, row in enumerate(self._rows):
                kept = row[emitted:]
                self._rows[i] = kept + self._fresh(self._window - len(kept), i)
            ripe = self._ripe[emitted:]
            self._ripe = ripe + [0] * (self._window - len(ripe))

    def _learn_text(self) -> None:
        """N-grams of the text itself."""
        tokens, length = self._context.tokens, self._levels
        for i in range(self._learned, len(tokens) - length):
            self._add(tokens[i], tuple(tokens[i + 1 : i + 1 + length]))
        self._learned = max(self._learned, len(tokens) - length)

    def _add(self, key: int, gram: Gram) -> None:
        grams = self._pool.setdefault(key, OrderedDict())
        self._pool.move_to_end(key)
        grams.pop(gram, None)
        grams[gram] = None
        if len(grams) > self._guesses:
            grams.popitem(last=False)
        if len(self._pool) > _KEYS:
            self._pool.popitem(last=False)
