"""Lower bounds on epsilon from guesses about the training data.

For every canary the toss of a coin decides whether it is in the data. An adversary who sees all updates ranks the
canaries by the likelihood ratio of the stated mechanism, and guesses that the first r of them were trained on, for few
r that are fixed beforehand. The number of right guesses bounds epsilon from below. Canaries of several runs count as
those of one, because no run sees the canaries of another.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from trainstack.auditing.canaries import AuditedRun, Observation, train_canaries
from trainstack.auditing.report import Finding
from trainstack.backends.dp.accounting import epsilon_of

# A fair coin decided for each canary whether it was trained on. An adversary who sees the outcome of an (epsilon,
# delta)-private training and guesses r of m coins is right v times or more with a probability of at most
# `guess_p_value`: Steinke, Nasr and Jagielski: Privacy Auditing with One (1) Training Run (2023), theorem 5.2.


def guess_p_value(epsilon: float, delta: float, *, canaries: int, guesses: int, right: int) -> float:
    """An upper bound of the probability of `right` or more right guesses under (epsilon, delta)-privacy.

    Args:
        epsilon, delta: of adding or removing one record.
        canaries: m, of which some were not guessed.
        guesses: r, fixed beforehand.
        right: v.
    """
    chance = float(special.expit(epsilon))
    p_value = float(stats.binom.sf(right - 1, guesses, chance))
    if delta and right:
        nearly = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
        p_value += 2 * canaries * delta * float((nearly / np.arange(1, right + 1)).max())
    return min(1.0, p_value)


def epsilon_at_least(delta: float, *, canaries: int, guesses: int, right: int, significance: float = 0.05) -> float:
    """The largest epsilon that the number of right guesses excludes, with confidence `1 - significance`; 0 if none."""

    def excluded(epsilon: float) -> bool:
        return guess_p_value(epsilon, delta, canaries=canaries, guesses=guesses, right=right) < significance

    return largest(excluded, 0.0, 30.0)  # r guesses, all right, exclude about log(r / 3)


def largest(excluded: Callable[[float], bool], low: float, high: float, bisections: int = 40) -> float:
    """The largest number for which `excluded` is True, if it is True for all smaller ones; `low` if for none."""
    if not excluded(low):
        return low
    for _ in range(bisections):
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


# The privacy loss of one step, between a record's presence and its absence, is put on a grid and convolved with itself.
# All rounding goes up, so that each delta is an upper bound (Koskela, Jalkoe, Honkela 2020; Meiser, Mohammadi 2018).
_CELLS = 1 << 14
_GRID = 1 << 18
_REACH = 9.0
"""Standard deviations of noise on the grid: the probability of more is less than 1e-18."""

_LOST = 1e-12
"""A bound of the probability outside of the grid."""

EPSILONS = np.concatenate([np.linspace(0, 4, 81), np.linspace(4.1, 20, 160)])
"""The values of epsilon of a profile."""


@functools.lru_cache(maxsize=256)
def privacy_profile(sigma: float, rate: float, steps: int) -> Any:
    """delta at each of `EPSILONS` after `steps` steps, the larger one of adding and of removing one record."""
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
    reach = min(steps * width, np.sqrt(60 * steps * variance) + 20 * width)  # Bernstein: less than 1e-12 is outside
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


# Let R_i be the share of canaries that are guessed right in outcomes with i or more right guesses, and W_i the share
# that is guessed wrong. For a mechanism that is f-private in each canary, R_{i+1} <= 1 - f(W_i). So few right guesses
# must be about as likely as many, and the recursion from v downwards bounds the probability of v. Mahloujifar, Melis
# and Chaudhuri: Auditing f-Differential Privacy in One Run (2024, arXiv 2410.22235).
_GROWTH = np.exp(EPSILONS)


def tradeoff_p_value(profile: Any, *, canaries: int, guesses: int, right: int) -> float:
    """An upper bound of the probability of `right` or more right guesses for a mechanism with this privacy profile.

    Args:
        profile: delta at each of `EPSILONS`, an upper bound, for both directions.
        canaries, guesses, right: as in `guess_p_value`.
    """
    low, high = math.log(1e-30), 0.0

    def below(logarithm: float) -> bool:
        return less_likely(profile, math.exp(logarithm), canaries=canaries, guesses=guesses, right=right)

    if not below(high):
        return 1.0
    if below(low):
        return math.exp(low)
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return math.exp(high)


def less_likely(profile: Any, probability: float, *, canaries: int, guesses: int, right: int) -> bool:
    """Whether `right` or more right guesses are less likely than `probability`: otherwise all outcomes would exceed
    1."""
    share = probability / canaries
    hit, missed = share * right, share * (guesses - right)
    offset = 1 - profile - _GROWTH
    for right_now in range(right - 1, -1, -1):
        least = max(0.0, float(((hit - profile) / _GROWTH).max()), float((offset + _GROWTH * hit).max()))
        if least > missed:
            hit += right_now / (guesses - right_now) * (least - missed)
            missed = least
        if hit + missed > guesses / canaries:
            return True
    return False


SHARES = (0.01, 0.03, 0.1)
"""The shares of canaries to guess: three tries, each of which gets a third of the significance."""

SIGNIFICANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBounds:
    """The result of the canary audit.

    Attributes:
        findings: for and against the stated epsilon.
        claimed: the stated epsilon.
        one_run: epsilon is at least this, with 95 % confidence, for any mechanism.
        tradeoff: epsilon is at least this if the mechanism is as stated, except for its noise.
    """

    findings: list[Finding]
    claimed: float
    one_run: float
    tradeoff: float


def canary_audit(subject: AuditedRun, runs: int) -> CanaryBounds:
    """Train `runs` times on secretly chosen canaries, guess, and bound epsilon."""
    scores, coins = [], []
    for _ in range(runs):
        toss = torch.tensor([secrets.randbits(1) for _ in range(subject.dataset_size)], dtype=torch.bool)
        seen = train_canaries(subject, toss)
        scores.append(likelihood_ratios(seen, subject))
        coins.append(seen.included)
    history = seen.statement.history
    return judge_guesses(torch.cat(scores), torch.cat(coins), history[0], subject.args.delta, subject.args.accountant)


def likelihood_ratios(seen: Observation, subject: AuditedRun) -> Tensor:
    """For each canary the logarithm of the likelihood of its updates if it was trained on, over that if it was not."""
    q, sigma = torch.tensor(subject.rate, dtype=torch.float64), subject.gradient_noise(seen.noise_multiplier)
    present = q.log() + (2 * seen.updates - 1) / (2 * sigma**2)
    return torch.logaddexp((1 - q).log(), present).sum(0)


def judge_guesses(
    scores: Tensor, coins: Tensor, mechanism: tuple[float, float, int], delta: float, accountant: str
) -> CanaryBounds:
    """Guess that the canaries with the highest scores were trained on, and bound epsilon by the number of right
    guesses.

    Args:
        scores: float, one for each canary.
        coins: bool, whether it was trained on.
        mechanism: (sigma, q, steps) as stated.
        delta, accountant: as stated.
    """
    canaries, tries = len(scores), len(SHARES)
    ranked = coins[torch.argsort(scores, descending=True)]
    outcomes = [(guesses, int(ranked[:guesses].sum())) for guesses in (math.ceil(canaries * s) for s in SHARES)]
    claimed = epsilon_of([mechanism], delta, accountant)
    seen = ", ".join(f"{right} of {guesses}" for guesses, right in outcomes) + " guesses right"

    stated = privacy_profile(*mechanism)
    as_claimed = min(guess_p_value(claimed, delta, canaries=canaries, guesses=g, right=v) for g, v in outcomes)
    as_stated = min(tradeoff_p_value(stated, canaries=canaries, guesses=g, right=v) for g, v in outcomes)

    def excluded(profile: Any) -> bool:
        most = SIGNIFICANCE / tries
        return any(less_likely(profile, most, canaries=canaries, guesses=g, right=v) for g, v in outcomes)

    return CanaryBounds(
        findings=[
            Finding(
                probe="canaries", claim=f"guesses are as bad as {what}", seen=seen, p_value=min(1.0, tries * p_value)
            )
            for what, p_value in (
                (f"epsilon {claimed:.4g} makes them", as_claimed),
                ("the stated noise makes them", as_stated),
            )
        ],
        claimed=claimed,
        one_run=max(
            epsilon_at_least(delta, canaries=canaries, guesses=g, right=v, significance=SIGNIFICANCE / tries)
            for g, v in outcomes
        ),
        tradeoff=_epsilon_by_tradeoff(excluded, mechanism, delta),
    )


def _epsilon_by_tradeoff(excluded: Callable[[Any], bool], mechanism: tuple[float, float, int], delta: float) -> float:
    """epsilon of the largest noise, with sampling and steps as stated, for which such guesses are implausible."""
    sigma, rate, steps = mechanism
    quietest = -math.log(min(sigma, max(sigma / 8, 0.2)))

    def profile_of(logarithm: float) -> Any:
        return privacy_profile(math.exp(-logarithm), rate, steps)

    found = largest(lambda logarithm: excluded(profile_of(logarithm)), -math.log(8 * sigma), quietest, bisections=9)
    profile = profile_of(found)
    if not excluded(profile):
        return 0.0
    return float(EPSILONS[profile > delta].max(initial=0.0))
