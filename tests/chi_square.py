"""How well what came out fits a law: χ² of counts, rare outcomes taken together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from scipy import stats

LEAST = 5.0
"""Expected of every group of outcomes, so that the statistic has its distribution."""


def chi_square(found: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; what is impossible is no accident."""
    if any(count and not law.get(outcome) for outcome, count in found.items()):
        return math.inf, 1
    total = sum(found.values())
    groups = [[0.0, 0.0]]  # observed, expected
    for outcome in sorted(law, key=lambda outcome: law[outcome]):
        if groups[-1][1] >= LEAST:
            groups.append([0.0, 0.0])
        groups[-1][0] += found.get(outcome, 0)
        groups[-1][1] += law[outcome] * total
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in groups)
    return statistic, max(1, len(groups) - 1)


def p_value(*tests: tuple[float, int]) -> float:
    """Of independent ones together."""
    return float(stats.chi2.sf(sum(s for s, _ in tests), sum(dof for _, dof in tests)))
