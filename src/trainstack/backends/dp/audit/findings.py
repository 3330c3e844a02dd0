"""`Finding`: one thing that was looked at, and how likely what was seen would be if all were well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

IMPLAUSIBLE = 1e-6
"""A p-value below this is no accident: with every test of an audit together, one in many thousands reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one test.

    Attributes:
        probe: which experiment it belongs to.
        claim: what ought to be so.
        seen: what was measured, in words.
        p_value: the probability of something as unlikely as that, if the claim holds; an upper bound.
    """

    probe: str
    claim: str
    seen: str
    p_value: float

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the claim."""
        return self.p_value >= IMPLAUSIBLE


def two_sided(below: float, above: float) -> float:
    """The p-value of a statistic with the probabilities `below` and `above` of as little and as much."""
    return float(min(1.0, 2 * min(below, above)))


def largest_of_normal(z: Any) -> float:
    """The p-value of the number that is furthest from 0 among several standard normal ones, by Bonferroni."""
    return min(1.0, np.size(z) * 2 * float(stats.norm.sf(np.abs(z).max())))


def most_unlikely_count(counts: Any, trials: int, probability: float) -> tuple[int, float]:
    """Of several counts, each binomial, the one that is hardest to believe, and its p-value by Bonferroni."""
    counts = np.ravel(counts)
    law = stats.binom(trials, probability)
    tails = np.minimum(law.cdf(counts), law.sf(counts - 1))
    place = int(tails.argmin())
    return int(counts[place]), min(1.0, 2 * counts.size * float(tails[place]))
