"""The exact audit: every draft, every decision, every token a round of an engine can emit.

The engine reads a prompt, or runs on until it stands behind a rejection or behind
a full acceptance, which leave different caches. From there its drafter is asked
for drafts with all noise there is, its target scores each of them, and its rule is
enumerated over them (`enumeration`): what comes out is the law of the round to the
last digit, to be held against plain scoring by the target alone. So a stale cache
is seen as well as a wrong rule or a draft that was not drawn from the law that it
reports. Where K or who drafts is chosen from round to round, every choice is enumerated,
for K up to `LONGEST`: it is made before anything is drawn. For narrow vocabularies, or
wide ones under a small top-k: the number of drafts is that of the choices to the power K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..drafters.base import Commit, Drafter
from ..engine import Engine, members_of
from ..engine.request import Request
from ..errors import OptionError
from ..models.tokenizer import Tokenizer
from ..sampling import RequestNoise, Stream
from ..sampling.noise import F64
from ..types import Draft, Rows, SamplingParams, Shape, Tree
from ..verifiers import Noise, Verdict, Verifier
from .enumeration import (
    Drafted,
    NotEnumerableError,
    impossible_at_zero,
    inside,
    intervals,
    round_law,
    worst_error,
)
from .report import Exact
from .scoring import PlainScorer

MOST_DRAFTS = 1024
TOLERANCE = {torch.float64: 1e-12}
"""Of laws in this precision; in others 1e-5, single precision after a softmax and some products."""

Behind = Literal["prompt", "rejection", "full acceptance"]

STATES: tuple[Behind, ...] = ("prompt", "rejection", "full acceptance")
"""What the rounds that are enumerated lie behind."""

ROUNDS = 4
"""That a text goes on for, to come behind what is wanted."""

LONGEST = 4
"""K up to which drafts are enumerated where every round takes its own."""

TRIES = 32
"""Texts, each of a seed of its own."""


class _Scripted(RequestNoise):
    """Noise of a request whose drafts are drawn as they are told."""

    def __init__(self, seed: int, nodes: int) -> None:
        super().__init__(seed)
        self.script: F64 = torch.full((nodes,), 0.5, dtype=torch.float64).numpy()

    def at(self, stream: Stream, position: int, indices: int) -> F64:
        if stream is Stream.DRAFT:
            return self.script[:indices]
        return super().at(stream, position, indices)


class _Recording:
    """A rule, and the rows that it was given."""

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def __call__(self, p: Tensor, draft: Draft, noise: Noise) -> Verdict:
        self.rows = p
        return self.rule(p, draft, noise)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A draft, its probability, and noise that draws it."""

    probability: float
    noise: tuple[float, ...]


