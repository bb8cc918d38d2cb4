"""Draft models of another vocabulary: by their common tokens, or by text.

Timor et al., "Accelerating LLM inference with lossless speculative decoding
algorithms for heterogeneous vocabularies", ICML 2025. Either way the draft
reads the text in its own tokens, split as its own tokenizer splits it.

TLI (algorithm 4) drafts tokens that both vocabularies have, drawn from the
draft's law restricted to them; the target's law stays whole. SLEM (algorithm 2)
lets the draft write freely, and takes what the target's tokenizer makes of the
bytes: those tokens were not drawn from any row, so they are proposed as certain.
The draft writes its likeliest text then, which is what certain tokens pass best with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import VocabularyMismatchError
from ..models.base import ForwardOutput, LanguageModel, RollsOut, prefill, upload
from ..models.cache import SlotCache
from ..models.loading import Progress, load_tokenizer
from ..sampling import DraftNoise, Warp, argmax, law_device
from ..trees import Builder, chain
from ..types import Draft, Law, PointMass, SamplingParams
from .base import Commit, Context, Drafter, certain, refuse_tree
from .blueprint import Checkpoint, Setting
from .model import ModelDrafter, branch
from .translation import Common, Translated, Words, special_pairs

_TAIL = 8
"""Tokens before a draft that its split may depend on."""


class ForeignDrafter(ModelDrafter):
    """A draft model that reads each text in its own tokens."""

    def __init__(self, model: LanguageModel, target: Words, draft: Words, name: str) -> None:
        super().__init__(model, name)
        self._target, self._draft = target, draft
        self._special = special_pairs(target, draft)
        self._texts: dict[int, Translated] = {}
        self._held: dict[int, list[int]] = {}  # what its cache holds

    @property
    def alone(self) -> LanguageModel | None:
        return None

    def _positions(self, cache: SlotCache) -> int:
        return self.model.context_length  # a text may take more of its tokens than of the target's

    def open(self, context: Context, features: tuple[Tensor, ...] = ()) -> None:
        self._cache.truncate(context.slot, 0)
        self._texts[context.slot] = text = Translated(self._target, self._draft, self._special)
        text.extend(context.tokens)
        held = text.ids[:-1] if len(text.ids) < self.model.context_length else []
        prefill(self.model, self._cache, context.slot, held)
        self._held[context.slot] = held

    def close(self, slot: int) -> None:
        super().close(slot)
        del self._texts[slot], self._held[slot]

    def observe(self, commits: Sequence[Commit]) -> None:
        pass  # the text tells, at the next draft

    def branch(self, builder: Builder) -> None:
        refuse_tree(self.name)

    def room(self, context: Context) -> int:
        """As far as the text has been translated."""
        text = self._texts.get(context.slot)
        return self.model.context_length - len(context.tokens if text is None else text.ids)

    def catch_up(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._prepared(context)
        self._read_on(self._translated(contexts))

    def _translated(self, contexts: Sequence[Context]) -> list[Context]:
        return [Context(c.slot, self._texts[c.slot].ids) for c in contexts]

    def _prepared(self, context: Context) -> int:
        """The same, of the text in the draft's tokens: what is fed is what its cache lacks."""
        text, held = self._texts[context.slot], self._held[context.slot]
        same = min(text.extend(context.tokens[text.count :]), len(held))
        while same < min(len(held), len(text.ids)) and held[same] == text.ids[same]:
            same += 1
        same = min(same, max(0, len(text.ids) - 1))
        self._cache.truncate(context.slot, same)
        room = self.model.context_length - len(text.ids)
        held[same:] = text.ids[same:] if text.ids and room > 0 else []
        return room if text.ids else 0

    def _missing(self, contexts: Sequence[Context]) -> tuple[list[list[int]], Tensor, Tensor]:
        return super()._missing(self._translated(contexts))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)


class TLIDrafter(ForeignDrafter):
    """Drafts the tokens that both vocabularies have."""

    def __init__(self, model: LanguageModel, common: Common, name: str) -> None:
        super().__init__(model, common.target, common.draft, name)
        self._common = common
        self._fed: dict[int, list[int]] = {}  # the last draft, in the draft's tokens

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        super().start(target, cache)
        self._rolls_out = False  # what it draws is not what it feeds
        index = self._common.gather(target.vocab_size)
        place = law_device(self.model.device)
        self._to_draft = upload(index.clamp_min(0), place)
        self._lacking = upload(index < 0, place)

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        draft = super().draft(contexts, budgets, warp, noise)
        fed = self._to_draft[draft.tokens].tolist()  # a host sync
        for context, row, tree in zip(contexts, fed, draft.trees, strict=True):
            if context.slot in self._grown:
                self._fed[context.slot] = row
            else:
                self._held[context.slot] += row[: max(0, len(tree) - 1)]
        return draft

    def branch(self, builder: Builder) -> None:
        branch(self, builder)

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.slot in self._grown:
                kept = self._kept(commit)
                self._cache.commit(commit.slot, kept)
                self._held[commit.slot] += [self._fed[commit.slot][n] for n in commit.path][
                    : len(kept)
                ]

    def _own(self, tokens: Tensor) -> Tensor:
        return self._to_draft[tokens]

    def _likeliest(self, out: ForwardOutput) -> Tensor:
        return argmax(self._logits(out))

    def _logits(self, out: ForwardOutput) -> Tensor:
        assert out.logits is not None
        logits = out.logits.to(self._to_draft.device)
        return logits[..., self._to_draft].masked_fill(self._lacking, -torch.inf)


