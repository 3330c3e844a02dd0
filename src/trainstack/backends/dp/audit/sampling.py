"""The sampling probe: is each record in a step by a coin of its own, and does it count once, up to the clipping norm?

It looks at runs without noise, in which every record is a canary: their updates are the masks themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from trainstack.backends.dp.audit.canary import train_canaries
from trainstack.backends.dp.audit.findings import Finding, of_normal, strongest_correlation, two_sided
from trainstack.backends.dp.audit.subject import Subject

PROBE = "sampling"

TOLERANCE = 1e-3
"""By how much more than the clipping norm a record may add: rounding."""


def sampling_probe(subject: Subject) -> list[Finding]:
    """Train twice without noise and judge the masks."""
    silent = subject.without_noise()
    first, second = (train_canaries(silent, silent.everybody).updates for _ in range(2))
    return [judge_influence(first), *judge_masks(first > 0.5, second > 0.5, subject.rate)]


def judge_influence(updates: Tensor) -> Finding:
    """No record may add more than the clipping norm; `updates` are in its units, shape `(steps, records)`."""
    largest = float(updates.abs().max())
    bounded = largest <= 1 + TOLERANCE
    return _finding(
        "no record adds more than the clipping norm", f"{largest:.4g} times that at most", float(bounded)
    )


def judge_masks(first: Tensor, second: Tensor, rate: float) -> Iterator[Finding]:
    """Test two runs' masks, bool of shape `(steps, records)`, against independent coins of probability `rate`."""
    mask, other = first.numpy(), second.numpy()
    count, steps, records = int(mask.sum()), *mask.shape
    yield _finding(
        "a record is in a step with the probability stated",
        f"{count / mask.size:.5g} where {rate:.5g} is stated",
        two_sided(stats.binom.cdf(count, mask.size, rate), stats.binom.sf(count - 1, mask.size, rate)),
    )
    if rate == 1:
        return  # all records in all steps; nothing else is left to chance
    variance = rate * (1 - rate)
    sizes = float(((mask.sum(1) - records * rate) ** 2).sum()) / (records * variance)
    yield _finding(
        "batch sizes vary as coins make them",
        f"variance {sizes / steps:.3g} times that",
        two_sided(stats.chi2.cdf(sizes, steps), stats.chi2.sf(sizes, steps)),
    )
    yield _participation(mask, rate)
    z, other = (mask - rate) / math.sqrt(variance), (other - rate) / math.sqrt(variance)
    if steps > 1:
        pairs = (z @ z.T)[np.triu_indices(steps, 1)]
        yield _uncorrelated("each step is drawn anew", pairs, records)
    yield _uncorrelated("each record is drawn alone", (z[:, 1:] * z[:, :-1]).sum(), steps * (records - 1))
    yield _uncorrelated("each run is drawn anew", z @ other.T, records)


def _participation(mask: Any, rate: float) -> Finding:
    """How often each record took part: the sum of squares over records, nearly normal by the moments of a binomial."""
    steps, records = mask.shape
    expected = steps * rate * (1 - rate)
    squares = float(((mask.sum(0) - steps * rate) ** 2).sum())
    spread = math.sqrt(records * (2 * expected**2 + expected * (1 - 6 * rate * (1 - rate))))
    return _finding(
        "records take part as often as coins make them",
        f"variance {squares / (records * expected):.3g} times that",
        of_normal((squares - records * expected) / spread) if spread > 0 else 1.0,
    )


def _uncorrelated(claim: str, products: Any, among: int) -> Finding:
    correlation, p_value = strongest_correlation(products, among)
    return _finding(claim, f"correlation {correlation:+.4f} at most", p_value)


def _finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe=PROBE, claim=claim, seen=seen, p_value=p_value)
