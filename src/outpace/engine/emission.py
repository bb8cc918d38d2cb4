"""What a round emits of each request, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import OutpaceError
from ..models.base import ForwardOutput, Top
from ..sampling.transforms import Stuck
from ..types import Draft
from ..verifiers import Verdict, follow


@dataclass(frozen=True, slots=True)
class Emission:
    """What a round emits of one request: the accepted path, its tokens and one more.

    Attributes:
        tokens: the one more is lacking where the target's choice is left to a
            pass of its own, or where there is none.
        tops: ids and log-probabilities of the likeliest tokens, for each token.
        stuck: no token is left to go on with; `failure` says why, unless the
            text is complete.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[float]
    tops: list[tuple[tuple[int, float], ...]] | None = None
    stuck: bool = False
    failure: OutpaceError | None = None

    @property
    def rows(self) -> list[int]:
        """The row that scored each token."""
        return [0, *(node + 1 for node in self.path)][: len(self.tokens)]

    def cut(self, count: int) -> Emission:
        """The first so many tokens, whatever comes behind them."""
        cut = Emission(self.path[:count], self.tokens[:count], self.logprobs[:count])
        return cut if self.tops is None else replace(cut, tops=self.tops[:count])


def follow_top(draft: Draft, top: Top) -> list[Emission]:
    """The target's likeliest tokens, as far as they were drafted and one more."""
    best, logprobs, drafted = _to_host(top.tokens, top.logprobs, draft.tokens)
    out = []
    for b, tree in enumerate(draft.trees):
        path = follow(best[b], drafted[b], tree)
        before = [0, *(node + 1 for node in path)]  # the row that scored each token
        tokens = [int(best[b][i]) for i in before]
        out.append(Emission(path, tokens, [logprobs[b][i] for i in before]))
    return out


def emissions_of(draft: Draft, scores: ForwardOutput, verdict: Verdict) -> list[Emission]:
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
            float(values[b, row, token]) - float(values[b, row, best[b][row]]) + highest[b][row]
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


def drafted_paths(draft: Draft) -> list[list[tuple[int, ...]]]:
    """For each sequence and row of the pass, the drafted tokens before it."""
    found = []
    for tokens, tree in zip(draft.tokens.tolist(), draft.trees, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(tree.parents):
            paths.append((*paths[parent + 1], tokens[node]))
        found.append(paths)
    return found


def until_stuck(emissions: Sequence[Emission], stuck: Sequence[Stuck]) -> list[Emission]:
    """Each emission up to the first row that has no token left."""
    kept = []
    for emission, why in zip(emissions, stuck, strict=True):
        at = next((i for i, row in enumerate(emission.rows) if row in why), None)
        if at is not None:
            failure = why[emission.rows[at]]
            emission = replace(emission.cut(at), stuck=True, failure=failure)
        kept.append(emission)
    return kept


def with_tops(
    emissions: Sequence[Emission], counts: Sequence[int], scores: ForwardOutput
) -> list[Emission]:
    """The same with the likeliest tokens of each row, as many as each sequence asks for.

    Log-probabilities are computed as those of emitted tokens are.
    """
    assert scores.logits is not None
    found = []
    for b, (emission, count) in enumerate(zip(emissions, counts, strict=True)):
        if count:
            logits = scores.logits[b, emission.rows]
            best = (scores.top or Top.of(scores.logits)).logprobs[b, emission.rows]
            values, ids = logits.double().topk(min(count, logits.shape[-1]), -1)
            values = values - values[:, :1] + best.unsqueeze(1)
            rows = zip(ids.tolist(), values.tolist(), strict=True)
            emission = replace(emission, tops=[tuple(zip(*r, strict=True)) for r in rows])
        found.append(emission)
    return found
