"""Epsilon of releasing only the best of a random number of private runs (Papernot and Steinke, 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trainstack.backends.dp.accounting import check_delta, merge_steps
from trainstack.backends.dp.epsilon import ORDERS, epsilon_from_renyi, renyi_of
from trainstack.errors import ConfigurationError


def best_of_epsilon(history: Iterable[Sequence[float]], delta: float, mean_runs: float) -> float:
    """An upper bound of epsilon where only the best of K runs is released, K drawn from a Poisson distribution.

    Each run charges `history`, the same for all candidates, and is compared by a score that is part of it: computed
    from its released weights and public data, or released with further noise, an entry (sigma, 1, 1) of `history`. K is
    drawn before the first run, from secret entropy; with K = 0 nothing is released. K itself and the other runs stay
    secret. If more than the best run is released, the charges of all runs add up instead.

    With `(a, r(a))` the Renyi curve of one run and `d(a)` its delta at epsilon `log(1 + 1/(a - 1))`, the whole has the
    curve `r(a) + mean_runs d(a) + log(mean_runs) / (a - 1)`. Source: Papernot and Steinke, "Hyperparameter Tuning with
    Renyi Differential Privacy" (2022), theorem 6.

    Args:
        history: (noise multiplier, sampling rate, steps) each, of one run with its score.
        delta: of the guarantee.
        mean_runs: the mean of K, above 0.

    Returns:
        inf if a step had no noise.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    check_delta(delta)
    if not (mean_runs > 0 and math.isfinite(mean_runs)):
        raise ConfigurationError(f"mean_runs={mean_runs!r}: write a number above 0, such as 10.")
    spent = [entry for entry in merge_steps(history) if entry[1] > 0 and entry[2] > 0]
    if not spent:
        return 0.0
    curve = renyi_of(spent)
    selected = [
        rho + mean_runs * _delta_at(math.log1p(1 / (order - 1)), curve) + max(0.0, math.log(mean_runs)) / (order - 1)
        for order, rho in zip(ORDERS, curve, strict=True)
    ]
    return epsilon_from_renyi(selected, delta)


def _delta_at(epsilon: float, curve: Sequence[float]) -> float:
    """The least delta at `epsilon` that the Renyi `curve` proves (Canonne, Kamath, Steinke 2020, proposition 12)."""
    logs = [
        (order - 1) * (rho - epsilon + math.log1p(-1 / order)) - math.log(order)
        for order, rho in zip(ORDERS, curve, strict=True)
        if math.isfinite(rho)
    ]
    return math.exp(min(0.0, *logs)) if logs else 1.0
