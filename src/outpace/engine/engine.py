"""The engine: draft, score, verify, commit, for many requests at once."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Commit, Context, Drafter
from ..errors import NumericsError
from ..models.base import ForwardOutput, LanguageModel, Top, prefill, upload
from ..models.tokenizer import Detokenizer, NullDetokenizer
from ..sampling import Stream, Warp, law_device
from ..sampling.noise import F64
from ..trees import block_mask, block_positions, chain
from ..types import Draft, PointMass, Provenance, SamplingParams, Tree
from ..verifiers import Noise, TokenVerifier, Verdict, Verifier, follow
from .checks import check_compatible, check_k, check_max_batch, check_max_len, check_request
from .clock import Clock
from .request import Request
from .stats import Stats


@dataclass(frozen=True, slots=True)
class Emission:
    """What a round emits of one request: the accepted path, its tokens and one more.

    The one more is lacking where the target's choice is left to a pass of its own.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[float]


class Engine:
    """Runs requests in slots. Not safe for use by several threads at once.

    Args:
        target: the model whose law is kept.
        drafter: proposes; None is plain decoding, by the same code.
        k: draft length K, the longest path a drafter may propose; 0 is plain.
        verifier: the rule for requests that sample. At temperature 0 every
            lossless rule is the greedy one, and the engine takes that.
        max_batch: slots, requests that run at once; others wait.
        max_len: positions per request, at most the model's own.

    Attributes:
        stats: of all requests so far, with the time of every round counted once.

    Raises:
        IncompatibleError: drafter and verifier would not be exact together.
        OptionError, ContextLengthError: a value that cannot work.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        k: int = 4,
        verifier: Verifier | None = None,
        max_batch: int = 8,
        max_len: int | None = None,
    ) -> None:
        self.target = target
        self.verifier: Verifier = verifier or TokenVerifier()
        self.k = check_k(k) if drafter is not None else 0
        if drafter is not None:
            check_compatible(drafter, self.verifier)
        self.drafter = drafter if self.k else None
        self.max_len = check_max_len(max_len, target.context_length)
        self.stats = Stats()
        self._law_device = law_device(target.device)
        self._cache = target.new_cache(check_max_batch(max_batch), self.max_len)
        self._free = list(range(max_batch))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._stepping = False
        self._undecided = False
        self._warp: Warp | None = None
        if self.drafter is not None:
            self.drafter.start(max_batch, self.max_len)

    # --- requests ---------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos: Sequence[int] = (),
        detokenizer: Detokenizer | None = None,
        index: int = 0,
    ) -> Request:
        """Queue a request of token ids.

        Raises:
            OptionError, IncompatibleError, ContextLengthError: see `check_request`.
        """
        check_request(prompt, params, self.target.vocab_size, self.max_len, self.verifier)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        ids = params.eos_token_ids if params.eos_token_ids is not None else tuple(eos)
        request = Request(
            prompt,
            params,
            seed,
            frozenset(ids),
            self.max_len,
            detokenizer or NullDetokenizer(),
            index,
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
        return bool(self._running or self._waiting)

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
            self._admit()
            running = list(self._running)
            if running:
                self._round(running)
            return running
        except BaseException as error:
            for request in self._running:
                request.fail(error)
            raise
        finally:
            try:
                self._reap()
            finally:
                self._stepping = False

    def _round(self, running: list[Request]) -> None:
        clock = Clock(self.target.device)
        draft = self._draft(running)
        clock.lap()
        scores = self._score(running, draft)
        clock.lap()
        emissions = self._verify(running, draft, scores)
        self._commit(running, draft, scores, emissions)
        drafted, scored = clock.laps()
        for stats in (self.stats, *(r.stats for r in running)):
            stats.spend(drafted, scored, clock.whole())

    def _draft(self, running: list[Request]) -> Draft:
        budgets = [r.budget(self.k) for r in running]
        alone, self._undecided = self._undecided, False
        if self.drafter is None or alone or not any(budgets):
            empty = torch.empty(len(running), 0, dtype=torch.int64, device=self._law_device)
            return Draft(empty, PointMass(), (chain(0),) * len(running))
        warp = self._warp_of(running)
        noise = None
        if not warp.all_greedy:
            noise = self._noise(
                [r.noise.at(Stream.DRAFT, len(r.tokens), max(budgets)) for r in running]
            )
        draft = self.drafter.draft([_context(r) for r in running], budgets, warp, noise)
        assert isinstance(draft.law, self.drafter.laws)
        assert self.drafter.proposes_trees or all(t.is_chain for t in draft.trees)
        if draft.tokens.device != self._law_device:
            draft = replace(draft, tokens=draft.tokens.to(self._law_device))
        return draft

    def _score(self, running: list[Request], draft: Draft) -> ForwardOutput:
        device = self.target.device
        rows = draft.tokens.shape[1] + 1
        last = upload(torch.tensor([r.tokens[-1:] for r in running]), device)
        starts = [len(r.tokens) - 1 for r in running]
        out = self.target.forward(
            torch.cat([last, upload(draft.tokens, device)], 1),
            block_positions(starts, draft.trees, rows, self.max_len - 1),
            self._cache,
            [_slot(r) for r in running],
            mask=block_mask(draft.trees, rows),
            taps=self._taps,
        )
        assert out.logits is not None
        if out.logits.device != self._law_device:
            out = replace(out, logits=out.logits.to(self._law_device))
        return out

    def _verify(
        self, running: list[Request], draft: Draft, scores: ForwardOutput
    ) -> list[Emission]:
        """What each request emits, on the host: the round's one sync.

        Raises:
            NumericsError: the target's logits are not numbers.
        """
        assert scores.logits is not None
        warp = self._warp_of(running)
        if warp.all_greedy and self.verifier.lossless:
            emissions = _follow(draft, scores.top or Top.of(scores.logits))
        else:
            verdict = self._judge(running, draft, warp, scores.logits)
            emissions = _emissions(draft, scores, verdict)
        emissions = self._without_doubt(running, draft, scores.logits, emissions)
        if any(math.isnan(x) for e in emissions for x in e.logprobs):
            raise NumericsError(
                "the target's logits are not numbers: run it in float32 (or bfloat16 instead of "
                "float16), and check its weights"
            )
        return emissions

    def _without_doubt(
        self, running: list[Request], draft: Draft, logits: Tensor, emissions: list[Emission]
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
        best = logits.topk(2, -1).values
        near = (best[..., 0] - best[..., 1] <= doubt * best.abs().amax(-1)).tolist()
        kept = []
        for request, emission, doubtful in zip(running, emissions, near, strict=True):
            before = [0, *(node + 1 for node in emission.path)]
            sure = next((i for i, row in enumerate(before) if doubtful[row]), len(before))
            if request.params.greedy and sure < len(before):
                path, tokens, logprobs = emission.path, emission.tokens, emission.logprobs
                emission = Emission(path[:sure], tokens[:sure], logprobs[:sure])
                self._undecided = True
            kept.append(emission)
        return kept

    def _judge(self, running: list[Request], draft: Draft, warp: Warp, logits: Tensor) -> Verdict:
        n = draft.tokens.shape[1]
        noise = Noise(
            accept=self._noise([r.noise.at(Stream.ACCEPT, len(r.tokens), n) for r in running]),
            target=self._noise([r.noise.along(len(r.tokens), n + 1) for r in running]),
        )
        return self.verifier(warp(logits), draft, noise)

    def _commit(
        self,
        running: list[Request],
        draft: Draft,
        scores: ForwardOutput,
        emissions: list[Emission],
    ) -> None:
        commits = []
        for b, (request, emission) in enumerate(zip(running, emissions, strict=True)):
            path, tokens, logprobs = emission.path, emission.tokens, emission.logprobs
            tree = draft.trees[b]
            last = _last_provenance(tree, path)
            count = 0
            for token, logprob in zip(tokens, logprobs, strict=True):
                if request.finish_reason is not None:
                    break
                count += 1
                provenance: Provenance = "draft" if count <= len(path) else last
                request.push(token, provenance, count, logprob)
            proposed, length = len(tree), max(tree.depths, default=0)
            steps = length
            stopped = count < len(tokens) or len(tokens) == len(path)
            if stopped:  # what lies behind was never proposed
                proposed = length = count
            for stats in (request.stats, self.stats):
                stats.count(proposed, length, min(count, len(path)), count, steps)
            if request.finish_reason is None:
                kept = [0, *(node + 1 for node in path)][: len(tokens)]
                self._cache.commit(_slot(request), kept)
                features = tuple(t[b, kept] for t in scores.taps)
                commits.append(Commit(_slot(request), path[: max(0, len(kept) - 1)], features))
        if self.drafter is not None and commits:
            self.drafter.observe(commits)

    # --- slots ------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.pop(0)
            self._running.append(request)
            self._warp = None
            clock = Clock(self.target.device)
            self._cache.truncate(request.slot, 0)
            prompt = request.tokens[:-1]
            features = prefill(self.target, self._cache, request.slot, prompt, self._taps)
            if self.drafter is not None:
                self.drafter.open(_context(request), features)
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)  # once per request, for its times
            for stats in (request.stats, self.stats):
                stats.prefill_seconds += clock.whole()

    def _reap(self) -> None:
        """Give back the slots of all that have finished."""
        while finished := [r for r in self._running if r.finish_reason is not None]:
            request = finished[0]
            slot = _slot(request)
            self._running.remove(request)
            self._warp = None
            self._cache.truncate(slot, 0)
            if self.drafter is not None:
                self.drafter.close(slot)
            request.slot = None
            self._free = sorted([*self._free, slot])

    # --- helpers ----------------------------------------------------------------

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()

    def _warp_of(self, running: list[Request]) -> Warp:
        if self._warp is None:
            params = [r.params for r in running]
            library = getattr(self.target, "library", None)
            self._warp = Warp(params, self.target.vocab_size, self._law_device, library)
        return self._warp

    def _noise(self, rows: list[F64]) -> Tensor:
        stacked = rows[0][None] if len(rows) == 1 else np.stack(rows)
        return upload(torch.from_numpy(stacked), self._law_device)


def _follow(draft: Draft, top: Top) -> list[Emission]:
    """The target's likeliest tokens, as far as they were drafted and one more."""
    best, logprobs, drafted = _to_host(top.tokens, top.logprobs, draft.tokens)
    out = []
    for b, tree in enumerate(draft.trees):
        path = follow(best[b], drafted[b], tree)
        before = [0, *(node + 1 for node in path)]  # the row that scored each token
        tokens = [int(best[b][i]) for i in before]
        out.append(Emission(path, tokens, [logprobs[b][i] for i in before]))
    return out


