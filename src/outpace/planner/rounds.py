"""What rounds of an engine take: real ones, with a K that changes from round to round.

All K take turns within the same requests, plain decoding among them. So what else the machine
does meanwhile hits all of them alike, and their ratios hold where the times do not. A turn is a
few rounds: the first find the caches as another K has left them, and are not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..drafters import Context
from ..drafters.base import CertainDrafter
from ..engine import Engine, Request, Stats
from ..errors import OptionError
from ..models.tokenizer import Tokenizer
from ..trees import chain
from ..types import SamplingParams, Tree
from ..verifiers import Verifier
from .costs import running

REPEATS = 7
"""Rounds of each K that are timed, at least; more of them where they are short."""

_MOST, _SHORT, _PRECISE = 120, 1.0, 0.02
"""Of each K, at most; and more than `REPEATS` are enough after so many seconds, if the median of
each K is known that well."""

_LEAST = 2
"""Of each K, when time is up."""

_WARM = 1
"""Turns of each K in front of them: what runs for the first time takes long."""

_COUNTED, _SETTLE, _SETTLE_PLAIN = 2, 1, 6
"""Rounds of a turn that are counted, and those before them, with a draft and without: what plain
decoding keeps in the processor's caches, longer drafts have driven out."""

TOKENS, _SPAN = 64, 512
"""That texts go on for in use, by default; and that they do while they are timed, at most."""

_SEED = 0x6F7574_7061_1000


@dataclass(frozen=True, slots=True)
class Lap:
    """One round.

    Attributes:
        k: the longest path that was drafted.
        rows: of the target's pass, per sequence.
        draft, target, whole: seconds of drafting, of the target's pass, and of all.
    """

    k: int
    rows: int
    draft: float
    target: float
    whole: float


class FillerDrafter(CertainDrafter):
    """Proposes as many tokens as it may, whatever they are: for timing the rest of a round."""

    name = "filler"
    k = most = 64
    reads = False

    def propose(self, context: Context, budget: int) -> tuple[Sequence[int], Tree]:
        return [0] * budget, chain(budget)


def time_rounds(
    engine: Engine,
    prompt: Sequence[int],
    ks: Sequence[int],
    *,
    batch: int = 1,
    tokens: int = TOKENS,
    temperature: float = 0.0,
    rule: Verifier | None = None,
    tokenizer: Tokenizer | None = None,
    repeats: int = REPEATS,
    seconds: float = float("inf"),
) -> Mapping[int, Sequence[Lap]]:
    """Rounds of so many requests with the same prompt, by the K that was asked for.

    Attention costs more the longer a text is, and the more rows a pass has. So texts are as long
    as they are in use, on average.

    Args:
        engine: an idle one with a drafter.
        prompt: token ids.
        tokens: that such prompts are continued by in use.
        rule: for requests that sample, by default the engine's.
        tokenizer: where tokens are to become text within a round, as they do in use.
        repeats: rounds of each K, at least, while there is time.
        seconds: when to stop, but not before every K was timed twice.

    Raises:
        OptionError: the engine is busy, or there is no room for drafts of the longest K.
    """
    room = engine.max_len - max(ks) - 2
    if room < 2:
        raise OptionError(
            f"drafts of {max(ks)} tokens do not fit {engine.max_len} positions: raise max_len"
        )
    kept, span = _window(prompt, tokens, room)
    turns = [(k, _SETTLE if k else _SETTLE_PLAIN) for k in ks]
    rounds = [(k, nth, nth >= first) for k, first in turns for nth in range(first + _COUNTED)]
    params = SamplingParams(
        temperature=temperature, max_new_tokens=engine.max_len, eos_token_ids=()
    )
    found: dict[int, list[Lap]] = {k: [] for k in ks}
    requests: list[Request] = []
    held, engine.stats = engine.stats, Stats()
    began = time.perf_counter()
    try:
        with engine.fixed(max(ks), rule):
            for number in range(_WARM + max(_MOST, repeats) // _COUNTED + 1):
                for k, nth, counts in rounds:
                    far = not nth and any(len(r.emitted) >= span for r in requests)
                    if far or not _ready(requests, max(ks)):
                        _cancel(engine, requests)
                        requests = [
                            engine.submit(kept, params.with_seed(_SEED + i), tokenizer=tokenizer)
                            for i in range(batch)
                        ]
                    engine.k = k
                    lap = _lap(engine, requests)
                    if number >= _WARM and counts:
                        found[k].append(lap)
                timed = (number + 1 - _WARM) * _COUNTED
                spent = time.perf_counter() - began
                enough = timed >= repeats and spent > _SHORT and _known(found)
                if enough or (timed >= _LEAST and spent > seconds):
                    break
            _cancel(engine, requests)
    finally:
        _cancel(engine, requests)
        engine.stats = held
    return found


def _window(prompt: Sequence[int], tokens: int, room: int) -> tuple[Sequence[int], int]:
    """The end of a prompt, and by how many tokens it is to be continued, so that such texts are as
    long on average as those behind all of it. Where these are short, or the prompt is long, they
    go on for longer: fewer prompts are to be read then."""
    middle = min(len(prompt) + tokens / 2, room)
    span = int(max(1, min(tokens, room / 2), min(middle, _SPAN, 2 * (room - middle))))
    begin = min(middle - span / 2, room - span)
    return prompt[-max(1, round(begin)) :], span


def _known(found: Mapping[int, Sequence[Lap]]) -> bool:
    """Whether the median time of each K is: its standard error is about that width by √n."""
    times = [[lap.whole for lap in laps] for laps in found.values()]
    return all(spread_of(each) <= _PRECISE * math.sqrt(len(each)) for each in times)


def _ready(requests: Sequence[Request], most: int) -> bool:
    """Whether all of them go on, and may draft as much as is asked for."""
    return bool(requests) and all(r.finish_reason is None and r.left > most + 1 for r in requests)


def _cancel(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.cancel(request)


def _lap(engine: Engine, requests: Sequence[Request]) -> Lap:
    before = [(r.stats.draft_steps, r.stats.proposed) for r in requests]
    engine.stats = spent = Stats()
    engine.step()
    for request in requests:
        if request.failure is not None:
            raise request.failure
    grown = [
        (r.stats.draft_steps - steps, r.stats.proposed - nodes)
        for r, (steps, nodes) in zip(requests, before, strict=True)
    ]
    return Lap(
        max(steps for steps, _ in grown),
        1 + max(nodes for _, nodes in grown),
        spent.draft_seconds,
        spent.target_seconds,
        spent.round_seconds,
    )


@torch.inference_mode()
def read_seconds(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds to read a token of a prompt, the drafter's reading included."""
    kept = prompt[-max(1, engine.max_len - 1) :]
    held, engine.stats = engine.stats, Stats()
    try:
        with running(engine, kept, SamplingParams(max_new_tokens=1)):
            return engine.stats.prefill_seconds / len(kept)
    finally:
        engine.stats = held


def faster_half(times: Sequence[float]) -> float:
    """The mean of the faster half: what else a machine does makes times longer, never shorter."""
    kept = sorted(times)[: max(1, (len(times) + 1) // 2)]
    return statistics.fmean(kept)


def spread_of(times: Sequence[float]) -> float:
    """The width of the middle half, over the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle
