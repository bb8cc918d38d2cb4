"""One request on its way through the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ..models.tokenizer import Detokenizer
from ..sampling import Pipeline, RequestNoise
from ..types import FinishReason, Provenance, SamplingParams, TokenEvent
from .stats import Stats
from .stopping import StopScanner


class Request:
    """Prompt, committed tokens and everything that belongs to one request alone.

    Attributes:
        tokens: prompt and emitted tokens; the target's cache holds all but the last.
        events: every event so far; `fresh` those nobody has fetched yet. Of a request with
            transforms the last one waits there until the next while text is held back: no
            token may be left, and then it is the one that brings that text.
        pinned: whether it samples, and its seed was asked for: it is to give this text again.
        pipeline: its transforms, if it has any.
        slot: its slot while it runs, None before and after.
        failure: the error that ended it, if one did.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        eos: frozenset[int],
        limit: int,
        detokenizer: Detokenizer,
        index: int = 0,
    ) -> None:
        self.prompt = tuple(prompt)
        self.params = params
        self.seed = seed
        self.pinned = params.seed is not None and not params.greedy
        self.index = index
        self.noise = RequestNoise(seed)
        self.tokens = list(prompt)
        self.events: list[TokenEvent] = []
        self.fresh: deque[TokenEvent] = deque()
        self._withheld: TokenEvent | None = None
        self.pipeline: Pipeline | None = None
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        self.failure: BaseException | None = None
        self.stats = Stats()
        self._eos = eos
        self._limit = limit
        self._detokenizer = detokenizer
        self._scanner = StopScanner(params.stop)

    @property
    def emitted(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def place(self) -> int:
        """The slot of a request that runs."""
        assert self.slot is not None
        return self.slot

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events)

    def budget(self, k: int) -> int:
        """The longest path worth drafting: no token past the request's or the model's end."""
        return max(0, min(k, self.left - 1)) if self.params.speculate else 0

    @property
    def left(self) -> int:
        """Tokens that it may still emit."""
        room = self._limit - len(self.tokens)
        return min(self.params.max_new_tokens - len(self.events), room)

    def push(
        self,
        token: int,
        provenance: Provenance,
        depth: int,
        logprob: float,
        top: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Take one emitted token; `finish_reason` is set when it is the last."""
        self.tokens.append(token)
        if token in self._eos:
            self.finish_reason, self.stopped_by, text = "stop", token, ""
        else:
            text = self._scanner.push(self._detokenizer.push(token))
            if self._scanner.found is not None:
                self.finish_reason, self.stopped_by = "stop", self._scanner.found
            elif len(self.events) + 1 == self.params.max_new_tokens:
                self.finish_reason = "length"
            elif len(self.tokens) == self._limit:
                self.finish_reason = "context"
        if self.finish_reason is not None and self._scanner.found is None:
            text += self._last_text()
        event = TokenEvent(text, token, logprob, provenance, depth, self.index, top)
        self.events.append(event)
        self._release()
        if self.pipeline is not None and self.finish_reason is None and self._scanner.holds:
            self._withheld = event
        else:
            self.fresh.append(event)

    def _release(self) -> None:
        if self._withheld is not None:
            self.fresh.append(self._withheld)
            self._withheld = None

    def cancel(self) -> None:
        """Let go: nothing more will be emitted."""
        self._finish("cancelled")

    def end(self, failure: BaseException | None) -> None:
        """No token is left: the text is complete, or it cannot go on."""
        if failure is not None:
            self.fail(failure)
        self._finish("stop")

    def _finish(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self._release()
            if self.events:
                last = self.events[-1]
                self.events[-1] = replace(last, text=last.text + self._last_text())
                if self.fresh:
                    self.fresh[-1] = self.events[-1]

    def fail(self, error: BaseException) -> None:
        """Ended by an error."""
        if self.finish_reason is None:
            self.failure = error
            self.cancel()

    def _last_text(self) -> str:
        """Characters and possible stop strings that were left open."""
        text = self._scanner.push(self._detokenizer.flush())
        if self._scanner.found is not None:  # completed by a replaced character
            self.finish_reason, self.stopped_by = "stop", self._scanner.found
            return text
        return text + self._scanner.flush()
