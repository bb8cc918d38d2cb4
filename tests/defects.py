"""Engines that real systems shipped or nearly shipped, each wrong in one place.

Negative controls: an audit must find every one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outpace.audit import GeneratorSystem
from outpace.drafters import ModelDrafter
from outpace.engine import Engine
from outpace.generator import Generator
from outpace.models import MarkovModel
from outpace.models.base import ForwardOutput
from outpace.sampling import DraftNoise, RequestNoise, Stream, Warp
from outpace.trees import chain
from outpace.types import Draft, Rows, SamplingParams

# --- drafters ----------------------------------------------------------------------------------


class Misreporting(ModelDrafter):
    """Draws at one temperature, reports the rows of another."""

    def draft(self, contexts, budgets, warp, noise):
        drawn = super().draft(contexts, budgets, warp, noise)
        if not isinstance(drawn.law, Rows):
            return drawn
        flat = drawn.law.q**0.5
        return Draft(drawn.tokens, Rows(flat / flat.sum(-1, keepdim=True)), drawn.trees)


@dataclass(frozen=True)
class Tampered:
    """Noise that draws by another function of it and the row."""

    honest: DraftNoise
    how: Callable
    keys = uniforms = None

    def draw(self, p, node, depth):
        return self.how(self.honest, p, node, depth)

    def select(self, rows):
        return Tampered(self.honest.select(rows), self.how)


class ArgmaxWithRows(ModelDrafter):
    """Drafts its likeliest tokens, reports them as drawn from its softmax."""

    def draft(self, contexts, budgets, warp, noise):
        likeliest = Tampered(noise, lambda noise, p, *at: p.argmax(-1))
        return super().draft(contexts, budgets, warp, noise and likeliest)


class TruncatedDraw(ModelDrafter):
    """Draws from its three likeliest tokens, reports all of them."""

    def draft(self, contexts, budgets, warp, noise):
        def truncated(noise, p, *at):
            return noise.draw(torch.where(p >= p.topk(3, -1).values[..., -1:], p, 0), *at)

        return super().draft(contexts, budgets, warp, noise and Tampered(noise, truncated))


class HalfPrecisionDraw(ModelDrafter):
    """Draws in bf16, reports what it was rounded from."""

    def draft(self, contexts, budgets, warp, noise):
        def rounded(noise, p, *at):
            return noise.draw(p.bfloat16().to(p.dtype), *at)

        return super().draft(contexts, budgets, warp, noise and Tampered(noise, rounded))


class DropsUnlikely(ModelDrafter):
    """Ends the draft before a token of low confidence, after having drawn it."""

    def draft(self, contexts, budgets, warp, noise):
        drawn = super().draft(contexts, budgets, warp, noise)
        if not isinstance(drawn.law, Rows):
            return drawn
        sure = drawn.law.q.gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1) > 0.3
        kept = sure.cumprod(1).sum(1).tolist()
        trees = tuple(chain(min(n, len(t))) for n, t in zip(kept, drawn.trees, strict=True))
        return Draft(drawn.tokens, drawn.law, trees)


# --- engines -----------------------------------------------------------------------------------


class OncePerBlock(Engine):
    """Transforms see what is committed, for every row of a block."""

    def verify(self, running, draft, scores):
        warp = self.warp_of(running)
        honest = type(warp).shape

        def shape(self, logits, paths):
            return honest(self, logits, [[()] * len(rows) for rows in paths])

        try:
            Warp.shape = shape
            return super().verify(running, draft, scores)
        finally:
            Warp.shape = honest


class DropsParameters(Engine):
    """Where something was drafted, min-p and logit bias are forgotten."""

    def verify(self, running, draft, scores):
        if not draft.tokens.shape[1]:
            return super().verify(running, draft, scores)
        kept = [r.params for r in running], [r.pipeline for r in running]
        self._warps.clear()
        for r in running:
            r.params, r.pipeline = replace(r.params, min_p=0.0, logit_bias=()), None
        try:
            return super().verify(running, draft, scores)
        finally:
            self._warps.clear()
            for r, params, pipeline in zip(running, *kept, strict=True):
                r.params, r.pipeline = params, pipeline


class LosesTheLastKey(Engine):
    """After a full acceptance the cache lacks the last drafted token."""

    def _commit(self, running, draft, scores, emissions):
        super()._commit(running, draft, scores, emissions)
        for r, e, tree in zip(running, emissions, draft.trees, strict=True):
            if r.finish_reason is None and len(tree) and len(e.path) == len(tree):
                self._cache.truncate(r.slot, self._cache.lengths[r.slot] - 1)


class NoiseBySlot(Engine):
    """Noise follows the slot that a request happens to have."""

    def admit(self):
        super().admit()
        for r in self.running:
            r.noise = RequestNoise(r.slot + 1 + 64 * len(self.stats.reached))


class NoiseOfTheNeighbour(Engine):
    """Requests of a batch take each other's rows of the draft's law."""

    def draft(self, running, clock=None):
        drawn = super().draft(running, clock)
        if not isinstance(drawn.law, Rows):
            return drawn
        return replace(drawn, law=Rows(drawn.law.q.roll(1, 0)))


class DraftsWithAcceptanceNoise(Engine):
    """One uniform draws a draft token and decides about it."""

    def draft(self, running, clock=None):
        class Shared(RequestNoise):
            def at(self, stream, position, indices):
                return super().at(Stream.ACCEPT, position, indices)

        for r in running:
            if not isinstance(r.noise, Shared):
                r.noise = Shared(r.seed)
        return super().draft(running, clock)


class RoundsInCompany(MarkovModel):
    """A target whose logits depend on how many rows are computed with them."""

    def doubt(self, batch, rows, branched):
        return 0.0

    def forward(self, tokens, *args, **options):
        out = super().forward(tokens, *args, **options)
        if tokens.shape[1] == 1:
            return out
        ripple = torch.sin(31.0 * torch.arange(self.vocab_size, dtype=torch.float64))
        return ForwardOutput(out.logits + 0.02 * ripple)


class IgnoresInnerEnds(GeneratorSystem):
    """An EOS token that was drafted is passed over."""

    def sample(self, prompt, params, seeds):
        eos = set(self.generator.eos_token_ids)
        endless = replace(params, eos_token_ids=())
        texts = []
        for result in self.generator.generate(
            [list(prompt)] * len(seeds), params=endless, seed=list(seeds)
        ):
            ends = [
                i + 1
                for i, e in enumerate(result.tokens)
                if e.token_id in eos and e.provenance != "draft"
            ]
            texts.append(list(result.token_ids[: min(ends, default=None)]))
        return texts


def with_engine(kind, generator: Generator) -> Generator:
    """The generator, run by another engine."""
    engine = generator.engine
    generator.engine = kind(
        engine.target, untaken(engine.drafter), engine.k, engine.verifier, max_batch=256
    )
    return generator


def untaken(drafter):
    """The same drafter for another engine; the one that had it is not used any more."""
    again = copy.copy(drafter)
    again.taken = False
    return again


PENALISED = SamplingParams(temperature=1.0, repetition_penalty=1.6, max_new_tokens=6)
BIASED = SamplingParams(temperature=1.0, min_p=0.1, logit_bias={1: 1.0}, max_new_tokens=6)