class SLEMDrafter(ForeignDrafter):
    """Drafts what the target's tokenizer makes of the text that the draft writes."""

    laws: tuple[type[Law], ...] = (PointMass,)
    rule = "match"

    def start(self, target: LanguageModel, cache: SlotCache) -> None:
        super().start(target, cache)
        self._ids = target.vocab_size
        self._vocab_size = self.model.vocab_size  # it drafts in its own
        self._rolls_out = isinstance(self.model, RollsOut)

    def draft(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[int],
        warp: Warp,
        noise: DraftNoise | None,
    ) -> Draft:
        width, place = self.model.vocab_size, law_device(self.model.device)
        library = getattr(self.model, "library", None)
        likeliest = Warp([SamplingParams()] * len(contexts), width, place, library)
        written = super().draft(contexts, budgets, likeliest, None)
        proposals = []
        rows = zip(contexts, budgets, written.tokens.tolist(), written.trees, strict=True)
        for context, budget, row, tree in rows:
            self._held[context.slot] += row[: max(0, len(tree) - 1)]
            tokens = self._retokenized(context.tokens, row[: len(tree)])[:budget]
            proposals.append((tokens, chain(len(tokens))))
        return certain(proposals, warp.device)

    def _retokenized(self, before: Sequence[int], written: list[int]) -> list[int]:
        """Target tokens of what the draft wrote behind a text."""
        ends = [
            i for i, token in enumerate(written) if token in self._draft.tokenizer.eos_token_ids
        ]
        text = self._draft.bytes_of(written[: ends[0]] if ends else written)
        tail = self._tail(before)
        both = self._target.split(self._target.bytes_of(tail) + text)
        tokens = both[len(tail) :] if both[: len(tail)] == tail else self._target.split(text)
        tokens += self._target.tokenizer.eos_token_ids[:1] if ends else ()
        return [token for token in tokens if token < self._ids]

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens, from one that begins with a blank."""
        for n in range(1, min(_TAIL, len(tokens)) + 1):
            if self._target.bytes_of(tokens[-n : len(tokens) - n + 1])[:1].isspace():
                return list(tokens[-n:])
        return []


class ForeignCheckpoint(Checkpoint):
    """A draft model of another vocabulary, in a folder or on the hub."""

    requires = "tokenizers of bytes"

    def check(self, setting: Setting) -> Sequence[str]:
        self._find(setting)
        self._target = Words(setting.tokenizer, "target")
        self._draft = Words(load_tokenizer(self._source), "draft", self._source.vocab_size)
        return self._remarks()

    def _remarks(self) -> Sequence[str]:
        return ()

    def branch(self, builder: Builder) -> None:
        refuse_tree(self.name)


class TLI(ForeignCheckpoint):
    """Drafts with a model of another vocabulary the tokens that both have.

    Args:
        path: of the draft model: a folder or a hub id.
    """

    def _remarks(self) -> Sequence[str]:
        self._common = Common(self._target, self._draft)
        if not self._common.texts:
            raise VocabularyMismatchError(
                f"the target and {self.name} have no token in common, so there is nothing to "
                f"draft by intersection: 'slem:{self.name}' matches their texts instead"
            )
        return [f"{self._common.share:.0%} of the target's tokens can be drafted by {self.name}"]

    def branch(self, builder: Builder) -> None:
        branch(self, builder)

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        drafter = TLIDrafter(self._load(target, progress), self._common, f"tli:{self.name}")
        if self.builder is not None:
            drafter.branch(self.builder)
        return drafter


class SLEM(ForeignCheckpoint):
    """Drafts with a model of another vocabulary by the text that it writes.

    Args:
        path: of the draft model: a folder or a hub id.
    """

    laws = SLEMDrafter.laws
    rule = SLEMDrafter.rule

    def build(self, target: LanguageModel, progress: Progress) -> Drafter:
        model = self._load(target, progress)
        return SLEMDrafter(model, self._target, self._draft, f"slem:{self.name}")
