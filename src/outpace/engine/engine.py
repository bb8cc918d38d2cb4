"""The engine: draft, score, verify, commit, for many requests at once."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Commit, Context, Drafter
from ..errors import NumericsError, OptionError
from ..models.base import ForwardOutput, LanguageModel, Layered, Top, prefill, upload
from ..models.tokenizer import NullDetokenizer, Tokenizer
from ..sampling import DraftNoise, Keys, Stream, Warp, law_device
from ..sampling.noise import F64
from ..trees import block_mask, block_positions
from ..types import Draft, Provenance, SamplingParams
from ..verifiers import GreedyVerifier, Noise, Verdict, Verifier, make_verifier
from .checks import (
    AUTO,
    check_compatible,
    check_draft,
    check_max_batch,
    check_max_len,
    check_request,
    choose_k,
    steady_rule,
)
from .clock import Clock
from .control import Controller
from .drafting import Drafting, controller_of, nothing
from .emission import (
    Emission,
    drafted_paths,
    emissions_of,
    follow_top,
    until_stuck,
    with_tops,
)
from .pipeline import make_pipeline
from .request import Request
from .stats import Stats


class Engine:
    """Runs requests in slots. Not safe for use by several threads at once.

    Args:
        target: the model whose law is kept.
        drafter: proposes; None is plain decoding, by the same code.
        k: draft length K, the longest path a drafter may propose; 0 is plain, "auto" in
            every round what promises most tokens per second then, None the drafter's own.
        verifier: the rule for requests that sample. At temperature 0 every lossless rule is
            the greedy one, and the engine takes that. By default it is the one that suits
            the drafter (its `rule`), and for requests with a seed "coupled", by which a
            seed gives one text with any drafter and K, or with none ("match" for drafts
            that "coupled" is not exact for). A rule that is given is for both, unless texts
            by it would follow from measured times or from other requests.
        max_batch: slots, requests that run at once; others wait.
        max_len: positions per request, at most the model's own.

    Attributes:
        k: the longest path that is ever drafted.
        auto: whether every round takes its own K.
        controller: chooses who drafts and how far; None where that is fixed.
        running: the requests that have a slot.
        stats: of all requests so far, with the time of every round counted once.

    Raises:
        IncompatibleError: drafter and verifier would not be exact together.
        OptionError, ContextLengthError: a value that cannot work.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        k: int | str | None = AUTO,
        verifier: Verifier | None = None,
        max_batch: int = 8,
        max_len: int | None = None,
    ) -> None:
        self.target = target
        self.verifier = verifier or make_verifier(drafter.rule if drafter else Drafter.rule)
        self.k, self.auto = choose_k(k, drafter)
        if drafter is not None:
            check_compatible(drafter, self.verifier)
        self.drafter = drafter if self.k else None
        self.max_len = check_max_len(max_len, target.context_length)
        self.stats = Stats()
        self._law_device = law_device(target.device)
        self._cache = target.new_cache(check_max_batch(max_batch), self.max_len)
        self._free = list(range(max_batch))
        self._waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._stepping = False
        self._undecided = False
        self._warps: dict[bool, Warp] = {}  # by whether it is for drafts
        self._steady = steady_rule(drafter) if verifier is None else None
        self.controller: Controller | None = None
        self._drafting: Drafting | None = None
        if self.drafter is not None:
            self.drafter.take()
            self.drafter.start(target, self._cache)
            self.k, self.auto = choose_k(k, self.drafter)  # its own may follow from the target
            self.controller = controller_of(
                self.drafter, None if self.auto else self.k, own=k is None
            )
            self._drafting = Drafting(self.drafter, self.controller)
            varies = self.controller is not None or self.drafter.remembers
            if varies and self.verifier.lossless and not self.verifier.invariant:
                self._steady = steady_rule(self.drafter)

    # --- requests ---------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        index: int = 0,
        noise: int | None = None,
    ) -> Request:
        """Queue a request of token ids.

        Args:
            eos: ids that end it, where the parameters do not say.
            tokenizer: for its text, and for parameters that speak of text.
            noise: what its noise is keyed by where the parameters have no seed, instead of a
                fresh number. It promises no text again, as a seed does.

        Raises:
            OptionError, IncompatibleError, ContextLengthError: see `check_request`.
        """
        check_request(prompt, params, self.target.vocab_size, self.max_len, self.verifier)
        given = noise if params.seed is None else params.seed
        seed = secrets.randbits(64) if given is None else given
        ids = params.ends(eos)
        request = Request(
            prompt,
            params,
            seed,
            frozenset(ids),
            self.max_len,
            tokenizer.detokenizer(prompt) if tokenizer else NullDetokenizer(),
            index,
        )
        request.pipeline = make_pipeline(
            params, request.tokens, self.target.vocab_size, ids, tokenizer, self._law_device
        )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request wherever it is; its slot is free at once, or after the round it is in."""
        request.cancel()
        if request in self._waiting:
            self._waiting.remove(request)
        if not self._stepping:  # a garbage collector may call from anywhere within
            self._stepping = True
            try:
                self._reap()
            finally:
                self._stepping = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # --- the round --------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit who waits, run one round, return the requests that took part.

        An error ends every request that took part (half a round cannot be
        taken up again), with the error as its `failure`; those that wait stay.
        """
        self._stepping = True
        try:
            self._reap()
            self.admit()
            running = list(self.running)
            if running:
                self._round(running)
            return running
        except BaseException as error:
            for request in self.running:
                request.fail(error)
            raise
        finally:
            try:
                self._reap()
            finally:
                self._stepping = False

    def _round(self, running: list[Request]) -> None:
        clock = Clock(self.target.device)
        draft = self.draft(running, clock)
        clock.lap("draft")
        scores = self.score(running, draft)
        clock.lap("target")
        emissions = self.verify(running, draft, scores)
        self._commit(running, draft, scores, emissions)
        laps, whole = clock.laps(), clock.whole()
        scored = laps.pop("target")
        read = chose = 0.0
        if self._drafting is not None:
            if self._drafting.rests:
                self._drafting.rested(whole, clock.recorded)
            else:
                rows = draft.tokens.shape[1] + 1
                read, chose = self._drafting.spent(laps, whole, rows, clock.recorded)
        drafted = sum(laps.values()) - read - chose
        for stats in (self.stats, *(r.stats for r in running)):
            stats.spend(drafted, scored, whole - read)
            stats.read(read, read)

    def draft(self, running: list[Request], clock: Clock | None = None) -> Draft:
        """What the drafter proposes for them."""
        alone, self._undecided = self._undecided, False
        if self._drafting is None or self._rest(running):
            return nothing(len(running), self._law_device)
        budgets = [0 if alone else r.budget(self.k) for r in running]
        if not any(budgets):
            self._drafting.sit_out(len(running))
            return nothing(len(running), self._law_device)
        warp = self.warp_of(running, for_draft=True)
        draft = self._drafting.draft(
            [_context(r) for r in running],
            budgets,
            [r.left for r in running],
            warp,
            partial(self._draft_noise, running, warp),
            clock or Clock(self.target.device),
            bool(self._waiting),
        )
        assert self.drafter is not None
        check_draft(draft, self.drafter, budgets, self.target.vocab_size)
        if draft.tokens.device != self._law_device:
            draft = replace(draft, tokens=draft.tokens.to(self._law_device))
        return draft

    def _rest(self, running: list[Request]) -> bool:
        """Whether no drafter has a part in this round."""
        assert self._drafting is not None
        if any(r.params.speculate for r in running):
            return self._drafting.rest(len(running))
        self._drafting.stand_by()
        return True

    def repeats(self, request: Request) -> bool:
        """Whether its seed gives its text again."""
        if request.params.greedy:
            return True
        if self._steady is not None and not request.pinned:
            return False  # with its seed it would be verified by the other rule
        varies = self.drafter is not None and (self.controller or self.drafter.remembers)
        return self.rule_for([request]).invariant or not varies

    def rule_for(self, running: list[Request]) -> Verifier:
        """The rule by which they are verified, if one of them samples."""
        if self._steady is None or not any(r.pinned for r in running):
            return self.verifier
        return self._steady

    def score(self, running: list[Request], draft: Draft) -> ForwardOutput:
        """The target's pass over their last tokens and this draft; nothing is committed."""
        device = self.target.device
        rows = draft.tokens.shape[1] + 1
        last = upload(torch.tensor([r.tokens[-1:] for r in running]), device)
        starts = [len(r.tokens) - 1 for r in running]
        forward = self.target.forward
        if draft.resume is not None and not self._taps:  # those of layers that have run are gone
            forward = partial(cast(Layered, self.target).forward, resume=draft.resume)
        out = forward(
            torch.cat([last, upload(draft.tokens, device)], 1),
            block_positions(starts, draft.trees, rows, self.max_len - 1),
            self._cache,
            [r.place for r in running],
            mask=block_mask(draft.trees, rows),
            taps=self._taps,
        )
        assert out.logits is not None
        if out.logits.device != self._law_device:
            out = replace(out, logits=out.logits.to(self._law_device))
        return out

    def verify(self, running: list[Request], draft: Draft, scores: ForwardOutput) -> list[Emission]:
        """What each request emits, on the host: the round's one sync.

        Raises:
            NumericsError: the target's logits are not numbers.
        """
        assert scores.logits is not None
        warp = self.warp_of(running)
        shaped = warp.shape(scores.logits, drafted_paths(draft) if warp.shapes else ())
        if not warp.all_greedy or not self.verifier.lossless:
            verdict = self._judge(running, draft, warp, shaped.logits)
            emissions = emissions_of(draft, scores, verdict)
        elif warp.shapes:
            emissions = emissions_of(draft, scores, GreedyVerifier()(shaped.logits, draft))
        else:
            emissions = follow_top(draft, scores.top or Top.of(scores.logits))
        if any(shaped.stuck):
            emissions = until_stuck(emissions, shaped.stuck)
        emissions = self._without_doubt(running, draft, scores.logits, shaped.logits, emissions)
        if any(math.isnan(x) for e in emissions for x in e.logprobs):
            raise NumericsError(
                "the target's logits are not numbers: run it in float32 (or bfloat16 instead of "
                "float16), and check its weights"
            )
        if any(r.params.logprobs for r in running):
            emissions = with_tops(emissions, [r.params.logprobs for r in running], scores)
        return emissions

    def _without_doubt(
        self,
        running: list[Request],
        draft: Draft,
        logits: Tensor,
        shaped: Tensor,
        emissions: list[Emission],
    ) -> list[Emission]:
        """Greedy requests stop before a token that is nearly tied with another.

        In company a row may round otherwise than alone, and decide otherwise. The
        next round is a plain one, which decides as plain decoding does.
        """
        batch, rows, vocabulary = logits.shape
        if rows == 1 or vocabulary == 1 or not any(r.params.greedy for r in running):
            return emissions
        doubt = self.target.doubt(batch, rows, not all(t.is_chain for t in draft.trees))
        if not doubt:
            return emissions
        best, ids = shaped.topk(2, -1)
        size = torch.maximum(best.nan_to_num(neginf=0).abs(), logits.gather(-1, ids).abs())
        near = (best[..., 0] - best[..., 1] <= doubt * size.amax(-1)).tolist()
        kept = []
        for request, emission, doubtful in zip(running, emissions, near, strict=True):
            sure = next((i for i, row in enumerate(emission.rows) if doubtful[row]), None)
            if request.params.greedy and sure is not None:
                emission = emission.cut(sure)
                self._undecided = True
            kept.append(emission)
        return kept

    def _judge(self, running: list[Request], draft: Draft, warp: Warp, logits: Tensor) -> Verdict:
        n, rule = draft.tokens.shape[1], self.rule_for(running)
        noise = Noise(
            accept=self._noise([r.noise.at(Stream.ACCEPT, len(r.tokens), n) for r in running]),
            target=self._noise([r.noise.along(len(r.tokens), n + 1) for r in running]),
            keys=self._keys(running) if rule.coupled else None,
        )
        return rule(warp(logits), draft, noise)

    def _commit(
        self,
        running: list[Request],
        draft: Draft,
        scores: ForwardOutput,
        emissions: list[Emission],
    ) -> None:
        """Take what was emitted."""
        commits = []
        drafting = None if self._drafting is None or self._drafting.rests else self._drafting
        tops = None if drafting is None else self._tops(draft, scores)
        for b, (request, emission) in enumerate(zip(running, emissions, strict=True)):
            path, tokens, tree = emission.path, emission.tokens, draft.trees[b]
            ended = (path[-1] if path else -1) not in tree.parents
            last: Provenance = "plain" if not len(tree) else "bonus" if ended else "correction"
            block = [request.tokens[-1]]
            count = 0
            for token, logprob in zip(tokens, emission.logprobs, strict=True):
                if request.finish_reason is not None:
                    break
                top = emission.tops[count] if emission.tops else ()
                count += 1
                provenance: Provenance = "draft" if count <= len(path) else last
                request.push(token, provenance, count, logprob, top)
            if emission.stuck and request.finish_reason is None:
                request.end(emission.failure)
            proposed, steps = len(tree), tree.depth
            if count < len(tokens) or len(tokens) == len(path):  # what lies behind was not proposed
                proposed, ended = count, True
            accepted, who = min(count, len(path)), ""
            if drafting is not None:
                who = drafting.drafter_of(b)
                drafting.judged(b, request.place, accepted, ended, count)
            for stats in (request.stats, self.stats):
                stats.count(proposed, accepted, count, steps, who, ended=ended)
            if request.finish_reason is None:
                kept = emission.rows
                self._cache.commit(request.place, kept)
                features = tuple(t[b, kept] for t in scores.taps)
                path = path[: max(0, len(kept) - 1)]
                if tops is not None:
                    block += draft.tokens[b, : len(tree)].tolist()
                top_rows = None if tops is None else tops[b, : len(block)]
                commits.append(Commit(request.place, path, features, block, top_rows))
        if self._drafting is not None and commits and (drafting is not None or self._taps):
            self._drafting.observe(commits)

    def _tops(self, draft: Draft, scores: ForwardOutput) -> Tensor | None:
        """The target's likeliest tokens `[B, N + 1, tops]`, on the host, if the drafter asks."""
        count = 0 if self._drafting is None else self._drafting.tops
        if not count:
            return None
        assert scores.logits is not None  # a second host sync, for who asked
        if count == 1:
            return (scores.top or Top.of(scores.logits)).tokens.unsqueeze(-1).cpu()
        return scores.logits.topk(min(count, scores.logits.shape[-1]), -1).indices.cpu()

    # --- slots ------------------------------------------------------------------

    def admit(self) -> None:
        """Give free slots to those that wait, and read their prompts."""
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.pop(0)
            self.running.append(request)
            self._warps.clear()
            clock = Clock(self.target.device)
            self._cache.truncate(request.slot, 0)
            prompt = request.tokens[:-1]
            features = prefill(self.target, self._cache, request.slot, prompt, self._taps)
            clock.lap("target")
            if self._drafting is not None:
                temperature = request.params.temperature
                self._drafting.open(_context(request), features, temperature)
            clock.lap("reading")
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)  # once per request, for its times
            reading, whole = clock.laps()["reading"], clock.whole()
            for stats in (request.stats, self.stats):
                stats.read(reading, whole)

    def _reap(self) -> None:
        """Give back the slots of all that have finished."""
        while finished := [r for r in self.running if r.finish_reason is not None]:
            request = finished[0]
            slot = request.place
            self.running.remove(request)
            self._warps.clear()
            self._cache.truncate(slot, 0)
            request.slot = None
            self._free = sorted([*self._free, slot])
            if self._drafting is not None:
                self._drafting.close(slot)

    @contextmanager
    def fixed(
        self, k: int, verifier: Verifier | None = None, drafter: Drafter | None = None
    ) -> Iterator[None]:
        """The same engine with a fixed K, all by one rule, for as long as this lasts.

        Args:
            drafter: of the members of its drafter the one that drafts; by default all do.

        Raises:
            OptionError: the engine is busy.
        """
        if self.busy:
            raise OptionError("the engine is busy: wait until its requests have ended")
        names = ("k", "auto", "verifier", "_steady", "drafter", "controller", "_drafting")
        held = {name: getattr(self, name) for name in names}
        try:
            self.k, self.auto = k, False
            self.verifier, self._steady = verifier or self.verifier, None
            self.drafter = (drafter or self.drafter) if k else None
            self.controller = self._drafting = None
            if self.drafter is not None:
                self.controller = controller_of(self.drafter, k)
                self._drafting = Drafting(self.drafter, self.controller)
            yield
        finally:
            for name, value in held.items():
                setattr(self, name, value)

    # --- helpers ----------------------------------------------------------------

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()

    def warp_of(self, running: list[Request], for_draft: bool = False) -> Warp:
        """Their sampling parameters as a function."""
        if for_draft not in self._warps:
            pipelines = [
                r.pipeline if r.params.transform_draft or not for_draft else None for r in running
            ]
            self._warps[for_draft] = Warp(
                [r.params for r in running],
                self.target.vocab_size,
                self._law_device,
                getattr(self.target, "library", None),
                pipelines,
            )
        return self._warps[for_draft]

    def _draft_noise(self, running: list[Request], warp: Warp, nodes: int) -> DraftNoise | None:
        if warp.all_greedy:
            return None
        if self.rule_for(running).coupled:
            return DraftNoise(keys=self._keys(running))
        assert self.drafter is not None
        count = max(nodes, self.drafter.draws)
        rows = [r.noise.at(Stream.DRAFT, len(r.tokens), count) for r in running]
        return DraftNoise(self._noise(rows))

    def _keys(self, running: list[Request]) -> Keys:
        seeds = np.array([r.seed for r in running], np.uint64).view(np.int64)
        first = torch.tensor([len(r.tokens) for r in running])
        return Keys(
            upload(torch.from_numpy(seeds), self._law_device), upload(first, self._law_device)
        )

    def _noise(self, rows: list[F64]) -> Tensor:
        stacked = rows[0][None] if len(rows) == 1 else np.stack(rows)
        return upload(torch.from_numpy(stacked), self._law_device)


def _context(request: Request) -> Context:
    return Context(request.place, request.tokens, len(request.prompt))
