"""The engine: draft, score, verify, commit, for many sequences at once."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Commit, Context, Drafter
from ..errors import ContextLengthError, IncompatibleError, NumericsError, OptionError
from ..models.base import LanguageModel, prefill
from ..models.tokenizer import Detokenizer, NullDetokenizer
from ..sampling import Stream, Warp, law_device
from ..sampling.noise import F64
from ..trees import block_mask, block_offsets, chain
from ..types import Draft, PointMass, Provenance, SamplingParams, Tree
from ..verifiers import GreedyVerifier, Noise, TokenVerifier, Verdict, Verifier
from .sequence import Sequence
from .stats import Stats


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's logits `[B, N + 1, V]` of one round, and tapped states."""

    logits: Tensor
    taps: tuple[Tensor, ...]


class Engine:
    """Runs sequences in slots. Not safe for use by several threads at once.

    Args:
        target: the model whose law is kept.
        drafter: proposes; None is plain decoding, by the same code.
        k: draft length K, the longest path a drafter may propose; 0 is plain.
        verifier: the rule for requests that sample. At temperature 0 every
            lossless rule is the greedy one, and the engine takes that.
        max_batch: slots, sequences that run at once; others wait.
        max_len: positions per sequence, at most the model's own.

    Raises:
        IncompatibleError: drafter and verifier would not be exact together.
        OptionError: a value that cannot work.
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
        self.drafter = drafter
        self.verifier: Verifier = verifier or TokenVerifier()
        self.k = check_k(k) if drafter is not None else 0
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise OptionError(f"max_batch must be a whole number >= 1, not {max_batch!r}")
        if drafter is not None:
            check_compatible(drafter, self.verifier)
        self.max_len = self._check_max_len(max_len)
        self.stats = Stats()
        self._law_device = law_device(target.device)
        self._greedy = GreedyVerifier()
        self._cache = target.new_cache(max_batch, self.max_len)
        self._free = list(range(max_batch))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._warp: Warp | None = None
        if drafter is not None:
            drafter.start(max_batch, self.max_len)

    # --- requests ---------------------------------------------------------------

    def submit(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        eos: SequenceOf[int] = (),
        detokenizer: Detokenizer | None = None,
        index: int = 0,
    ) -> Sequence:
        """Queue a request of token ids.

        Raises:
            OptionError: an empty prompt, an id outside the vocabulary, or a
                verifier that does not fit the request.
            ContextLengthError: the prompt, or with `on_context_full="error"`
                prompt and new tokens, outgrow the context.
        """
        check_request(prompt, params, self.target.vocab_size, self.max_len, self.verifier)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        ids = params.eos_token_ids if params.eos_token_ids is not None else tuple(eos)
        sequence = Sequence(
            prompt,
            params,
            seed,
            frozenset(ids),
            self.max_len,
            detokenizer or NullDetokenizer(),
            index,
        )
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request wherever it is; its slot is free at once."""
        sequence.cancel()
        if sequence in self._running:
            self._leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    # --- the round --------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Admit who waits, run one round, return the sequences that took part."""
        self._admit()
        running = list(self._running)
        if not running:
            return []
        clock = _Clock(self.target.device)
        draft = self._draft(running)
        clock.lap()
        scores = self._score(running, draft)
        clock.lap()
        verdict = self._verify(running, draft, scores)
        self._commit(running, draft, scores, verdict)
        times = clock.finish()
        self.stats.spend(*times)
        for sequence in running:
            sequence.stats.spend(*times)
        return running

    def _draft(self, running: list[Sequence]) -> Draft:
        budgets = [s.budget(self.k) for s in running]
        if self.drafter is None or not any(budgets):
            empty = torch.empty(len(running), 0, dtype=torch.int64, device=self._law_device)
            return Draft(empty, PointMass(), (chain(0),) * len(running))
        warp = self._warp_of(running)
        noise = None
        if not warp.all_greedy:
            noise = self._noise(
                [s.noise.at(Stream.DRAFT, len(s.tokens), max(budgets)) for s in running]
            )
        return self.drafter.draft([_context(s) for s in running], budgets, warp, noise)

    def _score(self, running: list[Sequence], draft: Draft) -> Scores:
        device = self.target.device
        last = torch.tensor([[s.tokens[-1]] for s in running], device=device)
        rows = draft.tokens.shape[1] + 1
        base = torch.tensor([[len(s.tokens) - 1] for s in running])
        positions = (base + block_offsets(draft.trees, rows)).clamp_max_(self.max_len - 1)
        mask = block_mask(draft.trees, rows)
        out = self.target.forward(
            torch.cat([last, draft.tokens.to(device)], 1),
            positions.to(device),
            self._cache,
            [_slot(s) for s in running],
            mask=None if mask is None else mask.to(device),
            taps=self.drafter.taps if self.drafter is not None else (),
        )
        assert out.logits is not None
        return Scores(out.logits.to(self._law_device), out.taps)

    def _verify(self, running: list[Sequence], draft: Draft, scores: Scores) -> Verdict:
        warp = self._warp_of(running)
        n = draft.tokens.shape[1]
        if warp.all_greedy and self.verifier.lossless:
            nothing = scores.logits.new_empty(len(running), 0)
            return self._greedy(scores.logits, draft, Noise(nothing, nothing))
        noise = Noise(
            accept=self._noise([s.noise.at(Stream.ACCEPT, len(s.tokens), n) for s in running]),
            target=self._noise([s.noise.along(len(s.tokens), n + 1) for s in running]),
        )
        return self.verifier(warp(scores.logits), draft, noise)

    def _commit(
        self, running: list[Sequence], draft: Draft, scores: Scores, verdict: Verdict
    ) -> None:
        commits = []
        for b, (sequence, emitted) in enumerate(
            zip(running, _emitted(draft, scores, verdict), strict=True)
        ):
            path, tokens, logprobs = emitted
            tree = draft.trees[b]
            length = max(tree.depths, default=0)
            last = _last_provenance(tree, path)
            count = 0
            for token, logprob in zip(tokens, logprobs, strict=True):
                provenance: Provenance = "draft" if count < len(path) else last
                count += 1
                if sequence.push(token, provenance, count, logprob):
                    break
            accepted = min(count, len(path))
            cut = count < len(tokens)
            for stats in (sequence.stats, self.stats):
                if cut:  # what lies behind a stop was never proposed
                    stats.count(count, count, accepted, count)
                else:
                    stats.count(len(tree), length, accepted, count)
            if sequence.finish_reason is not None:
                self._leave(sequence)
                continue
            slot = _slot(sequence)
            kept = [0, *(node + 1 for node in path)]
            self._cache.commit(slot, kept)
            features = tuple(t[b, kept] for t in scores.taps)
            commits.append(Commit(slot, path, features))
        if self.drafter is not None and commits:
            self.drafter.observe(commits)

    # --- slots ------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            began = time.perf_counter()
            slot = sequence.slot = self._free.pop(0)
            self._cache.truncate(slot, 0)
            taps = self.drafter.taps if self.drafter is not None else ()
            features = prefill(self.target, self._cache, slot, sequence.tokens[:-1], taps)
            if self.drafter is not None:
                self.drafter.open(_context(sequence), features)
            self._running.append(sequence)
            self._warp = None
            seconds = time.perf_counter() - began
            sequence.stats.prefill_seconds += seconds
            self.stats.prefill_seconds += seconds

    def _leave(self, sequence: Sequence) -> None:
        slot = _slot(sequence)
        self._running.remove(sequence)
        self._warp = None
        self._cache.truncate(slot, 0)
        if self.drafter is not None:
            self.drafter.close(slot)
        sequence.slot = None
        self._free = sorted([*self._free, slot])

    # --- helpers ----------------------------------------------------------------

    def _warp_of(self, running: list[Sequence]) -> Warp:
        if self._warp is None:
            self._warp = Warp([s.params for s in running], self.target.vocab_size, self._law_device)
        return self._warp

    def _noise(self, rows: list[F64]) -> Tensor:
        return torch.from_numpy(np.stack(rows)).to(self._law_device)

    def _check_max_len(self, max_len: int | None) -> int:
        context = self.target.context_length
        if max_len is None:
            return context
        if isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 2:
            raise OptionError(f"max_len must be a whole number >= 2, not {max_len!r}")
        if max_len > context:
            raise ContextLengthError(
                f"max_len={max_len} is more than the model's context of {context} positions"
            )
        return max_len