class _Plain:
    """Rows `[V]` of plain scoring behind prefixes that go on from a text."""

    def __init__(
        self,
        scorer: PlainScorer,
        prompt: Sequence[int],
        text: Sequence[int],
        params: SamplingParams,
        doubt: float,
    ) -> None:
        self._scorer, self._prompt, self._text = scorer, prompt, text
        self.params, self.doubt = params, doubt
        self.ends = frozenset(scorer.eos_of(params))
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self.largest = 0.0
        """Of the logits."""

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._rows:
            self._score([prefix])
        return self._rows[prefix]

    def read(self, length: int) -> None:
        """Score every prefix of fewer tokens that the target can emit, many at once."""
        level: list[tuple[int, ...]] = [()]
        for _ in range(length):
            self._score(level)
            level = [
                (*prefix, token)
                for prefix in level
                for token in self._rows[prefix].nonzero().flatten().tolist()
                if token not in self.ends
            ]

    def _score(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        behind = [(*self._text, *prefix) for prefix in prefixes]
        rows = self._scorer.rows_behind(self._prompt, behind, self.params)
        for prefix, (logits, law) in zip(prefixes, rows, strict=True):
            if not law.any():
                raise OptionError(
                    "a text may come to where no token is left, which ends its request: audit by "
                    "samples"
                )
            self._check_boundary(logits)
            self._rows[prefix] = law

    def _check_boundary(self, logits: Tensor) -> None:
        """Whether rounding can tell which tokens are in the top k."""
        k = self.params.top_k or len(logits)
        best = logits.topk(min(k + 1, len(logits))).values
        size = float(best.nan_to_num(neginf=0).abs().max())
        self.largest = max(self.largest, size)
        if k < len(best) and self.doubt and best[k - 1] - best[k] <= self.doubt * size:
            raise OptionError(
                f"tokens tie at the boundary of top_k = {k}, but for what rounding may turn over: "
                "choose another, or audit by samples"
            )


def audit_rounds(
    engine: Engine,
    scorer: PlainScorer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    seed: int = 0,
    behind: Sequence[Behind] = STATES,
    tokenizer: Tokenizer | None = None,
) -> Exact:
    """Enumerate rounds of an idle engine.

    Args:
        scorer: of the same target.
        behind: what each round that is enumerated lies behind.
        seed: of the rounds before, the first that is tried.

    Raises:
        OptionError: too many drafts or none, drafts or a rule whose noise is not one number per
            node, a busy engine, slots that differ, or no round that lies behind any of these.
    """
    check_enumerable(engine, params)
    if not prompts:
        raise OptionError("an audit needs at least one prompt")
    found = _Found()
    for drafter, k in choices_of(engine):
        with engine.fixed(k, drafter=drafter):
            check_enumerable(engine, params)
            doubt = _doubt(engine)
            for prompt in prompts:
                stand = partial(engine.submit, prompt, eos=scorer.eos, tokenizer=tokenizer)
                for state in behind:
                    with _standing(engine, stand, replace(params, seed=seed), state) as text:
                        if text is None:
                            continue
                        plain = _Plain(scorer, prompt, text, params, doubt)
                        try:
                            _enumerate(engine, plain, state, found)
                        except NotEnumerableError as error:
                            return Exact(1, found.drafts, None, 0.0, entangled=str(error))
    absent = tuple(state for state in behind if state not in found.reached)
    if not found.errors:
        raise OptionError(
            f"no round behind a {' or a '.join(absent)} came about: choose other prompts or "
            "parameters, or audit by samples"
        )
    return Exact(
        len(found.errors),
        found.drafts,
        max(found.errors),
        _tolerance(engine) + found.rounding,
        found.impossible,
        absent=absent,
        lengths=tuple(sorted(found.lengths)),
    )


@dataclass(slots=True)
class _Found:
    """What was enumerated so far; see `Exact`.

    Attributes:
        rounding: what the target's rows may add to the precision.
    """

    errors: list[float] = field(default_factory=list)
    drafts: int = 0
    impossible: int = 0
    rounding: float = 0.0
    reached: set[Behind] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)


def _enumerate(engine: Engine, p: _Plain, state: Behind, found: _Found) -> None:
    """The round that the engine stands before.

    Raises:
        NotEnumerableError: noise is used for two purposes.
    """
    drafted = _drafted(engine)
    if not any(d.nodes for d in drafted):
        return  # nothing to judge
    found.drafts += sum(map(len, drafted))
    found.reached.add(state)
    found.lengths.add(engine.k)
    law = round_law(engine.verifier, drafted)
    longest = max(d.tree.depth for d in drafted) + 1
    p.read(longest)
    found.errors.append(worst_error(law, p, longest, p.ends))
    found.impossible += len(impossible_at_zero(engine.verifier, drafted))
    # Each row's logarithms may be off by twice the doubt of its logits.
    rounding = 2 * (engine.k + 1) * p.doubt * p.largest / min(1.0, p.params.temperature)
    found.rounding = max(found.rounding, rounding)


def choices_of(engine: Engine) -> list[tuple[Drafter, int]]:
    """Who may draft in a round, and how far, as far as it is enumerated."""
    if engine.drafter is None:
        return []
    members = members_of(engine.drafter)
    if engine.auto:
        return [(m, k) for m in members for k in range(1, min(LONGEST, m.most, engine.k) + 1)]
    if len(members) == 1:
        return [(members[0], engine.k)]
    return [(m, min(m.k, engine.k)) for m in members]