def _emissions(draft: Draft, scores: ForwardOutput, verdict: Verdict) -> list[Emission]:
    """The same from a verdict `[B, ...]`.

    A token's log-probability is its logit's distance to the likeliest's, and that one's own.
    """
    logits, path = scores.logits, verdict.path
    assert logits is not None
    top = scores.top or Top.of(logits)
    if logits.device.type == "cpu":
        return _emissions_on_host(draft, logits, top, verdict)
    root = path.new_zeros(len(path), 1)
    before = torch.cat([root, path + 1], 1)  # [B, D + 1] the row that scored each token
    ids = torch.cat([draft.tokens.gather(1, path.clamp_min(0)), root], 1)
    ids.scatter_(1, verdict.accepted.unsqueeze(1), verdict.token.unsqueeze(1))
    sequence = torch.arange(len(path), device=path.device).unsqueeze(1)
    best = logits[sequence, before, top.tokens.gather(1, before)].double()
    logprobs = logits[sequence, before, ids].double() - best + top.logprobs.gather(1, before)
    out = []
    packed = _to_host(verdict.accepted.unsqueeze(1), path, ids, logprobs)
    for (accepted, *_), nodes, tokens, values in zip(*packed, strict=True):
        n = int(accepted)
        emitted = [int(x) for x in tokens[: n + 1]]
        out.append(Emission([int(x) for x in nodes[:n]], emitted, values[: n + 1]))
    return out


