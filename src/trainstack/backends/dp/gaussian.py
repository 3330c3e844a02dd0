"""Gaussian noise without the help of sampling: closed forms, which need no package.

A record that takes part in k steps, whichever those are as long as it is fixed beforehand, is protected as by one
Gaussian mechanism of `mu = sqrt(sum of 1/sigma^2)` (Dong, Roth, Su 2019), whose delta for a given epsilon is exact
(Balle, Wang 2018). Both are for adding or removing one record, with everything else in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

NO_NOISE = 1e-9
"""So small a sigma counts as none: epsilon is above 1e17, and for much less the formulas leave the range of floats."""

_BISECTIONS = 200


def log_normal_cdf(z: float) -> float:
    """The logarithm of the standard normal distribution function, accurate far into the lower tail."""
    if z > -30.0:
        return math.log1p(-0.5 * math.erfc(z / math.sqrt(2))) if z > 0 else math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    series = 1 - 1 / z**2 + 3 / z**4 - 15 / z**6  # asymptotic; the next term is below 1e-9 here
    return -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi)) + math.log(series)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The least delta at `epsilon` of a Gaussian mechanism of sensitivity `mu` and noise 1."""
    if mu == 0.0:
        return 0.0
    first = math.exp(log_normal_cdf(-epsilon / mu + mu / 2))
    return max(0.0, first - math.exp(epsilon + log_normal_cdf(-epsilon / mu - mu / 2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon at `delta` of a Gaussian mechanism of sensitivity `mu` and noise 1, rounded up by 1e-12."""
    if math.isinf(mu):
        return math.inf
    return _least_epsilon(lambda epsilon: gaussian_delta(mu, epsilon), delta)


def clt_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """What epsilon of `steps` Poisson samples tends to as they grow in number (Bu et al. 2020); no upper bound."""
    return gaussian_epsilon(q * math.sqrt(steps * math.expm1(1 / sigma**2)), delta) if sigma > 0.05 else math.inf


def fixed_order_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of the same steps (sigma, q, steps) if batches were not drawn, but cut from one order fixed beforehand.

    Each record then takes part once an epoch, `ceil(steps * q)` times in all, and nobody need guess in which steps.
    Batches that are shuffled in each epoch lie between `shuffled_epsilon_at_least` and this.
    """
    taken = [(sigma, math.ceil(round(steps * q, 9))) for sigma, q, steps in history]
    if any(sigma < NO_NOISE and times for sigma, times in taken):
        return math.inf
    return gaussian_epsilon(math.sqrt(sum(times / sigma**2 for sigma, times in taken if times)), delta)


def shuffled_epsilon_at_least(sigma: float, steps_per_epoch: int, delta: float) -> float:
    """A lower bound of epsilon for one or more epochs over shuffled batches, by an attack that reaches it.

    The attack looks at the largest of the epoch's noisy sums: near 2 in one step with the record in place, near 1
    without it (all other gradients point the opposite way), and near 0 in all other steps (Chua et al. 2024, adaptive
    batch queries).
    """
    if sigma == 0:
        return math.inf
    sigma = max(sigma, NO_NOISE)
    thresholds = [2 * (i / 2000) * (1 + 6 * sigma) for i in range(2001)]
    with_it, without = ([_log_above(t, mean, sigma, steps_per_epoch) for t in thresholds] for mean in (2, 1))
    pairs = [(math.exp(log_p), log_q) for log_p, log_q in zip(with_it, without, strict=True)]
    return _least_epsilon(lambda epsilon: max(p - math.exp(min(0.0, epsilon + log_q)) for p, log_q in pairs), delta)


def _log_above(threshold: float, mean: float, sigma: float, steps: int) -> float:
    """The logarithm of the chance that the largest of `steps` noisy sums, one of `mean` and others of 0, is above."""
    none = log_normal_cdf((threshold - mean) / sigma) + (steps - 1) * log_normal_cdf(threshold / sigma)
    if none < -1e-300:
        return math.log(-math.expm1(none))
    return math.log(steps) + log_normal_cdf((mean - threshold) / sigma)  # the sum of all their chances, or more


def _least_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """The smallest epsilon from 0 with `delta_at(epsilon) <= delta`, from above; `delta_at` falls."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return high
