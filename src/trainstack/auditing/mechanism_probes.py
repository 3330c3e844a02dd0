"""Statistical tests of the noise, the sampling and the clipping of private steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import optimize, special, stats
from torch import Tensor

from trainstack.auditing.canaries import AuditedRun, train_canaries
from trainstack.auditing.report import Finding, largest_of_normal, most_unlikely_count, two_sided


def noise_probe(subject: AuditedRun) -> list[Finding]:
    """Train twice without any canary, so that the updates are noise and nothing else, and judge it."""
    nobody = subject.all_included.logical_not()
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
    yield _noise_finding(
        "its standard deviation is as stated",
        f"{(total / z.size) ** 0.5:.4f} times that",
        two_sided(stats.chi2.cdf(total, z.size), stats.chi2.sf(total, z.size)),
    )
    distance = stats.kstest(z.ravel(), "norm", method="asymp")
    yield _noise_finding(
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
    return _noise_finding(claim, seen, largest_of_normal(z))


def _noise_finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe="noise", claim=claim, seen=seen, p_value=p_value)


def sampling_probe(subject: AuditedRun) -> list[Finding]:
    """Train twice without noise on all records as canaries, so that the updates are the masks, and judge those."""
    silent = subject.without_noise()
    first, second = (train_canaries(silent, silent.all_included).updates for _ in range(2))
    return [judge_influence(first), *judge_masks(first > 0.5, second > 0.5, subject.rate)]


def judge_influence(updates: Tensor) -> Finding:
    """No record may add more than the clipping norm; `updates` are in its units, shape `(steps, records)`."""
    largest = float(updates.abs().max())
    bounded = largest <= 1 + 1e-3  # rounding
    return _sampling_finding(
        "no record adds more than the clipping norm", f"{largest:.4g} times that at most", float(bounded)
    )


def judge_masks(first: Tensor, second: Tensor, rate: float) -> Iterator[Finding]:
    """Test two runs' masks, bool of shape `(steps, records)`, against independent coins of probability `rate`."""
    mask, other = first.double().numpy(), second.double().numpy()
    steps, records = mask.shape
    count, p_value = most_unlikely_count(mask.sum(), mask.size, rate)
    yield _sampling_finding(
        "a record is in a step with the probability stated",
        f"{count / mask.size:.5g} where {rate:.5g} is stated",
        p_value,
    )
    if rate == 1:
        return  # all records in all steps; nothing else is left to chance
    yield _spread("batch sizes vary as coins make them", mask.sum(1), records, rate)
    yield _spread("records take part as often as coins make them", mask.sum(0), steps, rate)
    if steps > 1:
        yield _shared("each step is drawn anew", (mask @ mask.T)[np.triu_indices(steps, 1)], records, rate)
    pairs = (mask[:, : records - 1 : 2] * mask[:, 1::2]).sum()
    yield _shared("each record is drawn alone", pairs, steps * (records // 2), rate)
    yield _shared("each run is drawn anew", mask @ other.T, records, rate)


def _spread(claim: str, counts: Any, trials: int, rate: float) -> Finding:
    """Whether counts, each binomial, are as far from their mean as they should be: Chernoff's bound on the squares."""
    values = np.arange(trials + 1)
    chances, squares = stats.binom.logpmf(values, trials, rate), (values - trials * rate) ** 2
    variance = trials * rate * (1 - rate)
    total = float(((counts - trials * rate) ** 2).sum())

    def log_bound(slope: float) -> float:
        exponent = slope / variance
        return float(len(counts) * special.logsumexp(chances + exponent * squares) - exponent * total)

    sides = [optimize.minimize_scalar(log_bound, bounds=b, method="bounded").fun for b in ((0, 50), (-50, 0))]
    return _sampling_finding(
        claim, f"variance {total / (len(counts) * variance):.3g} times that", 2 * math.exp(min(0.0, *sides))
    )


def _shared(claim: str, counts: Any, trials: int, rate: float) -> Finding:
    """Whether both of two coins fell as often as coins do that know nothing of each other."""
    count, p_value = most_unlikely_count(counts, trials, rate**2)
    return _sampling_finding(claim, f"{count} in common where {trials * rate**2:.1f} are expected", p_value)


def _sampling_finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe="sampling", claim=claim, seen=seen, p_value=min(1.0, p_value))
