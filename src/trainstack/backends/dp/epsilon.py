"""Epsilon of Poisson-sampled Gaussian steps from opacus' accountants or closed forms.

Both give upper bounds for adding or removing one record. Renyi accounting (rdp) takes milliseconds and always answers.
Privacy loss distributions (prv) are tighter, but may take minutes, and lose their digits where delta nears the rounding
of a Fourier transform: there `prv_epsilon` returns inf, and the caller keeps the result of rdp.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from types import ModuleType

from trainstack.errors import ConfigurationError, MissingExtraError

NO_NOISE = 1e-9
"""So small a sigma counts as none: epsilon is above 1e17, and for much less the formulas leave the range of floats."""


def log_normal_cdf(z: float) -> float:
    """The logarithm of the standard normal distribution function, accurate far into the lower tail."""
    if z > -30.0:
        return math.log1p(-0.5 * math.erfc(z / math.sqrt(2))) if z > 0 else math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    series = 1 - 1 / z**2 + 3 / z**4 - 15 / z**6  # asymptotic; the next term is below 1e-9 here
    return -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi)) + math.log(series)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The least delta at `epsilon` of a Gaussian mechanism of sensitivity `mu` and noise 1 (Balle, Wang 2018)."""
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
    """The limit of epsilon of `steps` Poisson samples as they grow in number (Bu et al. 2020); no upper bound."""
    return gaussian_epsilon(q * math.sqrt(steps * math.expm1(1 / sigma**2)), delta) if sigma > 0.05 else math.inf


def fixed_order_epsilon(history: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of the same steps (sigma, q, steps) if batches were not drawn, but cut from one order fixed beforehand.

    Each record then takes part once an epoch of `ceil(1 / q)` steps, the last of which may be smaller, and its steps
    are known. The guarantee is that of one Gaussian mechanism of `mu = sqrt(sum of 1/sigma^2)` over the epochs begun
    (Dong, Roth, Su 2019). With batches shuffled in each epoch, epsilon is between `shuffled_epsilon_at_least` and this.
    """
    taken = [(sigma, math.ceil(steps / steps_per_epoch(q)) if q > 0 else 0) for sigma, q, steps in history]
    if any(sigma < NO_NOISE and times for sigma, times in taken):
        return math.inf
    return gaussian_epsilon(math.sqrt(sum(times / sigma**2 for sigma, times in taken if times)), delta)


def steps_per_epoch(q: float) -> int:
    """Steps in which a fixed order of all records is used up: `1 / q`, rounded up.

    A q that is a quotient of whole numbers may lie some roundings off it, which must not add a step: an epoch that is
    taken for longer than it is would have fewer participations than the truth.
    """
    return max(1, math.ceil(1 / q * (1 - 1e-12)))


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
    for _ in range(200):
        middle = (low + high) / 2
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return high


def import_opacus(module: str = "opacus", feature: str = "Differential privacy") -> ModuleType:
    """Import `module`, opacus or a part of it, for `feature`; logging and the warning filters stay as they were.

    Raises:
        MissingExtraError: opacus is not installed.
        ConfigurationError: the opacus that is installed is older than 1.6.
    """
    imported = import_extra(module, feature, "dp")
    version = opacus_version()
    if tuple(int(part) for part in version.split(".")[:2]) < (1, 6):
        raise ConfigurationError(
            f"opacus {version} is installed, which is too old: before 1.6 it reports too small an epsilon with "
            "adaptive clipping. Install a newer one with: pip install 'trainstack[dp]'"
        )
    return imported


def import_extra(module: str, feature: str, extra: str) -> ModuleType:
    """Import `module` of a package of `extra` for `feature`; logging and the warning filters stay as they were.

    Raises:
        MissingExtraError: the package, or scipy, is not installed.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in (module.split(".")[0], "scipy"):
            raise
        raise MissingExtraError(feature, missing.name, extra) from missing
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def opacus_version() -> str:
    """The version of the opacus that is installed."""
    return metadata.version("opacus")


Entry = tuple[float, float, int]
"""(noise multiplier sigma, sampling rate q, steps)."""

ORDERS = [1 + tenth / 10 for tenth in range(1, 100)] + [
    float(order) for order in (*range(12, 64), 64, 80, 96, 128, 192, 256, 384, 512, 1024)
]
"""opacus' own orders, which end at 63, and higher ones: without them epsilon never falls below 0.1 at delta 1e-5."""

_LARGEST_GRID = 2**22
"""Points of prv's grid: four million take about two seconds."""


def rdp_epsilon(history: Sequence[Entry], delta: float) -> float:
    """Epsilon by Renyi accounting; `history` holds only entries with steps, sampling and noise."""
    return epsilon_from_renyi(renyi_of(history), delta)


def renyi_of(history: Sequence[Entry]) -> list[float]:
    """The Renyi divergence of all steps of `history` at each of `ORDERS`; they add up order by order."""
    import numpy as np

    totals = np.zeros(len(ORDERS))
    for sigma, q, steps in history:
        totals += steps * np.array(_renyi(sigma, q))
    return [float(total) for total in totals]


def epsilon_from_renyi(curve: Sequence[float], delta: float) -> float:
    """Epsilon at `delta` of a mechanism with this Renyi divergence at each of `ORDERS`."""
    analysis = import_opacus("opacus.accountants.analysis.rdp")
    with warnings.catch_warnings():  # "optimal order is the largest": the bound holds all the same
        warnings.simplefilter("ignore")
        epsilon, _ = analysis.get_privacy_spent(orders=ORDERS, rdp=curve, delta=delta)
    return max(0.0, float(epsilon))


@functools.lru_cache(maxsize=1024)
def _renyi(sigma: float, q: float) -> tuple[float, ...]:
    """The Renyi divergence of one step at each order; inf where opacus' series cannot be summed."""
    analysis = import_opacus("opacus.accountants.analysis.rdp")
    divergences = []
    for order in ORDERS:
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
        eps_error: the most by which the result may exceed the truth; increased if the grid would not fit, at most to
            2 % of `rdp`.
        rdp: the result of `rdp_epsilon` for the same.
    """
    # Each entry costs as much as the first; the grid grows with epsilon, and no one calls one above 50 private.
    if len(history) > 20 or rdp > 50.0:
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
