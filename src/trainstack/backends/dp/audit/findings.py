"""`Finding`: one thing that was looked at, and how likely what was seen would be if all were well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

IMPLAUSIBLE = 1e-6
"""A p-value below this is no accident: one correct audit in many thousands reaches it."""


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


def of_normal(z: float) -> float:
    """The two-sided p-value of a standard normal number."""
    return two_sided(stats.norm.cdf(z), stats.norm.sf(z))


def strongest_correlation(products: Any, among: int) -> tuple[float, float]:
    """The largest of many correlations, and its p-value for all of them together.

    Args:
        products: sums of `among` products of independent numbers of mean 0 and variance 1.
        among: at least some hundreds, so that their sum is nearly normal.

    Returns:
        The correlation, and a p-value by Bonferroni.
    """
    products = np.atleast_1d(products).ravel()
    z = float(products[np.argmax(np.abs(products))]) / math.sqrt(among)
    return z / math.sqrt(among), min(1.0, len(products) * of_normal(z))