@contextmanager
def _standing(
    engine: Engine,
    submit: Callable[[SamplingParams], Request],
    params: SamplingParams,
    state: Behind,
) -> Iterator[tuple[int, ...] | None]:
    """Every slot behind such a round of the same text, which is given; None if there is none."""
    assert params.seed is not None
    length = max((ROUNDS + 1) * (engine.k + 1) + 1, params.min_new_tokens)
    for seed in range(params.seed, params.seed + (1 if state == "prompt" else TRIES)):
        some = replace(params, seed=seed, max_new_tokens=length, on_context_full="stop")
        requests = [submit(some) for _ in range(engine.free_slots)]
        try:
            engine.admit()
            if state == "prompt" or _reached(engine, requests, state):
                yield tuple(requests[0].emitted)
                return
        finally:
            for request in requests:
                engine.cancel(request)
    yield None


def _reached(engine: Engine, requests: Sequence[Request], state: Behind) -> bool:
    """Run until a round was such a one, if one is and the text goes on."""
    first = requests[0]
    for _ in range(ROUNDS):
        before = first.stats.drafted_rounds, first.stats.full_accepts
        engine.step()
        if any(r.emitted != first.emitted for r in requests):
            raise OptionError(
                "requests of one seed differ from slot to slot, so that rounds cannot be "
                "enumerated: audit by samples"
            )
        if any(r.finish_reason is not None for r in requests):
            return False
        drafted = first.stats.drafted_rounds > before[0]
        full = first.stats.full_accepts > before[1]
        if drafted and full == (state == "full acceptance"):
            return True
    return False


def _tolerance(engine: Engine) -> float:
    """Of a text's probability, where rows do not round by their company."""
    return TOLERANCE.get(engine.target.dtype, 1e-5)


def _doubt(engine: Engine) -> float:
    """What rows of target and draft may be off by in company, over their size; for idle engines."""
    assert engine.drafter is not None
    models = [engine.target, engine.drafter.alone]
    rows = engine.free_slots, _draws(engine) + 1, engine.drafter.proposes is not Shape.CHAIN
    return max(float(model.doubt(*rows)) for model in models if model is not None)


def _draws(engine: Engine) -> int:
    """Numbers that a draft is drawn with, at most: one for each node."""
    assert engine.drafter is not None
    return max(1, engine.k, engine.drafter.draws)


def check_rule(verifier: Verifier, params: SamplingParams) -> None:
    """Whether a rule's rounds can be enumerated for such requests.

    Raises:
        OptionError: they cannot, and why.
    """
    if params.greedy:
        raise OptionError("at temperature 0 there is nothing to enumerate: audit greedy texts")
    if params.constraint_fields:
        raise OptionError("texts under a constraint end where it says: audit them by samples")
    if verifier.coupled:
        raise OptionError(
            f"the verifier {verifier.name!r} draws with one number per token: audit it by samples"
        )


def check_enumerable(engine: Engine, params: SamplingParams) -> None:
    """Whether rounds of this engine can be enumerated.

    Raises:
        OptionError: they cannot, and why.
    """
    if engine.busy:
        raise OptionError("the engine is busy: audit it when its requests have ended")
    if engine.drafter is None:
        raise OptionError("there is no drafter: plain decoding is what others are compared with")
    check_rule(engine.verifier, params)
    if _doubt(engine) and engine.target.dtype in (torch.float16, torch.bfloat16):
        raise OptionError(
            "rows of this runner round by their company, in half precision by more than is to be "
            "found: load the target in float32, or audit by samples"
        )
    if _doubt(engine) and (params.top_p < 1 or params.min_p):
        raise OptionError(
            "rows of this runner round by their company, and the boundaries of top_p and min_p "
            "with them: use top_k alone, or audit by samples"
        )


@torch.inference_mode()
def _drafted(engine: Engine) -> list[Drafted]:
    """Every draft that the engine's drafter can propose now, with the target's rows.

    Raises:
        OptionError: there are too many, or they do not follow from noise.
    """
    noises = []
    for request in engine.running:
        noises.append(_Scripted(request.seed, _draws(engine)))
        request.noise = noises[-1]
    try:
        leaves = _leaves(engine, noises)
    except NotEnumerableError as error:
        raise OptionError(
            "drafts do not follow from the noise of their nodes: audit by samples"
        ) from error
    parts: dict[Tree, list[tuple[_Leaf, Draft, int, Tensor]]] = {}
    for start in range(0, len(leaves), len(noises)):
        some = leaves[start : start + len(noises)]
        draft = _draft(engine, noises, [leaf.noise for leaf in some])
        rows = _judged(engine, draft)
        _put_back(engine)
        for b, leaf in enumerate(some):
            parts.setdefault(draft.trees[b], []).append((leaf, draft, b, rows[b]))
    return [_stacked(tree, found) for tree, found in parts.items()]


