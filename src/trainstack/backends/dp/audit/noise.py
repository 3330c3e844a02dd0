"""The noise probe: is the noise normal, of the size that was stated, and new in every step and every run?

It looks at runs without any canary, whose updates are noise and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from trainstack.backends.dp.audit.canary import train_canaries
from trainstack.backends.dp.audit.findings import Finding, largest_of_normal, two_sided
from trainstack.backends.dp.audit.subject import Subject

PROBE = "noise"


def noise_probe(subject: Subject) -> list[Finding]:
    """Train twice on nothing and judge the noise."""
    nobody = subject.everybody.logical_not()
    first, second = (train_canaries(subject, nobody) for _ in range(2))
    sigma = subject.gradient_noise(first.noise_multiplier)
    return list(judge_noise(first.updates / sigma, second.updates / sigma))


def judge_noise(first: Tensor, second: Tensor) -> Iterator[Finding]:
    """Test two runs' updates of shape `(steps, weights)`, divided by their standard deviation as stated.

    Chi-square on the variance, Kolmogorov and Smirnov on the distribution, and correlations: between any two steps,
    between neighbouring weights, and with any step of the other run.
    """
    z, other = first.numpy(), second.numpy()
    total = float((z**2).sum())
    yield _finding(
        "its standard deviation is as stated",
        f"{(total / z.size) ** 0.5:.4f} times that",
        two_sided(stats.chi2.cdf(total, z.size), stats.chi2.sf(total, z.size)),
    )
    distance = stats.kstest(z.ravel(), "norm", method="asymp")
    yield _finding(
        "it is normally distributed", f"distribution off by {distance.statistic:.4f}", float(distance.pvalue)
    )
    steps, weights = z.shape
    if steps > 1:
        yield _unrelated("it is new in every step", projections(z, z)[np.triu_indices(steps, 1)], weights)
    even, odd = z[:, : weights - 1 : 2].reshape(1, -1), z[:, 1::2].reshape(1, -1)
    yield _unrelated("it is new for every weight", projections(even, odd), odd.size)
    yield _unrelated("it is new in every run", projections(z, other), weights)


def projections(left: Any, right: Any) -> Any:
    """Each row of `left` along the direction of each of `right`: standard normal if that has nothing to do with it."""
    lengths = np.maximum(np.linalg.norm(right, axis=1), np.finfo(np.float64).tiny)
    return left @ (right / lengths[:, None]).T


def _unrelated(claim: str, z: Any, among: int) -> Finding:
    seen = f"correlation {np.abs(z).max() / among**0.5:.4f} at most"
    return _finding(claim, seen, largest_of_normal(z))


def _finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe=PROBE, claim=claim, seen=seen, p_value=p_value)
