"""`AuditReport` holds the findings of an audit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

IMPLAUSIBLE = 1e-6
"""A p-value below this is not chance: over all tests of an audit, one audit in many thousands reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one test.

    Attributes:
        probe: the experiment of the test.
        claim: a statement that is true of correct training.
        seen: the measured value, as text.
        p_value: an upper bound of the probability of a value as unlikely as this one, if the claim is true.
    """

    probe: str
    claim: str
    seen: str
    p_value: float

    @property
    def holds(self) -> bool:
        """Whether the p-value is compatible with the claim."""
        return self.p_value >= IMPLAUSIBLE


def two_sided(below: float, above: float) -> float:
    """The p-value of a statistic, from the probabilities of values up to it (`below`) and from it on (`above`)."""
    return float(min(1.0, 2 * min(below, above)))


def largest_of_normal(z: Any) -> float:
    """The p-value of the largest magnitude among several standard normal numbers, by Bonferroni."""
    return min(1.0, np.size(z) * 2 * float(stats.norm.sf(np.abs(z).max())))


def most_unlikely_count(counts: Any, trials: int, probability: float) -> tuple[int, float]:
    """The most unlikely of several binomial counts, and its p-value by Bonferroni."""
    counts = np.ravel(counts)
    law = stats.binom(trials, probability)
    tails = np.minimum(law.cdf(counts), law.sf(counts - 1))
    place = int(tails.argmin())
    return int(counts[place]), min(1.0, 2 * counts.size * float(tails[place]))


NO_PROOF = (
    "An audit can show that privacy is broken, not that it holds: it tests only these experiments, for the "
    "records that they use."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit, as `.text` and `.to_json()`.

    Attributes:
        subject: the audited training, as text.
        findings: of all tests.
        epsilon_claimed, delta: the guarantee that the audited runs state; None if no canaries were guessed.
        epsilon_at_least: a lower bound of epsilon by the guesses, with 95 % confidence, for any mechanism.
        epsilon_at_least_tradeoff: a sharper bound if the mechanism is as stated, except for the size of its noise.
    """

    subject: str
    findings: tuple[Finding, ...]
    epsilon_claimed: float | None = None
    delta: float | None = None
    epsilon_at_least: float | None = None
    epsilon_at_least_tradeoff: float | None = None

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that cannot be chance."""
        return tuple(finding for finding in self.findings if not finding.holds)

    @property
    def verdict(self) -> str:
        """`"nothing found"`, or `"BROKEN: ..."` with the claims that do not hold."""
        if not self.broken:
            return "nothing found"
        return "BROKEN: not so: " + "; ".join(f"{f.claim} ({f.probe}: {f.seen})" for f in self.broken)

    @property
    def text(self) -> str:
        """The report as a table, with the verdict below."""
        rows = [("probe", "claim", "seen", "p-value", "")]
        rows += [(f.probe, f.claim, f.seen, f"{f.p_value:.2g}", "" if f.holds else "BROKEN") for f in self.findings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"audit of {self.subject}", *table, *self._bounds(), self.verdict, NO_PROOF])

    def _bounds(self) -> list[str]:
        claimed, single, tradeoff = self.epsilon_claimed, self.epsilon_at_least, self.epsilon_at_least_tradeoff
        if claimed is None or single is None or tradeoff is None:
            return []
        line = (
            f"epsilon is stated as {claimed:.4g} at delta {self.delta:.2g}; the guesses prove (95 %) that it is at "
            f"least {single:.3g}, or {tradeoff:.3g} if the mechanism is as stated but for its noise"
        )
        if self.broken or max(single, tradeoff) <= claimed:
            return [line]
        return [
            line,
            "that is more than is stated, which chance does in one correct audit of ten at most: audit again, and "
            "believe it if it happens again",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**dataclasses.asdict(self), "verdict": self.verdict, "note": NO_PROOF}

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)
