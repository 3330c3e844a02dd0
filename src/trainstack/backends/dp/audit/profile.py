"""The privacy profile of Poisson-sampled Gaussian steps: delta as a function of epsilon, computed without opacus.

One step's privacy loss, between a record's presence and its absence, is put on a grid and convolved with itself. All
rounding goes up, so that each delta is an upper bound (Koskela, Jalkoe, Honkela 2020; Meiser, Mohammadi 2018).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from scipy import stats

_CELLS = 1 << 14
_GRID = 1 << 18
_REACH = 9.0
"""Standard deviations of noise that are told apart: less than 1e-18 lies beyond."""

_LOST = 1e-12
"""More than falls outside of the grid."""

EPSILONS = np.concatenate([np.linspace(0, 4, 81), np.linspace(4.1, 20, 160)])
"""At which profiles are computed."""


@functools.lru_cache(maxsize=256)
def privacy_profile(sigma: float, rate: float, steps: int) -> Any:
    """delta at each of `EPSILONS` after `steps` steps, for adding and for removing one record, whichever is more."""
    x = np.linspace(-_REACH * sigma, 1 + _REACH * sigma, _CELLS + 1)
    with np.errstate(divide="ignore"):  # the logarithm of 0 is right where every record is in every step
        loss = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / (2 * sigma**2))
    without = np.diff(stats.norm.cdf(x / sigma))
    present = (1 - rate) * without + rate * np.diff(stats.norm.cdf((x - 1) / sigma))
    removed = _composed_delta(loss[1:], present, steps)
    added = _composed_delta(-loss[:-1], without, steps)
    return np.maximum(removed, added)


def _composed_delta(loss: Any, mass: Any, steps: int) -> Any:
    """delta at `EPSILONS`, from one step's privacy losses and their probabilities."""
    width = float(np.ptp(loss))
    mean = float(mass @ loss)
    variance = float(mass @ (loss - mean) ** 2)
    reach = min(steps * width, np.sqrt(60 * steps * variance) + 20 * width)  # Bernstein: beyond lies less than 1e-12
    unit = max(2 * (reach + width) / _GRID, 1e-9)
    low = float(loss.min())
    grid = np.bincount(np.ceil((loss - low) / unit).astype(int), weights=mass, minlength=_GRID)
    spectrum = np.fft.rfft(grid) ** steps
    total = np.maximum(np.fft.irfft(spectrum, n=_GRID), 0.0)
    first_place = round(steps * (mean - low) / unit) - _GRID // 2  # the grid is a circle: unroll it around the mean
    summed = steps * low + (first_place + np.arange(_GRID)) * unit
    total = np.roll(total, -first_place)
    tail = np.append(np.cumsum(total[::-1])[::-1], 0.0)
    weighted = np.append(np.cumsum((total * np.exp(-np.maximum(summed, -50)))[::-1])[::-1], 0.0)
    first = np.searchsorted(summed, EPSILONS, side="right")
    return np.clip(tail[first] - np.exp(EPSILONS) * weighted[first], 0.0, 1.0) + _LOST
