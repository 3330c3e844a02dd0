"""Epsilon by the privacy loss distributions of dp_accounting, which keep their digits for a million steps."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

from trainstack.backends.dp.epsilon import Entry, import_extra

_GRIDS = (1e-4, 1e-5, 1e-6)
_MOST_POINTS = 100_000
"""A finer grid is not tried where it would have more points: this many take about two seconds."""


def pld_epsilon(history: Sequence[Entry], delta: float, rdp: float) -> float:
    """Epsilon by pessimistic privacy loss distributions, an upper bound; inf where they are too slow.

    Losses are rounded to a grid such that the result is never too small (Doroshenko et al. 2022, connect the dots).
    The grid is made finer until the result changes by less than 1 %.

    Args:
        history: entries with steps, sampling and noise, no two of the same sigma and q.
        delta: above 0.
        rdp: epsilon by Renyi accounting of the same.

    Raises:
        MissingExtraError: dp_accounting is not installed.
    """
    distributions = import_extra("dp_accounting.pld.privacy_loss_distribution", "accountant='pld'", "pld")
    # Rounding in the Fourier transform to the power of the steps changed delta by at most a tenth of this, against long
    # double. 20 kinds of noise, and epsilon 50, are the limits of the other accountant too.
    delta -= sum(entry[2] for entry in history) * sys.float_info.epsilon
    if len(history) > 20 or rdp > 50.0 or delta <= 0.0:
        return math.inf
    found = math.inf
    for grid in _GRIDS:
        epsilon, points = _on_grid(distributions, tuple(history), delta, grid)
        is_fine = found - epsilon < 0.01 * epsilon
        found = min(found, epsilon)
        if is_fine or 10 * points > _MOST_POINTS:
            break
    return found


@functools.lru_cache(maxsize=256)
def _on_grid(distributions: Any, history: tuple[Entry, ...], delta: float, grid: float) -> tuple[float, int]:
    total = None
    for sigma, q, steps in history:
        one = distributions.from_gaussian_mechanism(sigma, value_discretization_interval=grid, sampling_prob=q)
        part = _repeat(one, steps)
        total = part if total is None else total.compose(part)
    assert total is not None
    points = total._pmf_remove.size  # no public name in dp_accounting 0.6.0
    return float(total.get_epsilon_for_delta(delta)), int(points)


def _repeat(one: Any, steps: int) -> Any:
    """`one` composed with itself; dp_accounting 0.6.0 takes seconds for `points ** steps` where both are large."""
    blocks, rest = divmod(steps, 1000)
    if not blocks:
        return one.self_compose(rest)
    whole = one.self_compose(1000).self_compose(blocks)
    return whole.compose(one.self_compose(rest)) if rest else whole