def check_request(
    prompt: SequenceOf[int],
    params: SamplingParams,
    vocab_size: int,
    max_len: int,
    verifier: Verifier,
) -> None:
    """Whether a request can be run.

    Raises:
        OptionError, IncompatibleError, ContextLengthError: see `Engine.submit`.
    """
    if not len(prompt):
        raise OptionError("the prompt is empty: give at least one token of text")
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise OptionError(f"token id {bad} is outside the target's vocabulary of {vocab_size}")
    if not params.greedy and not verifier.takes_sampling:
        raise IncompatibleError(
            f"the verifier {verifier.name!r} is exact at temperature 0 only: "
            "set temperature=0 or use verifier='token'"
        )
    room = max_len - len(prompt)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context {max_len}: "
            f"shorten the prompt to at most {max_len - 1}"
        )
    if params.on_context_full == "error" and params.max_new_tokens > room:
        raise ContextLengthError(
            f"{len(prompt)} prompt tokens and max_new_tokens={params.max_new_tokens} need "
            f"{len(prompt) + params.max_new_tokens} positions, the context has "
            f"{max_len}: ask for at most {room} or use on_context_full='stop'"
        )


def check_k(k: int) -> int:
    """K as given.

    Raises:
        OptionError: not a whole number >= 0.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise OptionError(f"k must be a whole number >= 0, not {k!r} (0 is plain decoding)")
    return k


def check_compatible(drafter: Drafter, verifier: Verifier) -> None:
    """Refuse a pair that would not be exact.

    Raises:
        IncompatibleError: the verifier does not take the drafter's law or shape.
    """
    refused = [law.__name__ for law in drafter.laws if law not in verifier.laws]
    if refused:
        raise IncompatibleError(
            f"the verifier {verifier.name!r} is not exact for drafts of {drafter.name!r} "
            f"({', '.join(refused)}): choose another verifier"
        )
    if drafter.proposes_trees and not verifier.takes_trees:
        raise IncompatibleError(
            f"the drafter {drafter.name!r} proposes trees and the verifier {verifier.name!r} "
            "takes chains only: choose a verifier that takes trees"
        )


def _emitted(
    draft: Draft, scores: Scores, verdict: Verdict
) -> list[tuple[list[int], list[int], list[float]]]:
    """Per sequence: path, emitted tokens, their log-probabilities. The round's one host sync."""
    batch = len(draft.trees)
    device = scores.logits.device
    rows = torch.arange(batch, device=device).unsqueeze(1)
    depths = verdict.path.shape[1]
    before = torch.cat(  # [B, D + 1] the row each emitted token was scored by
        [torch.zeros(batch, 1, dtype=torch.int64, device=device), verdict.path.clamp_min(-1) + 1], 1
    )
    nodes = verdict.path.clamp_min(0)
    ids = torch.cat([draft.tokens.to(device).gather(1, nodes), verdict.token.unsqueeze(1)], 1)
    ids.scatter_(1, verdict.accepted.unsqueeze(1), verdict.token.unsqueeze(1))
    logits = scores.logits[rows, before]  # [B, D + 1, V]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    packed = torch.cat(
        [verdict.accepted.unsqueeze(1).double(), verdict.path.double(), ids.double(), logprobs], 1
    ).tolist()
    out = []
    for row in packed:
        n = int(row[0])
        if any(math.isnan(x) for x in row[2 + 2 * depths :]):
            raise NumericsError(
                "the target's logits are not numbers: run it in float32 (or bfloat16 instead of "
                "float16), and check its weights"
            )
        path = [int(x) for x in row[1 : 1 + n]]
        tokens = [int(x) for x in row[1 + depths : 2 + depths + n]]
        out.append((path, tokens, row[2 + 2 * depths : 3 + 2 * depths + n]))
    return out


def _last_provenance(tree: Tree, path: list[int]) -> Provenance:
    if not len(tree):
        return "plain"
    return "correction" if (path[-1] if path else -1) in tree.parents else "bonus"


def _context(sequence: Sequence) -> Context:
    return Context(_slot(sequence), sequence.tokens)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


class _Clock:
    """Three laps of a round: draft, target, the rest.

    On CUDA the laps are events on the stream, read after the round's sync, so
    timing adds none.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = time.perf_counter()
        self._marks = [self._mark()]

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def lap(self) -> None:
        self._marks.append(self._mark())

    def finish(self) -> tuple[float, float, float]:
        """Seconds of draft, target and the whole round."""
        whole = time.perf_counter() - self._began
        laps = []
        for a, b in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(a, float) and isinstance(b, float):
                laps.append(b - a)
            else:
                laps.append(a.elapsed_time(b) / 1e3)  # type: ignore[union-attr, arg-type]
        return laps[0], laps[1], whole
