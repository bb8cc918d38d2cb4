"""A smaller model of the same vocabulary as the drafter.

Leviathan et al., 2023: the draft model generates K tokens one by one, drawn
from its own law under the request's own sampling parameters. It keeps a cache
of its own. After a full acceptance that cache lacks the last drafted token;
whatever of the context it lacks is fed at the start of the next round, so it
is in sync after every outcome.

A tree grows level by level, each in one pass over the nodes that get children, of all
sequences (Miao et al., "SpecInfer", 2024, section 4). Their keys and values lie behind what
is committed until it is known which of them stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.base import ForwardOutput, LanguageModel, RollsOut, Top, prefill, upload
from ..models.cache import SlotCache
from ..sampling import DraftNoise, Warp, argmax, law_device
from ..trees import Block, Builder, Children, Growth, chain
from ..types import Draft, Draw, Independent, Law, PointMass, Rows, Shape
from .base import Commit, Context, Drafter, together

_MANY = 32
"""Tokens that are read without logits before a draft."""


class ModelDrafter(Drafter):
    """Drafts chains or trees with a language model.

    Logits of ids the target lacks are cut off, ids the draft lacks get
    probability 0; both keep the law exact.
    """

    name = "draft model"
    laws: tuple[type[Law], ...] = (PointMass, Rows)
    rule = "token"
    instant = False
    keeps_states = False
    """Whether the states behind the model's last layer are kept, of every token that is fed."""

    builder: Builder | None = None
    """Of trees; without one it drafts chains."""

    def __init__(self, model: LanguageModel, name: str = name, tree: Builder | None = None) -> None:
        self.model = model
        self.name = name
        if tree is not None:
            self.branch(tree)
        self._vocab_size: int  # the target's
        self._rolls_out: bool
        self._cache: SlotCache
        self._drafted: dict[int, int] = {}  # slot -> drafted tokens its cache holds
        self._grown: dict[int, Sequence[int]] = {}  # slot -> where its tree's nodes were read
        self._model_taps: tuple[int, ...] = ()
        self._states: list[Tensor] = []

    def branch(self, builder: Builder) -> None:
        branch(self, builder)

    @property
    def alone(self) -> LanguageModel | None:
        return self.model

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        self._vocab_size = target.vocab_size
        same = self.model.vocab_size == target.vocab_size
        self._rolls_out = same and isinstance(self.model, RollsOut)
        self._cache = self.model.new_cache(cache.slots, self._positions(cache))
        self.cost = share_of(self.model, target)

    def _positions(self, cache: SlotCache) -> int:
        """What a slot of its own cache must hold, beside the target's."""
        return cache.max_len

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        self._cache.truncate(context.slot, 0)
        if len(context.tokens) < self.model.context_length:  # else it will never draft
            prefill(self.model, self._cache, context.slot, self._known(context.tokens[:-1]))

    def close(self, slot: int) -> None:
        self._cache.truncate(slot, 0)
        self._drafted.pop(slot, None)
        self._grown.pop(slot, None)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._cache.commit(commit.slot, self._kept(commit))
            drafted = self._drafted.pop(commit.slot, 0)
            surplus = max(0, drafted - len(commit.path))
            self._cache.truncate(commit.slot, self._cache.lengths[commit.slot] - surplus)

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        rooms = [self._prepared(context) for context in contexts]
        budgets = [max(0, min(b, room)) for b, room in zip(budgets, rooms, strict=True)]
        live = [i for i, budget in enumerate(budgets) if budget]
        draw = self._draw if self.builder is None else self._grow
        if len(live) == len(contexts):
            return draw(contexts, budgets, warp, noise)
        if not live:
            return together([], len(contexts), warp.device)
        drawn = draw(
            [contexts[i] for i in live],
            [budgets[i] for i in live],
            warp.select(live),
            None if noise is None else noise.select(upload(torch.tensor(live), warp.device)),
        )
        return together([(drawn, live)], len(contexts), drawn.tokens.device)

    def _kept(self, commit: Commit) -> list[int]:
        """Of the rows that a tree was read in those that stay: nodes before any that was not."""
        read = self._grown.pop(commit.slot, None)
        rows = [] if read is None else [read[node] for node in commit.path]
        return rows[: rows.index(-1)] if -1 in rows else rows

    def room(self, context: Context) -> int:
        return self.model.context_length - len(context.tokens)

    def _draw(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        """Chains for sequences with budgets >= 1."""
        slots = [c.slot for c in contexts]
        trees = tuple(chain(budget) for budget in budgets)
        for slot, budget in zip(slots, budgets, strict=True):
            self._drafted[slot] = budget - 1
        missing, block, positions = self._missing(contexts)
        if self._rolls_out and (warp.by_kernels or (warp.all_greedy and not warp.shapes)):
            ends = [len(m) - 1 for m in missing]
            heat = None if warp.all_greedy else warp.temperatures
            rolled = cast(RollsOut, self.model).rollout(
                block,
                positions,
                self._cache,
                slots,
                ends,
                budgets,
                heat,
                warp.filters,
                noise,
                self.keeps_states,
            )
            self._states = [] if rolled.states is None else [rolled.states]
            return Draft(rolled.tokens, self._law(rolled.law), trees)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        paths: list[list[int]] = [[] for _ in slots]
        self._states = []
        fed = block
        for step in range(max(budgets)):
            if step == 0:
                out = self._catch_up(missing, block, positions, slots)
            else:
                fed = _fed(tokens[-1], fed, budgets, step)
                out = self._step(fed, slots, budgets, step)
            logits = None
            if not warp.all_greedy or warp.shapes:
                logits = self._shaped(out, warp, [[path] for path in paths])
            if logits is None:
                tokens.append(self._likeliest(out))
            elif warp.all_greedy:
                tokens.append(argmax(logits))
            else:
                assert noise is not None
                rows.append(warp(logits))  # [B, 1, V]
                tokens.append(noise.draw(rows[-1], step, step))
            if warp.shapes:  # a host sync
                for path, token in zip(paths, tokens[-1].flatten().tolist(), strict=True):
                    path.append(token)
        if self.keeps_states:
            self._step(_fed(tokens[-1], fed, budgets, len(tokens)), slots, budgets, len(tokens))
        return Draft(torch.cat(tokens, 1), self._law(torch.cat(rows, 1) if rows else None), trees)

    def _law(self, q: Tensor | None) -> Law:
        """Of tokens that were drawn from these rows, or certain."""
        if q is None:
            return PointMass()
        apart = self.builder is not None and self.builder.draw == "with"
        return (Independent if apart else Rows)(q)

    def _shaped(
        self, out: ForwardOutput, warp: Warp, paths: Sequence[Sequence[Sequence[int]]]
    ) -> Tensor:
        """Logits behind the transforms."""
        logits = self._logits(out)
        if warp.shapes:
            logits = warp.shape(logits, paths).logits
            # Where it has none of the tokens that are left, one is as good as another.
            logits = logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)
        return logits

    def _grow(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        """Trees for sequences with budgets >= 1."""
        assert self.builder is not None
        slots = [c.slot for c in contexts]
        growth = self.builder.begin(budgets, warp.temperatures.tolist())
        if growth is None:
            return together([], len(contexts), warp.device)
        drawn = self.builder.draw != "top" or warp.all_greedy
        if drawn and (lengths := growth.chains) is not None and all(lengths):
            return self._draw(contexts, lengths, warp, noise)
        out = self._catch_up(*self._missing(contexts), slots)
        paths: list[list[list[int]]] = [[[]] for _ in slots]
        depth = 0
        while True:
            logits = self._shaped(out, warp, paths)
            block = growth.add(self._children(logits, growth, depth, warp, noise))
            if block is None:
                break
            out = self._read(block, slots)
            if warp.shapes:
                paths = _paths(block)
            depth += 1
        grown = growth.grown()
        self._grown |= dict(zip(slots, grown.rows, strict=True))
        return Draft(grown.tokens, self._law(grown.q), grown.trees)

    def _children(
        self, logits: Tensor, growth: Growth, depth: int, warp: Warp, noise: DraftNoise | None
    ) -> Children:
        """Of the rows that were read last, logits `[B, F, V]`."""
        assert self.builder is not None
        count = min(growth.width, logits.shape[-1])
        if self.builder.weighs:
            masses, tokens = self._masses(logits, warp).topk(count)
            return Children(tokens, masses)
        if self.builder.draw == "top" or warp.all_greedy:
            best = logits.topk(count).indices
            return Children(F.pad(best, (0, growth.width - count)))  # there may be fewer tokens
        assert noise is not None
        assert growth.nodes is not None
        nodes = upload(growth.nodes, logits.device)
        replace = self.builder.draw == "with"
        tokens, q = noise.children(warp(logits), logits, nodes, depth, replace)
        return Children(tokens, q=q)

    @staticmethod
    def _masses(logits: Tensor, warp: Warp) -> Tensor:
        """Logarithms of the model's own law; at temperature 0 of that at 1."""
        plain = logits.log_softmax(-1)
        if warp.all_greedy:
            return plain
        greedy = upload(warp.temperatures == 0, logits.device).view(-1, 1, 1)
        return torch.where(greedy, plain, warp(logits).log())

    def _read(self, block: Block, slots: Sequence[int]) -> ForwardOutput:
        """Feed nodes of a tree, which are not committed."""
        end = self.model.context_length - 1
        roots = torch.tensor([[self._cache.lengths[slot] - 1] for slot in slots])
        return self.model.forward(
            self._own(block.tokens),
            (roots + block.depths).clamp_max(end),
            self._cache,
            slots,
            mask=block.mask,
            computed=block.computed,
        )

    def _prepared(self, context: Context) -> int:
        """The room behind a context that it is about to draft for."""
        return self.room(context)

    def catch_up(self, contexts: Sequence[Context]) -> None:
        self._read_on(contexts)

    def _read_on(self, contexts: Sequence[Context]) -> None:
        """Read what caches lack of these texts, in the model's tokens, if it is much."""
        for c in contexts:
            self._cache.truncate(c.slot, min(self._cache.lengths[c.slot], len(c.tokens) - 1))
            lacking = c.tokens[self._cache.lengths[c.slot] : -1]
            if len(lacking) > _MANY and len(c.tokens) < self.model.context_length:
                prefill(self.model, self._cache, c.slot, self._known(lacking))

    def _missing(self, contexts: Sequence[Context]) -> tuple[list[list[int]], Tensor, Tensor]:
        """What each cache lacks of its context, and as a block: tokens and positions `[B, T]`.

        That is one token at least: behind a round that emitted nothing the last is fed again.
        """
        self._read_on(contexts)
        lengths, end = self._cache.lengths, self.model.context_length - 1
        missing = [self._known(c.tokens[lengths[c.slot] :]) for c in contexts]
        width = max(map(len, missing))
        padded = [m + [0] * (width - len(m)) for m in missing]
        positions = [[min(lengths[c.slot] + i, end) for i in range(width)] for c in contexts]
        return missing, torch.tensor(padded), torch.tensor(positions)

    def _catch_up(
        self,
        missing: Sequence[Sequence[int]],
        block: Tensor,
        positions: Tensor,
        slots: Sequence[int],
    ) -> ForwardOutput:
        """Feed it; scores `[B, 1, ..]` after the last token of each."""
        out = self._forward(block, positions, slots)
        for slot, m in zip(slots, missing, strict=True):
            self._cache.commit(slot, range(len(m)))
        if block.shape[1] == 1:
            return out
        assert out.logits is not None
        ends = torch.tensor([len(m) - 1 for m in missing])

        def last(scores: Tensor) -> Tensor:
            at = upload(ends, scores.device).view(-1, 1, *[1] * (scores.dim() - 2))
            return scores.gather(1, at.expand(-1, 1, *scores.shape[2:]))

        top = out.top and Top(last(out.top.tokens), last(out.top.logprobs))
        return ForwardOutput(last(out.logits), top=top)

    def _step(
        self, token: Tensor, slots: Sequence[int], budgets: Sequence[int], step: int
    ) -> ForwardOutput:
        """One more token `[B, 1]`, which is not committed of sequences past their budget."""
        end = self.model.context_length - 1
        positions = torch.tensor([[min(self._cache.lengths[s], end)] for s in slots])
        out = self._forward(self._own(token), positions, slots)
        for slot, budget in zip(slots, budgets, strict=True):
            if step < budget:
                self._cache.commit(slot, (0,))
        return out

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Sequence[int]) -> ForwardOutput:
        taps = self._model_taps
        out = self.model.forward(tokens, positions, self._cache, slots, taps=taps)
        self._states += out.taps
        return out

    def _own(self, tokens: Tensor) -> Tensor:
        """Drafted tokens as the model reads them."""
        last = self.model.vocab_size - 1
        return tokens.clamp_max(last) if last < self._vocab_size - 1 else tokens

    def _likeliest(self, out: ForwardOutput) -> Tensor:
        """Tokens `[B, 1]`."""
        if out.top is not None and self.model.vocab_size <= self._vocab_size:
            return out.top.tokens
        return argmax(self._logits(out))

    def _logits(self, out: ForwardOutput) -> Tensor:
        """Of the target's vocabulary, where laws are computed."""
        assert out.logits is not None
        logits, lacking = out.logits, self._vocab_size - self.model.vocab_size
        logits = logits.to(law_device(logits.device))
        if lacking < 0:
            return logits[..., : self._vocab_size]
        return F.pad(logits, (0, lacking), value=-torch.inf) if lacking else logits

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with ids the draft has no embedding for (padding) replaced by its last."""
        last = self.model.vocab_size - 1
        return list(tokens) if last >= self._vocab_size - 1 else [min(t, last) for t in tokens]


def _fed(drawn: Tensor, before: Tensor, budgets: Sequence[int], step: int) -> Tensor:
    """What each sequence feeds `[B, 1]`: what it has drawn, or past its budget the same again."""
    if step <= min(budgets):
        return drawn
    within = upload(torch.tensor([[b >= step] for b in budgets]), drawn.device)
    return torch.where(within, drawn, upload(before[:, -1:], drawn.device))


def _paths(block: Block) -> list[list[list[int]]]:
    """For each sequence and row that is read now, the drafted tokens up to it; a host sync."""
    seen = block.mask[:, block.computed :].tolist()
    return [
        [[token for token, sees in zip(tokens, row, strict=True) if sees] for row in rows]
        for tokens, rows in zip(block.tokens.tolist(), seen, strict=True)
    ]


def share_of(model: LanguageModel, target: LanguageModel) -> float:
    """What it reads of weights for a token, of what the target reads; 0 where that is not known."""
    own, whole = (getattr(m, "weight_bytes", 0) for m in (model, target))
    return own / whole if whole else 0.0


class Branching(Protocol):
    """What a tree changes of a drafter, or of one to be."""

    builder: Builder | None
    proposes: Shape
    laws: tuple[type[Law], ...]
    k: int
    most: int
    rule: str
    draws: int


def branch(drafter: Branching, builder: Builder) -> None:
    """Let a drafter draft trees of this shape."""
    drawn: dict[Draw, tuple[type[Law], ...]] = {"without": (Rows,), "with": (Independent,)}
    drafter.builder, drafter.proposes = builder, builder.shape
    drafter.laws = (PointMass, *drawn.get(builder.draw, ()))
    drafter.k = drafter.most = builder.depth
    drafter.draws = builder.nodes
    if builder.draw == "top":
        drafter.rule = Drafter.rule
    elif builder.shape > Shape.CHAIN:
        drafter.rule = "traversal"