def _emissions_on_host(draft: Draft, logits: Tensor, top: Top, verdict: Verdict) -> list[Emission]:
    """Where a tensor's elements are at hand: a dozen operators would take longer than the rest."""
    drafted, best, highest = draft.tokens.tolist(), top.tokens.tolist(), top.logprobs.tolist()
    paths, counts, ends = verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist()
    exact = logits.dtype in (torch.float32, torch.float64)
    values = (logits if exact else logits.float()).numpy()
    out = []
    for b, n in enumerate(counts):
        path = paths[b][:n]
        tokens = [*(drafted[b][node] for node in path), ends[b]]
        logprobs = [
            float(values[b, row, token] - values[b, row, best[b][row]]) + highest[b][row]
            for row, token in zip([0, *(node + 1 for node in path)], tokens, strict=True)
        ]
        out.append(Emission(path, tokens, logprobs))
    return out


def _to_host(*tensors: Tensor) -> list[list[list[Any]]]:
    """Tensors `[B, ..]` as lists, all at once."""
    if all(t.device.type == "cpu" for t in tensors):
        return [t.tolist() for t in tensors]
    device = tensors[0].device
    packed = torch.cat([t.to(device).double() for t in tensors], 1).tolist()
    widths = [t.shape[1] for t in tensors]
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [
        [row[end - width : end] for row in packed] for width, end in zip(widths, ends, strict=True)
    ]


def _last_provenance(tree: Tree, path: list[int]) -> Provenance:
    if not len(tree):
        return "plain"
    return "correction" if (path[-1] if path else -1) in tree.parents else "bonus"


def _context(request: Request) -> Context:
    return Context(_slot(request), request.tokens)


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot
