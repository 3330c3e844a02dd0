"""From right guesses to epsilon: what an adversary who guessed so well proves about (epsilon, delta).

Each canary was trained on by the toss of a fair coin. Whoever sees the outcome of an (epsilon, delta)-private training
and guesses r of m coins is right v times or more with a probability of at most `guess_p_value`: Steinke, Nasr and
Jagielski: Privacy Auditing with One (1) Training Run (2023), theorem 5.2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special, stats

LARGEST_EPSILON = 30.0


def guess_p_value(epsilon: float, delta: float, *, canaries: int, guesses: int, right: int) -> float:
    """How likely `right` or more of `guesses` are right, at most, under (epsilon, delta)-privacy.

    Args:
        epsilon, delta: of adding or removing one record.
        canaries: m, of which some were not guessed.
        guesses: r, fixed beforehand.
        right: v.
    """
    chance = float(special.expit(epsilon))
    p_value = float(stats.binom.sf(right - 1, guesses, chance))
    if delta and right:
        nearly = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
        p_value += 2 * canaries * delta * float((nearly / np.arange(1, right + 1)).max())
    return min(1.0, p_value)


def epsilon_at_least(delta: float, *, canaries: int, guesses: int, right: int, significance: float = 0.05) -> float:
    """The largest epsilon that so many right guesses exclude, with confidence `1 - significance`; 0 if none."""

    def excluded(epsilon: float) -> bool:
        return guess_p_value(epsilon, delta, canaries=canaries, guesses=guesses, right=right) < significance

    return largest(excluded, 0.0, LARGEST_EPSILON)


def largest(excluded: Callable[[float], bool], low: float, high: float, bisections: int = 40) -> float:
    """The largest number for which `excluded` holds, which does so up to there; `low` if for none."""
    if not excluded(low):
        return low
    for _ in range(bisections):
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low
