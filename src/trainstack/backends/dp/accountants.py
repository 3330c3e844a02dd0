"""Epsilon of Poisson samples with Gaussian noise, by opacus' two accountants, within bounds of time and rounding.

Both give upper bounds for adding or removing one record. Renyi accounting (rdp) takes milliseconds and always answers.
Privacy loss distributions (prv) are tighter, but may take minutes, and lose their digits where delta nears the rounding
of a Fourier transform: there `prv_epsilon` returns inf, and the caller keeps what rdp says.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence

from trainstack.backends.dp.opacus_import import import_opacus

Entry = tuple[float, float, int]
"""(noise multiplier sigma, sampling rate q, steps)."""

_ORDERS = [1 + tenth / 10 for tenth in range(1, 100)] + [
    float(order) for order in (*range(12, 64), 64, 80, 96, 128, 192, 256, 384, 512, 1024)
]
"""opacus' own orders, which end at 63, and higher ones: without them epsilon never falls below 0.1 at delta 1e-5."""

_MOST_DISTINCT = 20
"""Entries that prv still composes: each costs as much as the first."""

_LARGEST_GRID = 2**22
"""Points of prv's grid: four million take about two seconds."""

_LARGEST_EPSILON = 50.0
"""Above this rdp alone: the grid grows with epsilon, and no one calls such a figure private."""


def rdp_epsilon(history: Sequence[Entry], delta: float) -> float:
    """Epsilon by Renyi accounting; `history` holds only entries with steps, sampling and noise."""
    import numpy as np

    totals = np.zeros(len(_ORDERS))
    for sigma, q, steps in history:
        totals += steps * np.array(_renyi(sigma, q))
    analysis = import_opacus("opacus.accountants.analysis.rdp")
    with warnings.catch_warnings():  # "optimal order is the largest": the bound holds all the same
        warnings.simplefilter("ignore")
        epsilon, _ = analysis.get_privacy_spent(orders=_ORDERS, rdp=totals, delta=delta)
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=1024)
def _renyi(sigma: float, q: float) -> tuple[float, ...]:
    """The Renyi divergence of one step at each order; inf where opacus' series cannot be summed."""
    analysis = import_opacus("opacus.accountants.analysis.rdp")
    divergences = []
    for order in _ORDERS:
        try:
            value = float(analysis.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order))
        except (ValueError, OverflowError):
            value = math.inf
        divergences.append(math.inf if math.isnan(value) else value)
    return tuple(divergences)


def prv_epsilon(history: Sequence[Entry], delta: float, eps_error: float, rdp: float) -> float:
    """Epsilon by privacy loss distributions, an upper bound; inf where they are too slow or too coarse.

    Args:
        history: entries with steps, sampling and noise, no two of the same sigma and q.
        delta: above 0.
        eps_error: what the result may lie above the truth; raised where the grid would not fit, at most to 2 % of
            `rdp`.
        rdp: what `rdp_epsilon` says of the same.
    """
    if len(history) > _MOST_DISTINCT or rdp > _LARGEST_EPSILON:
        return math.inf
    steps = sum(entry[2] for entry in history)
    reach = max(rdp_epsilon(history, delta / 4000), eps_error) + 3  # the half width that opacus is going to choose
    finest = 2 * reach * math.sqrt(steps * math.log(12_000 / delta) / 2) / _LARGEST_GRID
    eps_error = max(eps_error, finest)
    rounding = steps * sys.float_info.epsilon * math.log2(_LARGEST_GRID)
    if eps_error > max(0.01, 0.02 * rdp) or delta < 10 * rounding:
        return math.inf
    return _prv(tuple(history), delta, eps_error)


@functools.lru_cache(maxsize=1024)
def _prv(history: tuple[Entry, ...], delta: float, eps_error: float) -> float:
    import numpy as np

    accountant = import_opacus("opacus.accountants").PRVAccountant()
    accountant.history = list(history)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            epsilon = float(accountant.get_epsilon(delta, eps_error=eps_error))
    except (ValueError, RuntimeError, OverflowError, ZeroDivisionError):
        return math.inf  # it says itself that it has no answer
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)
