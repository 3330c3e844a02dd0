"""Statistical tests of the noise, the sampling and the clipping of private steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

from trainstack.auditing.canaries import AuditedRun, Observation, count_noise, train_canaries
from trainstack.auditing.report import Finding, largest_of_normal, most_unlikely_count, two_sided
from trainstack.backends.dp.arguments import plan_privacy


def noise_probe(subject: AuditedRun) -> list[Finding]:
    """Train twice without any canary, so that the updates are only noise, and test the noise and the account."""
    nobody = subject.all_included.logical_not()
    first, second = (train_canaries(subject, nobody) for _ in range(2))
    sigma = subject.gradient_noise(first.noise_multiplier)
    scaled = [[table.flatten(1) / sigma for table in seen.tables] for seen in (first, second)]
    return [*judge_noise(*scaled), *judge_account(first)]


def judge_noise(first: Sequence[Tensor], second: Sequence[Tensor]) -> Iterator[Finding]:
    """Test two runs' updates of each parameter, divided by their stated standard deviation.

    The tests are: chi-square on the variance, over all and of each parameter; Kolmogorov-Smirnov on the distribution;
    and correlations between any two steps, between neighbouring weights, between parameters at all displacements, and
    with any step of the other run.

    Args:
        first, second: for each parameter a tensor of shape `(steps, weights)`.
    """
    parts = [part.numpy() for part in first]
    z, other = np.concatenate(parts, axis=1), np.concatenate([part.numpy() for part in second], axis=1)
    yield _noise_finding("its standard deviation is as stated", f"{_deviation(z):.4f} times that", _variance_p_value(z))
    by_part = [_variance_p_value(part) for part in parts]
    worst = int(np.argmin(by_part))
    yield _noise_finding(
        "so is that of each parameter",
        f"{_deviation(parts[worst]):.4f} times that in parameter {worst + 1} of {len(parts)}",
        min(1.0, len(parts) * by_part[worst]),
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
    if len(parts) > 1:
        crossed = np.concatenate([displaced(parts[i], parts[j]).ravel() for i, j in _pairs(len(parts))])
        yield _noise_finding(
            "it is new for every parameter",
            f"{np.abs(crossed).max():.2f} standard deviations at most",
            largest_of_normal(crossed),
        )
    yield _unrelated("it is new in every run", projections(z, other), weights)


def _deviation(z: Any) -> float:
    return float((z**2).mean() ** 0.5)


def _variance_p_value(z: Any) -> float:
    total = float((z**2).sum())
    return two_sided(stats.chi2.cdf(total, z.size), stats.chi2.sf(total, z.size))


def _pairs(parts: int, most: int = 8) -> Iterator[tuple[int, int]]:
    """All pairs of a few parameters; of more than `most`, each with the previous and with the first."""
    for i in range(1, parts):
        yield from ((j, i) for j in range(i) if parts <= most or j in (0, i - 1))


def displaced(left: Any, right: Any) -> Any:
    """Scalar products of each row of `left` with that of `right`, at all displacements of one against the other.

    Each is divided by the norm of the matching part of the longer one, so that it is standard normal if the shorter one
    is independent of that part. Displacements at which less than half of the shorter one overlaps the longer one are
    omitted.
    """
    if left.shape[1] > right.shape[1]:
        left, right = right, left
    short, long = left.shape[1], right.shape[1]
    margin = short // 2
    padded = np.pad(right, ((0, 0), (margin, margin)))
    size = 1 << (padded.shape[1] + short).bit_length()
    places = long + 2 * margin - short + 1

    def correlate(values: Any, window: Any) -> Any:
        spectrum = np.fft.rfft(values, size) * np.conj(np.fft.rfft(window, size))
        return np.fft.irfft(spectrum, size)[:, :places]

    sums = np.cumsum(np.pad(padded**2, ((0, 0), (1, 0))), axis=1)
    energy = sums[:, short:] - sums[:, :-short]
    return correlate(padded, left) / np.sqrt(np.maximum(energy, np.finfo(np.float64).tiny))


def judge_account(seen: Observation) -> Iterator[Finding]:
    """Test that every update is in the statement, and that all processes get the same updates."""
    stated = seen.statement.steps
    yield Finding(
        probe="account",
        claim="every update is in the statement",
        seen=f"{seen.steps} updates, {stated} steps stated",
        p_value=float(stated == seen.steps),
    )
    if (seen.statement.world_size or 1) > 1:
        yield Finding(
            probe="account",
            claim="all processes get the same updates",
            seen="the same" if seen.equal_on_ranks else "other ones",
            p_value=float(seen.equal_on_ranks),
        )


_COUNTED, _COUNTS = 100, 40


def count_probe(subject: AuditedRun) -> list[Finding]:
    """Recover the noise on the count of unclipped records from the norms that adaptive clipping states.

    All records are in each step and longer than the limit, so that the count is known. Empty for other clipping.
    """
    args = subject.args
    if args.clipping != "adaptive":
        return []
    epochs, rate = _COUNTS, 0.2
    small = replace(subject, dataset_size=_COUNTED, train_batch_size=_COUNTED, epochs=epochs)
    small = replace(small, args=replace(args, clip_learning_rate=rate, **_known_noise(subject)))
    seen = train_canaries(small, small.all_included, shortest=8.0)
    moved = np.diff(np.log(np.array(seen.limits)))
    counted = _COUNTED * (
        args.target_quantile - moved / rate
    )  # log(C) moves by -rate * (share of unclipped - quantile)
    z = counted / count_noise(args, _COUNTED, seen.noise_multiplier)
    pairs = projections(z[None, :-1:2], z[None, 1::2])
    return [
        _noise_finding("that of the count is as stated", f"{_deviation(z):.4f} times that", _variance_p_value(z)),
        _unrelated("the count's is new in every step", pairs, z.size // 2),
    ]


def _known_noise(subject: AuditedRun) -> dict[str, Any]:
    """The noise of the audited run. A target epsilon would give another one at another rate."""
    args = subject.args
    if args.noise_multiplier is not None:
        return {"noise_multiplier": args.noise_multiplier}
    plan = plan_privacy(
        subject.own_args,
        expected_batch_size=subject.train_batch_size,
        dataset_size=subject.dataset_size,
        steps=subject.steps,
    )
    return {"noise_multiplier": plan.noise_multiplier, "target_epsilon": None, "max_epsilon": None}


def projections(left: Any, right: Any) -> Any:
    """Each row of `left` along the direction of each row of `right`: standard normal if they are independent."""
    lengths = np.maximum(np.linalg.norm(right, axis=1), np.finfo(np.float64).tiny)
    return left @ (right / lengths[:, None]).T


def _unrelated(claim: str, z: Any, among: int) -> Finding:
    seen = f"correlation {np.abs(z).max() / among**0.5:.4f} at most"
    return _noise_finding(claim, seen, largest_of_normal(z))


def _noise_finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe="noise", claim=claim, seen=seen, p_value=p_value)


def sampling_probe(subject: AuditedRun) -> list[Finding]:
    """Train twice without noise on all records as canaries, so that the updates show the masks, and test those."""
    silent = subject.without_noise()
    first, second = (train_canaries(silent, silent.all_included).lengths for _ in range(2))
    # A canary of length C may be shorter than a grown C. The record of another step adds exactly nothing.
    return [judge_influence(torch.cat([first, second])), *judge_masks(first > 1e-6, second > 1e-6, subject.rate)]


def judge_influence(lengths: Tensor) -> Finding:
    """Test that no record adds more than the clipping norm; `lengths` in its units, of shape `(steps, records)`."""
    largest = float(lengths.max())
    bounded = largest <= 1 + 1e-3  # 1e-3 for rounding
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
        return  # all records are in all steps, so there is no randomness to test
    yield _spread("batch sizes vary as coins make them", mask.sum(1), records, rate)
    yield _spread("records take part as often as coins make them", mask.sum(0), steps, rate)
    if steps > 1:
        yield _shared("each step is drawn separately", (mask @ mask.T)[np.triu_indices(steps, 1)], records, rate)
    pairs = (mask[:, : records - 1 : 2] * mask[:, 1::2]).sum()
    yield _shared("each record is drawn alone", pairs, steps * (records // 2), rate)
    yield _shared("each run is drawn separately", mask @ other.T, records, rate)


def _spread(claim: str, counts: Any, trials: int, rate: float) -> Finding:
    """Test whether binomial counts are as far from their mean as expected, by Chernoff's bound on the squares."""
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
    """Test whether two coins fell equally as often as independent coins do."""
    count, p_value = most_unlikely_count(counts, trials, rate**2)
    expected, pairs = trials * rate**2, np.size(counts)
    of = f", the {'most' if count > expected else 'fewest'} of {pairs} pairs" if pairs > 1 else ""
    return _sampling_finding(claim, f"{count} in common where {expected:.1f} are expected{of}", p_value)


def _sampling_finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe="sampling", claim=claim, seen=seen, p_value=min(1.0, p_value))