def _judged(engine: Engine, draft: Draft) -> Tensor:
    """The rows `[B, N + 1, V]` that the engine hands to its rule for a draft."""
    rule = engine.verifier
    recording: Any = _Recording(rule)
    engine.verifier = recording
    try:
        engine.verify(engine.running, draft, engine.score(engine.running, draft))
    finally:
        engine.verifier = rule
    rows: Tensor = recording.rows
    return rows


def _stacked(tree: Tree, found: Sequence[tuple[_Leaf, Draft, int, Tensor]]) -> Drafted:
    n = len(tree)
    q = [d.law.q[b, :n] for _, d, b, _ in found if isinstance(d.law, Rows)]
    if len(q) not in (0, len(found)):
        raise OptionError(
            "drafts of one shape are drawn by turns from rows and not drawn: audit by samples"
        )
    return Drafted(
        torch.tensor([leaf.probability for leaf, *_ in found], dtype=torch.float64),
        torch.stack([d.tokens[b, :n] for _, d, b, _ in found]).cpu(),
        torch.stack(q).cpu() if q and n else None,
        torch.stack([rows[: n + 1] for *_, rows in found]).cpu(),
        tree,
    ).narrowed()


def _leaves(engine: Engine, noises: Sequence[_Scripted]) -> list[_Leaf]:
    """Noise for every draft there is, node by node.

    Raises:
        OptionError: there are too many.
    """
    leaves: list[_Leaf] = []
    open_ = [_Leaf(1.0, ())]
    while open_:
        node = len(open_[0].noise)

        def decide(
            which: Tensor, u: Tensor, open_: Sequence[_Leaf] = tuple(open_), node: int = node
        ) -> list[tuple[int, ...]]:
            asked = [(*open_[i].noise, x) for i, x in zip(which.tolist(), u.tolist(), strict=True)]
            said: list[tuple[int, ...]] = []
            for start in range(0, len(asked), len(noises)):
                some = asked[start : start + len(noises)]
                draft = _draft(engine, noises, some)
                _put_back(engine)
                tokens = draft.tokens.tolist()
                said += [
                    (
                        *draft.trees[b].parents[: node + 1],
                        *tokens[b][: len(draft.trees[b])][: node + 1],
                    )
                    for b in range(len(some))
                ]
            return said

        further: list[_Leaf] = []
        precision = _tolerance(engine) * 1e-4
        found = intervals(decide, len(open_), precision=precision)
        for leaf, parts in zip(open_, found, strict=True):
            for low, high, said in parts:
                noise = (*leaf.noise, inside(low, high, precision))
                ended = len(said) < 2 * (node + 1) or node + 1 == _draws(engine)
                deeper = _Leaf(leaf.probability * (high - low), noise)
                (leaves if ended else further).append(deeper)
        open_ = further
        if len(open_) + len(leaves) > MOST_DRAFTS:
            raise OptionError(
                f"there are more than {MOST_DRAFTS} drafts to enumerate: choose a smaller top_k or "
                "k, or audit by samples"
            )
    return leaves


def _draft(
    engine: Engine, noises: Sequence[_Scripted], asked: Sequence[tuple[float, ...]]
) -> Draft:
    """Drafts with noise as told, one per slot; slots without run along."""
    for noise, script in zip(noises, asked, strict=False):
        noise.script[:] = 0.5
        noise.script[: len(script)] = torch.tensor(script, dtype=torch.float64).numpy()
    return engine.draft(engine.running)


def _put_back(engine: Engine) -> None:
    """As if the round had not been."""
    assert engine.drafter is not None
    engine.drafter.observe([Commit(r.place, ()) for r in engine.running])
