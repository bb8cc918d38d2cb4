"""Are these tokens draws from these laws? Tests, their decision and their power.

Per position of the text, conditional on the prefix, three tests of the same
hypothesis, each blind to something that another sees:

- tokens: samples with the same prefix are counted by token, rare tokens merged
  until every cell expects enough; Pearson's χ² is summed over prefixes. Sees any
  shift between likely tokens, needs prefixes that recur.
- ranks: each sample's place in its own law, ordered by probability, is uniform
  on [0, 1) (the probability integral transform, randomised within a token's own
  mass); counted in equal bins. Every sample counts, whatever its prefix.
- draft: the same, ordered by q/p where the draft's law is known. A rule that
  accepts too much or too little shifts mass along just this order.

A decision is Bonferroni's over all tests and looks, so that a sound system is
called unsound with at most the stated probability; the samples may be looked at
early, and what is grossly wrong costs few of them. Against a law at total
variation δ from the target's the noncentrality of χ² is at least 4 n δ²
(Cauchy-Schwarz), which gives the smallest δ that is found 9 times in 10.
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
"""Of a cell, lest the tail of χ² be too thin."""

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


class Counts:
    """Samples of one position, and what to hold them against.

    Args:
        seed: of what randomises ranks within a token's mass.
    """

    def __init__(self, position: int, seed: int = 0) -> None:
        self.position = position
        self._noise = np.random.default_rng([seed, position])
        self._tokens: dict[tuple[int, ...], dict[int, int]] = {}
        self._laws: dict[tuple[int, ...], F64] = {}
        self._bins = {"ranks": np.zeros(BINS), "draft": np.zeros(BINS)}
        self.impossible: list[tuple[tuple[int, ...], int]] = []

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
            recurs: whether the prefix is frequent enough to be counted by itself; only then is
                its law kept.
        """
        law: F64 = p.double().numpy()
        if not law[token] > 0:
            self.impossible.append((prefix, token))
            return
        tokens = self._tokens.setdefault(prefix, {})
        tokens[token] = tokens.get(token, 0) + count
        if recurs:
            self._laws.setdefault(prefix, law)
        self._place("ranks", law, law, token, count)
        if q is not None:
            positive = np.where(law > 0, law, 1.0)
            self._place("draft", law, q.double().numpy() / positive, token, count)

    def _place(self, kind: str, law: F64, score: F64, token: int, count: int) -> None:
        """Where the token lies in the law, ordered by falling score; of equals the first."""
        above = score > score[token]
        above[:token] |= score[:token] == score[token]
        places = law[above].sum() + law[token] * self._noise.random(count)
        bins = np.minimum((places / law.sum() * BINS).astype(np.int64), BINS - 1)
        np.add.at(self._bins[kind], bins, 1)

    def tests(self, false_alarm: float) -> list[Test]:
        """Each test that has enough samples, with its share of the false alarms."""
        made = []
        if (cells := self._cells()) is not None:
            made.append(_test(self.position, "tokens", *cells, false_alarm))
        for kind, observed in self._bins.items():
            if observed.sum() >= BINS * LEAST_EXPECTED:
                expected = np.full(BINS, observed.sum() / BINS)
                group = np.zeros(BINS, np.int64)
                made.append(_test(self.position, kind, observed, expected, group, false_alarm))
        return made

    def _cells(self) -> tuple[F64, F64, NDArray[np.int64]] | None:
        """Observed and expected counts of merged cells, and the prefix that each belongs to."""
        observed, expected, groups = [], [], []
        for number, (prefix, law) in enumerate(self._laws.items()):
            tokens = self._tokens[prefix]
            counts = np.zeros(len(law))
            counts[list(tokens)] = list(tokens.values())
            seen, wanted = merge(counts, law)
            if len(seen) > 1:
                observed.append(seen)
                expected.append(wanted)
                groups.append(np.full(len(seen), number))
        if not observed:
            return None
        return np.concatenate(observed), np.concatenate(expected), np.concatenate(groups)


def merge(counts: F64, law: F64) -> tuple[F64, F64]:
    """Observed and expected counts of cells that expect at least `LEAST_EXPECTED`.

    Likely tokens are cells of their own; all others are one, together with the least
    likely of the former where they expect too little.
    """
    expected = counts.sum() * law / law.sum()
    order = np.argsort(-expected, kind="stable")
    own = int((expected >= LEAST_EXPECTED).sum())
    rest = float(expected[order[own:]].sum())
    if rest < LEAST_EXPECTED and rest > 0:
        own -= 1
    if own < 0:
        return counts[:0], expected[:0]
    likely, others = order[:own], order[own:]
    if rest == 0:
        return counts[likely], expected[likely]
    return (
        np.append(counts[likely], counts[others].sum()),
        np.append(expected[likely], expected[others].sum()),
    )


def _test(
    position: int,
    kind: str,
    observed: F64,
    expected: F64,
    groups: NDArray[np.int64],
    false_alarm: float,
) -> Test:
    from scipy import stats

    samples = int(observed.sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(observed) - len(np.unique(groups))
    totals = np.zeros(int(groups.max()) + 1)
    np.add.at(totals, groups, observed)
    spread = np.sqrt(expected * (1 - expected / totals[groups]) * 2 / math.pi)
    beyond = 0.5 * (np.abs(observed - expected).sum() - spread.sum()) / samples
    return Test(
        position,
        kind,
        samples,
        statistic,
        degrees,
        float(stats.chi2.sf(statistic, degrees)),
        detectable(samples, degrees, false_alarm),
        max(0.0, float(beyond)),
    )


def detectable(samples: int, degrees: int, false_alarm: float) -> float:
    """The smallest total variation that χ² finds with probability `POWER`, at most 1."""
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


def significant(tests: Sequence[Test], share: float) -> list[Test]:
    """The tests that decide against the system, given each one's share of the false alarms."""
    return [t for t in tests if t.p_value < share]
