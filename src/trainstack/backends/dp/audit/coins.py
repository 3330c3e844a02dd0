"""The canary audit: can it be told from the updates which canaries were trained on, and how well?

Every canary is in the data by the toss of a coin. An adversary who sees all updates ranks the canaries by the
likelihood ratio of the stated mechanism and calls the first r of them trained on, for few r that are fixed beforehand.
How many of those calls are right bounds epsilon from below. Canaries of several runs count as those of one, since no
run sees the canaries of another.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.dp.accounting import epsilon_of
from trainstack.backends.dp.audit.canary import Observed, train_canaries
from trainstack.backends.dp.audit.findings import Finding
from trainstack.backends.dp.audit.one_run import epsilon_at_least, guess_p_value, largest
from trainstack.backends.dp.audit.profile import EPSILONS, privacy_profile
from trainstack.backends.dp.audit.subject import Subject
from trainstack.backends.dp.audit.tradeoff import less_likely, tradeoff_p_value

PROBE = "canaries"
SHARES = (0.01, 0.03, 0.1)
"""Of the canaries that are called trained on: three tries, each of which gets a third of the significance."""

SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBounds:
    """What the canary audit proves.

    Attributes:
        findings: for and against the epsilon that was stated.
        claimed: that epsilon.
        one_run: epsilon is at least this, with 95 % confidence, whatever the mechanism.
        tradeoff: epsilon is at least this if the mechanism is as stated, but for its noise.
    """

    findings: list[Finding]
    claimed: float
    one_run: float
    tradeoff: float


def canary_audit(subject: Subject, runs: int) -> CanaryBounds:
    """Train `runs` times on secretly chosen canaries, guess, and bound epsilon."""
    scores, coins = [], []
    for _ in range(runs):
        toss = torch.tensor([secrets.randbits(1) for _ in range(subject.dataset_size)], dtype=torch.bool)
        seen = train_canaries(subject, toss)
        scores.append(likelihood_ratios(seen, subject))
        coins.append(seen.included)
    history = seen.statement.history
    return judge_guesses(torch.cat(scores), torch.cat(coins), history[0], subject.args.delta, subject.args.accountant)


def likelihood_ratios(seen: Observed, subject: Subject) -> Tensor:
    """For each canary the logarithm of: how likely are its updates if it was trained on, over if it was not?"""
    q, sigma = torch.tensor(subject.rate, dtype=torch.float64), subject.gradient_noise(seen.noise_multiplier)
    present = q.log() + (2 * seen.updates - 1) / (2 * sigma**2)
    return torch.logaddexp((1 - q).log(), present).sum(0)


def judge_guesses(
    scores: Tensor, coins: Tensor, mechanism: tuple[float, float, int], delta: float, accountant: str
) -> CanaryBounds:
    """Call the canaries with the highest scores trained on, and see what follows from how many are.

    Args:
        scores: float, one a canary.
        coins: bool, whether it was trained on.
        mechanism: (sigma, q, steps) as stated.
        delta, accountant: as stated.
    """
    canaries, tries = len(scores), len(SHARES)
    ranked = coins[torch.argsort(scores, descending=True)]
    outcomes = [(guesses, int(ranked[:guesses].sum())) for guesses in (math.ceil(canaries * s) for s in SHARES)]
    claimed = epsilon_of([mechanism], delta, accountant)
    told = ", ".join(f"{right} of {guesses}" for guesses, right in outcomes) + " guesses right"

    stated = privacy_profile(*mechanism)
    as_claimed = min(guess_p_value(claimed, delta, canaries=canaries, guesses=g, right=v) for g, v in outcomes)
    as_stated = min(tradeoff_p_value(stated, canaries=canaries, guesses=g, right=v) for g, v in outcomes)

    def excluded(profile: Any) -> bool:
        most = SIGNIFICANCE / tries
        return any(less_likely(profile, most, canaries=canaries, guesses=g, right=v) for g, v in outcomes)

    return CanaryBounds(
        findings=[
            _finding(f"guesses are as bad as epsilon {claimed:.4g} makes them", told, min(1.0, tries * as_claimed)),
            _finding("guesses are as bad as the stated noise makes them", told, min(1.0, tries * as_stated)),
        ],
        claimed=claimed,
        one_run=max(
            epsilon_at_least(delta, canaries=canaries, guesses=g, right=v, significance=SIGNIFICANCE / tries)
            for g, v in outcomes
        ),
        tradeoff=_epsilon_by_tradeoff(excluded, mechanism, delta),
    )


def _epsilon_by_tradeoff(excluded: Callable[[Any], bool], mechanism: tuple[float, float, int], delta: float) -> float:
    """epsilon of the largest noise, with sampling and steps as stated, under which such guesses are implausible."""
    sigma, rate, steps = mechanism
    quietest = -math.log(min(sigma, max(sigma / 8, 0.2)))

    def profile_of(logarithm: float) -> Any:
        return privacy_profile(math.exp(-logarithm), rate, steps)

    found = largest(lambda logarithm: excluded(profile_of(logarithm)), -math.log(8 * sigma), quietest, bisections=9)
    profile = profile_of(found)
    if not excluded(profile):
        return 0.0
    return float(EPSILONS[profile > delta].max(initial=0.0))


def _finding(claim: str, seen: str, p_value: float) -> Finding:
    return Finding(probe=PROBE, claim=claim, seen=seen, p_value=p_value)
