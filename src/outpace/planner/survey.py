"""What becomes of drafts on the user's own texts, round by round.

An engine runs the prompts with a fixed K. What another K would have made of the same texts is
replayed: where a draft model drafts does not change whether a token passes, since it sees the same
context at any depth, so the tokens of a text pass or not, one by one, and rounds of another length
begin and end elsewhere among them. That holds for token verification, coupled draws and
sample-and-match. For block verification, and for drafters that look up or read the target's
states, it is an approximation: so the K that is recommended is run as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..engine import Engine, Request, Stats
from ..errors import OptionError
from ..models.loading import Progress
from ..types import SamplingParams, Tree
from ..verifiers import Verifier
from .alphas import alphas_of
from .drafting import Added
from .formulas import tokens_counted

_SEED = 0x6F7574_7061_2000
"""Of the first text."""

LONGEST = 16
"""K of the first run, where the drafter drafts so far."""


class Played(NamedTuple):
    """A round of one text.

    Attributes:
        k: the longest path that was proposed.
        nodes: all that was proposed.
        accepted, emitted: tokens.
        ended: whether nothing was proposed behind the accepted path.
    """

    k: int
    nodes: int
    accepted: int
    emitted: int
    ended: bool


@dataclass(frozen=True)
class Text:
    """The rounds of one prompt. It counts as `planner.formulas.Counted`."""

    played: tuple[Played, ...]

    @property
    def rounds(self) -> int:
        return len(self.played)

    @property
    def emitted(self) -> int:
        return sum(played.emitted for played in self.played)

    @cached_property
    def reached(self) -> tuple[int, ...]:
        tried = [p.accepted + (not p.ended) for p in self.played if p.k]
        return tuple(sum(t > depth for t in tried) for depth in range(max(tried, default=0)))

    @cached_property
    def accepted_at(self) -> tuple[int, ...]:
        taken = [p.accepted for p in self.played if p.k]
        return tuple(sum(t > depth for t in taken) for depth in range(len(self.reached)))


@dataclass(frozen=True)
class Survey:
    """A drafter by one rule at one temperature, on some prompts.

    Attributes:
        drafter: its name.
        rule: the verifier's name.
        counted: texts by the K that they were run with.
        added: what it adds to a round.
        reading: seconds to read a token of a prompt, the target's reading included.
        tree: what it drafts, if not chains; there is one K then, the depth.
        tree_name: how to ask for that tree.
    """

    drafter: str
    temperature: float
    rule: str
    counted: Mapping[int, Sequence[Text]]
    added: Added
    reading: float = 0.0
    tree: Tree | None = None
    tree_name: str | None = None
    _replayed: dict[int, Sequence[Text]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def longest(self) -> int:
        return max(self.counted)

    @property
    def ks(self) -> Sequence[int]:
        """K that something is known of."""
        return range(1, self.longest + 1) if self.tree is None else (self.longest,)

    def texts(self, k: int) -> Sequence[Text]:
        """The texts by rounds with K, as they were or as they would have been.

        Raises:
            OptionError: K is longer than what was run.
        """
        if k in self.counted:
            return self.counted[k]
        if k not in self.ks:
            raise OptionError(f"nothing was run with k={k}: choose from {list(self.ks)}")
        if k not in self._replayed:
            of = min(longer for longer in self.counted if longer > k)
            self._replayed[k] = [replayed(text, of, k) for text in self.counted[of]]
        return self._replayed[k]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "verifier": self.rule,
            "tree": self.tree_name,
            "reading_seconds_per_token": self.reading,
            **self.added.to_dict(),
            "runs": [
                {
                    "k": k,
                    "alpha": list(alphas_of(texts)),
                    "tokens_per_round": tokens_counted(texts),
                    "rounds_with_a_draft": drafted_share(texts),
                    "prompts": [
                        {
                            "rounds": text.rounds,
                            "emitted": text.emitted,
                            "reached": list(text.reached),
                            "accepted_at": list(text.accepted_at),
                        }
                        for text in texts
                    ],
                }
                for k, texts in sorted(self.counted.items())
            ],
        }


def drafted_share(texts: Sequence[Text]) -> float:
    """Of the rounds those in which something was proposed."""
    rounds = sum(text.rounds for text in texts)
    return sum(p.k > 0 for text in texts for p in text.played) / rounds if rounds else 0.0


def replayed(text: Text, of: int, k: int) -> Text:
    """The rounds with K of a text that was run with a longer one.

    Every token of it passed, failed, or was not drafted. Behind a draft of full length that
    passed as a whole the next token is taken to pass: what came before it did.

    Args:
        of: the K that it was run with.
    """
    passes: list[bool] = []
    offered: list[int] = []  # tokens that are proposed from here on
    width: list[float] = []  # nodes per token of a path
    for p in text.played:
        full = p.k == of
        for place in range(p.emitted):
            passes.append(place < p.accepted or (full and p.accepted == of))
            offered.append(of if full else max(0, p.k - place))
            width.append(p.nodes / p.k if p.k else 1.0)
    found: list[Played] = []
    at, end = 0, len(passes)
    while at < end:
        length = min(k, offered[at], end - at - 1)
        accepted = 0
        while accepted < length and passes[at + accepted]:
            accepted += 1
        nodes = round(length * width[at])
        found.append(Played(length, nodes, accepted, accepted + 1, accepted == length))
        at += accepted + 1
    return Text(tuple(found))


def run_texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    k: int,
    *,
    temperature: float = 0.0,
    rule: Verifier | None = None,
    tokens: int = 64,
    seed: int = _SEED,
    what: str = "running the prompts",
    progress: Progress = lambda what, done, total: None,
) -> list[Text]:
    """Go on with the prompts, as many at once as the engine has slots.

    A drafter that remembers past outputs begins with nothing.

    Args:
        engine: an idle one with a drafter.
        prompts: token ids.
        rule: for requests that sample, by default the engine's.
        tokens: that each text emits, unless the context ends before.

    Raises:
        OptionError: the engine is busy, or there is no prompt.
    """
    if not prompts:
        raise OptionError("there is no prompt to measure on: give one at least")
    params = SamplingParams(temperature=temperature, max_new_tokens=tokens, eos_token_ids=())
    held, engine.stats = engine.stats, Stats()
    requests: list[Request] = []
    played: dict[int, list[Played]] = {}
    seen: dict[int, tuple[int, int, int, int, int]] = {}
    try:
        with engine.fixed(k, rule):
            if engine.drafter is not None:
                engine.drafter.forget()
            for number, prompt in enumerate(prompts):
                requests.append(engine.submit(prompt, params.with_seed(seed + number)))
            while engine.busy:
                for request in engine.step():
                    now = _counts(request.stats)
                    played.setdefault(id(request), []).append(
                        _between(seen.get(id(request), (0, 0, 0, 0, 0)), now)
                    )
                    seen[id(request)] = now
                done = sum(len(request.emitted) for request in requests)
                progress(what, done, len(prompts) * tokens)
    finally:
        for request in requests:
            engine.cancel(request)
        engine.stats = held
    for request in requests:
        if request.failure is not None:
            raise request.failure
    return [Text(tuple(played[id(request)])) for request in requests]


def _counts(stats: Stats) -> tuple[int, int, int, int, int]:
    s = stats
    return s.draft_steps, s.proposed, s.accepted, s.emitted, s.full_accepts


def _between(before: Sequence[int], now: Sequence[int]) -> Played:
    k, nodes, accepted, emitted, ended = (b - a for a, b in zip(before, now, strict=True))
    return Played(k, nodes, accepted, emitted, bool(ended) or not k)
