"""Are these tokens draws from these laws? Tests, their decision and their power.

Per position of the text, conditional on the prefix, three tests of the same
hypothesis, each blind to something that another sees:

- tokens: samples with the same prefix are counted by token, rare tokens merged
  until every cell expects enough; G is summed over prefixes. Sees any shift
  between likely tokens, needs prefixes that recur.
- ranks: each sample's place in its own law, ordered by probability, is uniform
  on [0, 1) (the probability integral transform, randomised within a token's own
  mass); counted in equal bins. Every sample counts, whatever its prefix.
- draft: the same, ordered by q/p where the draft's law is known. A rule that
  accepts too much or too little shifts mass along just this order.

The statistic is G, the likelihood ratio, with Williams' correction (1976) for each
prefix: far in the tail, where decisions are made, Pearson's is an order of
magnitude too often significant with cells that expect ten, while G's is off by
less than `MARGIN`, which decisions allow for. They are Bonferroni's over all
tests and looks, so that a sound system is called unsound with at most the stated
probability; the samples may be looked at early, and what is grossly wrong costs
few of them. Against a law at total variation δ from the target's the
noncentrality of G is at least 4 n δ² (Pinsker), which gives the smallest δ that
is found 9 times in 10.

A token whose law gives it nothing is beyond all others: it is counted as the
least likely. Whether it is a defect by itself is for the caller to say, since
another engine's rounding may move the boundary of a top-k or a nucleus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OptionError

F64 = NDArray[np.float64]

LEAST_EXPECTED = 10.0
"""Of a cell."""

MARGIN = 2.0
"""By which the tail of G may exceed that of χ², with cells that expect so much."""

RECURS = int(2 * LEAST_EXPECTED)
"""Samples with one prefix that make two cells at least."""

BINS = 20
POWER = 0.9


@dataclass(frozen=True, slots=True)
class Test:
    """One test at one position, over all samples so far.

    Attributes:
        position: of the token, from 1.
        kind: tokens, ranks or draft.
        samples: draws that it counts.
        degrees: of freedom.
        detectable: the smallest total variation (of the laws as counted) that it
            finds with probability `POWER` at its share of the false alarms.
        distance: total variation between counts and law, as counted, beyond what
            chance makes of it; an estimate of the defect's size.
    """

    position: int
    kind: str
    samples: int
    statistic: float
    degrees: int
    p_value: float
    detectable: float
    distance: float


@dataclass(slots=True)
class _Prefix:
    """A prefix that recurs: its law, as far as cells of it can be counted, and its samples."""

    law: dict[int, float]  # tokens that may be cells of their own
    seen: dict[int, int]
    samples: int = 0


class Counts:
    """Samples of one position, and what to hold them against.

    Args:
        planned: samples there will be at most: what they can never make a cell of is
            kept as one.
        seed: of what randomises ranks within a token's mass.
    """

    def __init__(self, position: int, planned: int, seed: int = 0) -> None:
        self.position = position
        self._least = LEAST_EXPECTED / planned
        self._noise = np.random.default_rng([seed, position])
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._bins = {"ranks": np.zeros(BINS), "draft": np.zeros(BINS)}

    def add(
        self,
        prefix: tuple[int, ...],
        token: int,
        p: Tensor,
        q: Tensor | None,
        count: int = 1,
        recurs: bool = True,
    ) -> None:
        """Take `count` equal samples.

        Args:
            prefix: what stands before the token, the prompt's number first.
            p, q: `[V]` the target's law there, and the draft's if it is known.
            recurs: whether the prefix is frequent enough to be counted by itself.
        """
        law: F64 = p.double().numpy()
        law = law / law.sum()
        if recurs:
            known = self._prefixes.get(prefix)
            if known is None:
                likely = np.flatnonzero(law >= self._least)
                cells = dict(zip(likely.tolist(), law[likely].tolist(), strict=True))
                known = self._prefixes[prefix] = _Prefix(cells, {})
            known.seen[token] = known.seen.get(token, 0) + count
            known.samples += count
        self._place("ranks", law, law, token, count)
        if q is not None:
            positive = np.where(law > 0, law, 1.0)
            self._place("draft", law, q.double().numpy() / positive, token, count)

    def _place(self, kind: str, law: F64, score: F64, token: int, count: int) -> None:
        """Where the token lies in the law, ordered by falling score; of equals the first."""
        if law[token] > 0:
            above = score > score[token]
            above[:token] |= score[:token] == score[token]
            places = law[above].sum() + law[token] * self._noise.random(count)
        else:
            places = np.ones(count)
        bins = np.minimum((places * BINS).astype(np.int64), BINS - 1)
        np.add.at(self._bins[kind], bins, 1)

    def tests(self, false_alarm: float) -> list[Test]:
        """Each test that has enough samples, with its share of the false alarms."""
        made = []
        if groups := self._groups():
            made.append(_test(self.position, "tokens", groups, false_alarm))
        for kind, observed in self._bins.items():
            if observed.sum() >= BINS * LEAST_EXPECTED:
                even = [(observed, np.full(BINS, observed.sum() / BINS))]
                made.append(_test(self.position, kind, even, false_alarm))
        return made

    def _groups(self) -> list[tuple[F64, F64]]:
        """Observed and expected counts of cells, for each prefix that has two at least."""
        groups = []
        for known in self._prefixes.values():
            ids = list(known.law)
            law = np.array([*known.law.values(), 0.0])
            law[-1] = max(0.0, 1 - law.sum())
            counts = np.array([known.seen.get(i, 0) for i in ids] + [0.0])
            counts[-1] = known.samples - counts.sum()
            seen, wanted = merge(counts, law)
            if len(seen) > 1:
                groups.append((seen, wanted))
        return groups


def merge(counts: F64, law: F64) -> tuple[F64, F64]:
    """Observed and expected counts of cells that expect at least `LEAST_EXPECTED`.

    Likely tokens are cells of their own; all others are one, together with the least
    likely of the former where they expect too little. The last entry is never alone.
    """
    expected = counts.sum() * law / law.sum()
    order = np.argsort(-expected[:-1], kind="stable")
    own = int((expected[:-1] >= LEAST_EXPECTED).sum())
    if not expected[order[own:]].sum() + expected[-1] + counts[order[own:]].sum() + counts[-1]:
        return counts[order[:own]], expected[order[:own]]  # nothing else
    while own >= 0:
        others = np.append(order[own:], len(law) - 1)
        rest = float(expected[others].sum())
        if rest >= LEAST_EXPECTED:
            break
        own -= 1
    if own < 0:
        return counts[:0], expected[:0]
    likely = order[:own]
    return (
        np.append(counts[likely], counts[others].sum()),
        np.append(expected[likely], rest),
    )


def likelihood_ratio(observed: F64, expected: F64) -> float:
    """G = 2 Σ O ln(O / E) of one multinomial, with Williams' correction."""
    from scipy.special import xlogy

    cells, whole = len(observed), float(observed.sum())
    g = 2 * float(xlogy(observed, observed / expected).sum())
    return g / (1 + (float((whole / expected).sum()) - 1) / (6 * whole * (cells - 1)))


