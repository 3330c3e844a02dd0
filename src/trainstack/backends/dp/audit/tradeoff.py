"""From right guesses to epsilon, with all that is known of the mechanism: its trade-off function f, not one epsilon.

Let R_i be the share of canaries that are guessed right in outcomes with i or more right guesses, and W_i that of those
guessed wrong. For a mechanism that is f-private in each canary, R_{i+1} <= 1 - f(W_i). So few right guesses must be
about as likely as many, and going down from v one finds how likely v can be at all. Mahloujifar, Melis and Chaudhuri:
Auditing f-Differential Privacy in One Run (2024, arXiv 2410.22235).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainstack.backends.dp.audit.profile import EPSILONS

_GROWTH = np.exp(EPSILONS)


def tradeoff_p_value(profile: Any, *, canaries: int, guesses: int, right: int) -> float:
    """How likely `right` or more of `guesses` are right, at most, for a mechanism with this privacy profile.

    Args:
        profile: delta at each of `EPSILONS`, an upper bound, for both directions.
        canaries, guesses, right: as in `one_run.guess_p_value`.
    """
    low, high = math.log(1e-30), 0.0

    def below(logarithm: float) -> bool:
        return less_likely(profile, math.exp(logarithm), canaries=canaries, guesses=guesses, right=right)

    if not below(high):
        return 1.0
    if below(low):
        return math.exp(low)
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return math.exp(high)


def less_likely(profile: Any, probability: float, *, canaries: int, guesses: int, right: int) -> bool:
    """Whether `right` or more right guesses are less likely than `probability`: else all outcomes together exceed 1."""
    share = probability / canaries
    hit, missed = share * right, share * (guesses - right)
    offset = 1 - profile - _GROWTH
    for right_now in range(right - 1, -1, -1):
        least = max(0.0, float(((hit - profile) / _GROWTH).max()), float((offset + _GROWTH * hit).max()))
        if least > missed:
            hit += right_now / (guesses - right_now) * (least - missed)
            missed = least
        if hit + missed > guesses / canaries:
            return True
    return False
