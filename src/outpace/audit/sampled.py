"""The statistical audit: samples of a system against the law of plain scoring."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from ..errors import ContextLengthError, EndpointError, OptionError
from ..models.loading import Progress
from ..types import SamplingParams, check_whole_number
from .report import Sampled
from .scoring import PlainScorer
from .statistics import BINS, LEAST_EXPECTED, MARGIN, RECURS, Counts, check_false_alarm, looks_of
from .systems import GeneratorSystem, System

LOOKS = 4
BATCH = 256
REPEATED = 8

ENOUGH = 20
"""Impossible tokens that are looked into."""


def audit_samples(
    system: System,
    scorer: PlainScorer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    samples: int = 4000,
    false_alarm: float = 1e-4,
    draft: PlainScorer | None = None,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Sampled:
    """Sample a system and test each position's tokens, given what stands before them.

    Args:
        scorer: of the target whose law it should be.
        prompts: token ids; samples are shared out among them.
        params: `max_new_tokens` is the length of a sample.
        samples: at most; a defect that shows earlier ends the audit.
        false_alarm: the probability with which a sound system is called unsound.
        draft: of the draft model, for the test that looks along q/p.
        seed: of the first sample; others follow.

    Raises:
        OptionError: nothing to sample, or at temperature 0.
    """
    check_samples(samples)
    check_false_alarm(false_alarm)
    if params.greedy:
        raise OptionError("sampling needs a temperature above 0: audit greedy decoding instead")
    if params.stop:
        raise OptionError("stop strings end texts where no law is tested: audit without them")
    if not prompts:
        raise OptionError("an audit needs at least one prompt")
    params = within_context(params, system, scorer, prompts)
    if draft is not None and not draft.fits(prompts, params.max_new_tokens):
        draft = None  # it cannot say what it would have drafted
    drafted = _drafted_rounds(system)
    length = params.max_new_tokens
    looks = looks_of(samples, LOOKS)
    share = false_alarm / MARGIN / (len(looks) * length * (2 if draft is None else 3))
    state = _State(scorer, draft, prompts, params, samples, seed)
    seeds = itertools.count(seed)
    done = 0
    for look in looks:
        while done < look:
            count = min(BATCH, look - done)
            for number, part in enumerate(_parts(count, len(prompts), done)):
                some = [next(seeds) for _ in range(part)]
                if some:
                    state.take(number, system.sample(prompts[number], params, some))
            done += count
            progress("sampling", done, samples)
        state.score()
        tests = [t for counts in state.positions for t in counts.tests(share)]
        found = Sampled(
            samples=done,
            tokens=state.tokens,
            planned=samples,
            false_alarm=false_alarm,
            share=share,
            tests=tuple(tests),
            defects=tuple(state.defects()),
            borderline=state.borderline,
        )
        if not found.sound:
            break
    if not found.tests and found.sound:
        raise OptionError("too few of the samples have a token: no position could be tested")
    if drafted is not None and _drafted_rounds(system) == drafted and found.sound:
        raise OptionError(
            "nothing was drafted, so nothing was audited: ask for more tokens, or prompts that fit "
            "the draft model's context"
        )
    if system.takes_seeds:
        found = replace(found, repeated=_repeat(_seeded(system), prompts[0], params, seed))
    return found


def check_samples(samples: int) -> None:
    """A number of samples as given.

    Raises:
        OptionError: no test would have enough.
    """
    least = BINS * int(LEAST_EXPECTED)
    check_whole_number("samples", samples, least, "continuations, as many as a test needs")


def within_context(
    params: SamplingParams,
    system: System,
    scorer: PlainScorer,
    prompts: Sequence[Sequence[int]],
) -> SamplingParams:
    """The same for texts that end before a context does, where engines differ.

    Raises:
        ContextLengthError: a prompt leaves no room.
    """
    context = scorer.model.context_length
    if isinstance(system, GeneratorSystem):
        context = system.generator.engine.max_len
    room = context - max(map(len, prompts))
    if room < 1:
        raise ContextLengthError(f"a prompt fills the context of {context}: use shorter prompts")
    length = min(params.max_new_tokens, room)
    return replace(params, max_new_tokens=length, min_new_tokens=min(params.min_new_tokens, length))


def _drafted_rounds(system: System) -> int | None:
    """Rounds so far in which something was drafted; None where that is not known."""
    if not isinstance(system, GeneratorSystem) or system.generator.engine.drafter is None:
        return None
    return system.generator.engine.stats.drafted_rounds


def _parts(count: int, prompts: int, done: int) -> list[int]:
    """How many of the next samples each prompt gets."""
    return [len(range((n - done) % prompts, count, prompts)) for n in range(prompts)]


def _seeded(system: System) -> System:
    """The same for requests that ask for their seeds."""
    if isinstance(system, GeneratorSystem):
        system = copy(system)
        system.seeded = True
    return system


def _repeat(
    system: System, prompt: Sequence[int], params: SamplingParams, seed: int
) -> tuple[int, int]:
    """How many of some seeds give the same text alone as together."""
    seeds = [seed + i for i in range(REPEATED)]
    together = system.sample(prompt, params, seeds)
    alone = [system.sample(prompt, params, [s])[0] for s in seeds]
    return sum(a == b for a, b in zip(together, alone, strict=True)), REPEATED


def _key(prompt: int, text: tuple[int, ...]) -> tuple[int, ...]:
    """What a prefix is known by."""
    return (prompt, *text)


class _State:
    """Samples so far, and their counts by position."""

    def __init__(
        self,
        scorer: PlainScorer,
        draft: PlainScorer | None,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        samples: int,
        seed: int,
    ) -> None:
        self._scorer, self._draft, self._prompts, self._params = scorer, draft, prompts, params
        self._eos = frozenset(scorer.eos_of(params))
        self._new: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._prefixes: Counter[tuple[int, ...]] = Counter()
        self._wrong: list[str] = []
        self._beyond: dict[tuple[int, ...], bool] = {}  # whether a filter's boundary is near
        self._impossible: Counter[str] = Counter()
        self.positions = [Counts(i + 1, samples, seed) for i in range(params.max_new_tokens)]
        self.tokens = 0
        self.borderline = 0

    def take(self, prompt: int, texts: Sequence[Sequence[int]]) -> None:
        """Samples of one prompt, cut where they should have ended.

        Raises:
            EndpointError: what came is no text of the target's vocabulary.
        """
        longest = self._params.max_new_tokens
        for text in texts:
            if not all(0 <= t < self._scorer.vocab_size for t in text):
                raise EndpointError(
                    f"a sampled text has ids outside the target's vocabulary of "
                    f"{self._scorer.vocab_size}: is it the same checkpoint?"
                )
            end = next((i + 1 for i, t in enumerate(text) if t in self._eos), None)
            if end is not None and end < len(text):
                self._wrong.append(f"{len(text) - end} tokens behind an EOS token")
            elif len(text) > self._params.max_new_tokens:
                self._wrong.append(
                    f"{len(text)} tokens where max_new_tokens is {self._params.max_new_tokens}"
                )
            elif end is None and len(text) < longest and not self._complete(prompt, text):
                self._wrong.append(f"a text of {len(text)} tokens ended without an EOS token")
            kept = tuple(text[: end or self._params.max_new_tokens])
            self._new[prompt, kept] += 1
            self.tokens += len(kept)
            for i in range(len(kept)):
                key = _key(prompt, kept[:i])
                self._prefixes[key] += 1
                if self._prefixes[key] < RECURS:
                    break  # then nothing that goes on from it recurs

    def _complete(self, prompt: int, text: Sequence[int]) -> bool:
        """Whether a text may end for its constraint."""
        return self._scorer.may_end(self._prompts[prompt], text, self._params)

    def score(self) -> None:
        """Hold the new samples against their laws."""
        for number, prompt in enumerate(self._prompts):
            texts = [text for at, text in self._new if at == number and text]
            laws = self._scorer.laws(prompt, texts, self._params)
            drafts = self._draft and self._draft.laws(prompt, texts, self._params)
            for text, p in zip(texts, laws, strict=True):
                q = next(drafts) if drafts else None
                count = self._new[number, text]
                for i, token in enumerate(text):
                    if not p[i, token] > 0:
                        self._note(number, text[: i + 1], count)
                    if not p[i].any():
                        break  # the text should have ended
                    prefix = _key(number, text[:i])
                    recurs = self._prefixes[prefix] >= RECURS
                    q_row = None if q is None else q[i]
                    self.positions[i].add(prefix, token, p[i], q_row, count, recurs)
        self._new.clear()

    def _note(self, prompt: int, text: tuple[int, ...], count: int) -> None:
        """The last token has probability 0: by a boundary that rounding may move, or by far."""
        key = _key(prompt, text)
        if key not in self._beyond:
            if len(self._impossible) >= ENOUGH:
                return
            wider = next(self._scorer.laws(self._prompts[prompt], [text], _widened(self._params)))
            self._beyond[key] = bool(wider[-1, text[-1]] > 0)
        if self._beyond[key]:
            self.borderline += count
        else:
            behind = list(text[:-1])
            what = f"token {text[-1]} at position {len(text)} behind {behind} has probability 0"
            self._impossible[what] += count

    def defects(self) -> list[str]:
        """What no law allows, each kind once."""
        found = [f"{text} ({n} of the samples)" for text, n in Counter(self._wrong).items()]
        if self._impossible:
            (what, _), *_ = self._impossible.items()
            count = sum(self._impossible.values())
            found.append(f"{what}, and yet it was drawn ({count} such draws at least)")
        return found


def _widened(params: SamplingParams) -> SamplingParams:
    """The same with filters that let the next tokens pass, too."""
    return replace(
        params,
        top_k=None if params.top_k is None else params.top_k + 2,
        top_p=min(1.0, params.top_p + 0.02),
        min_p=params.min_p * 0.9,
    )