def _test(position: int, kind: str, groups: Sequence[tuple[F64, F64]], false_alarm: float) -> Test:
    from scipy import stats

    samples = int(sum(observed.sum() for observed, _ in groups))
    statistic = sum(likelihood_ratio(observed, expected) for observed, expected in groups)
    degrees = sum(len(observed) - 1 for observed, _ in groups)
    beyond = sum(
        np.abs(o - e).sum() - np.sqrt(e * (1 - e / o.sum()) * 2 / math.pi).sum() for o, e in groups
    )
    return Test(
        position,
        kind,
        samples,
        statistic,
        degrees,
        float(stats.chi2.sf(statistic, degrees)),
        detectable(samples, degrees, false_alarm),
        max(0.0, float(0.5 * beyond / samples)),
    )


def detectable(samples: int, degrees: int, false_alarm: float) -> float:
    """The smallest total variation that G finds with probability `POWER`, at most 1."""
    from scipy import optimize, stats

    critical = stats.chi2.isf(false_alarm, degrees)

    def lacking(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, degrees, noncentrality)) - POWER

    high = 2 * critical + 100
    needed = float(optimize.brentq(lacking, 1e-9, high, xtol=1e-6))
    return min(1.0, math.sqrt(needed / (4 * samples)))


def check_false_alarm(value: float) -> float:
    """A rate of false alarms as given.

    Raises:
        OptionError: not between 0 and 1.
    """
    if not 0 < value < 1:
        raise OptionError(f"the false-alarm rate must lie between 0 and 1, not {value!r}")
    return value


def looks_of(samples: int, looks: int) -> list[int]:
    """Ascending numbers of samples to look at, each about half of the next."""
    return sorted({max(1, samples >> i) for i in range(looks)})
