"""Conversion between steps, noise and epsilon.

Everything here is for one mechanism: each step adds Gaussian noise of `sigma` times the clipping norm to the sum over a
Poisson sample, which contains each record with probability `q`, independently of all others and of all other steps.
Neighbouring data sets differ by one record added or removed. Every epsilon is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from trainstack.backends.dp.epsilon import NO_NOISE, Entry, clt_epsilon, gaussian_epsilon, prv_epsilon, rdp_epsilon
from trainstack.errors import ConfigurationError

ACCOUNTANTS = ("prv", "rdp", "pld")
LARGEST_ERROR = 0.01
"""The error bound that prv adds to its result, unless a small target needs a smaller one."""

_LARGEST_SIGMA = 1e6


def merge_steps(history: Iterable[Sequence[float]]) -> list[Entry]:
    """`history` with the steps of equal sigma and q added up, in the order of their first appearance, checked.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    total: dict[tuple[float, float], int] = {}
    for sigma, q, steps in history:
        check_mechanism(float(sigma), float(q), steps)
        key = (float(sigma), float(q))
        total[key] = total.get(key, 0) + int(steps)
    return [(sigma, q, steps) for (sigma, q), steps in total.items()]


def epsilon_of(
    history: Iterable[Sequence[float]], delta: float, accountant: str = "prv", *, eps_error: float = LARGEST_ERROR
) -> float:
    """An upper bound of epsilon at `delta` after all steps of `history`.

    Args:
        history: (sigma, q, steps) each; steps of the same kind may stand in several entries.
        delta: above 0, below 1.
        accountant: `"rdp"` gives the bound of Renyi accounting; `"prv"` the smaller of that and of opacus' privacy loss
            distributions; `"pld"` the smaller of that and of dp_accounting's, which needs `trainstack[pld]`.
        eps_error: by how much prv's bound may lie above the truth.

    Returns:
        0 without steps; inf if a step had no noise, or less than `NO_NOISE`.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    check_delta(delta)
    _check_accountant(accountant)
    spent = [entry for entry in merge_steps(history) if entry[1] > 0 and entry[2] > 0]
    if not spent:
        return 0.0
    if any(sigma < NO_NOISE for sigma, _, _ in spent):
        return math.inf
    if accountant != "rdp" and all(q == 1 for _, q, _ in spent):
        return gaussian_epsilon(math.sqrt(sum(steps / sigma**2 for sigma, _, steps in spent)), delta)
    rdp = rdp_epsilon(spent, delta)
    if accountant == "rdp":
        return rdp
    if accountant == "pld":
        from trainstack.backends.dp.loss_distributions import pld_epsilon

        return min(rdp, pld_epsilon(spent, delta, rdp))
    return min(rdp, prv_epsilon(spent, delta, eps_error, rdp))


def delta_of(
    epsilon: float, history: Iterable[Sequence[float]], accountant: str = "prv", *, eps_error: float = LARGEST_ERROR
) -> float:
    """An upper bound of delta at `epsilon`: the smallest, to 0.1 %, at which `epsilon_of` stays within `epsilon`.

    Returns:
        1.0 where nothing below one half will do, and 1e-30 where less would do.
    """
    history = merge_steps(history)
    low, high = math.log(1e-30), math.log(0.5)
    if epsilon_of(history, math.exp(high), accountant, eps_error=eps_error) > epsilon:
        return 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if epsilon_of(history, math.exp(middle), accountant, eps_error=eps_error) > epsilon:
            low = middle
        else:
            high = middle
    return math.exp(high)


def calibrate_noise(target_epsilon: float, delta: float, q: float, steps: int, accountant: str = "prv") -> float:
    """The noise multiplier with which `steps` steps stay within `target_epsilon`, nearly the smallest.

    It is a multiple of 20 over a power of two, found by bisection until less than `eps_error_for` of the budget is
    left. Where Renyi accounting alone decides, or is far above the target, or where even the central limit (which
    reports too little) exceeds a target below 0.1, the slow accountant is not asked.

    Raises:
        ConfigurationError: a number is out of its range, or no noise up to a million is enough.
    """
    check_target("target_epsilon", target_epsilon)
    check_delta(delta)
    check_mechanism(1.0, q, steps)
    _check_accountant(accountant)
    if steps == 0 or q == 0:
        raise ConfigurationError(f"steps={steps}, q={q}: nothing is spent, so no noise can be calibrated. Write more.")
    tolerance = eps_error_for(target_epsilon)

    def spent(sigma: float) -> float:
        rough = epsilon_of([(sigma, q, steps)], delta, "rdp")
        if accountant == "rdp" or rough <= target_epsilon - tolerance or rough > 3 * target_epsilon + 5:
            return rough
        # Below 0.1 Renyi accounting no longer tells a wrong noise from a right one, and prv takes seconds each time.
        if target_epsilon < 0.1 and (least := clt_epsilon(sigma, q, steps, delta)) > target_epsilon:
            return least
        return epsilon_of([(sigma, q, steps)], delta, accountant, eps_error=tolerance)

    sigma = _smallest_sigma(spent, target_epsilon, tolerance)
    reached = epsilon_of([(sigma, q, steps)], delta, accountant, eps_error=tolerance)
    assert reached <= target_epsilon, f"noise {sigma} gives epsilon {reached}, not at most {target_epsilon}"
    return sigma


def _smallest_sigma(spent: Callable[[float], float], target: float, tolerance: float) -> float:
    """Bisect for the sigma at which `spent`, which falls, comes to within `tolerance` below `target`."""
    low, high = 0.0, 20.0
    while (reached := spent(high)) > target:
        low, high = high, 2 * high
        if high > _LARGEST_SIGMA:
            raise ConfigurationError(
                f"target_epsilon={target}: no noise multiplier up to {_LARGEST_SIGMA:.0f} is enough. Write a larger "
                "target_epsilon, a smaller batch, or fewer epochs."
            )
    while target - reached > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        if (value := spent(middle)) <= target:
            high, reached = middle, value
        else:
            low = middle
    return high


def steps_within(
    max_epsilon: float,
    history: Iterable[Sequence[float]],
    sigma: float,
    q: float,
    delta: float,
    accountant: str = "prv",
    *,
    at_most: int = 2**40,
) -> int:
    """The number of steps of (sigma, q) that may follow `history` before epsilon exceeds `max_epsilon`.

    The largest T with `epsilon_of(history + T steps) <= max_epsilon`, by doubling from the number that Renyi accounting
    allows and by bisection; `at_most` if all of those fit, which is checked first.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    check_target("max_epsilon", max_epsilon)
    check_mechanism(sigma, q, at_most)
    before = merge_steps(history)

    def fits(steps: int, kind: str = accountant) -> bool:
        entries = [*before, (sigma, q, steps)]
        return epsilon_of(entries, delta, kind, eps_error=eps_error_for(max_epsilon)) <= max_epsilon

    if fits(at_most, "rdp") or fits(at_most):
        return at_most
    if not fits(1):
        return 0
    surely = _last(lambda steps: fits(steps, "rdp"), 1, at_most) if fits(1, "rdp") else 1
    return surely if accountant == "rdp" else _last(fits, surely, at_most)


def _last(fits: Callable[[int], bool], low: int, limit: int) -> int:
    """The largest number below `limit` for which `fits` holds; it holds for `low`, not for `limit`."""
    width = max(1, low // 8)
    while low + width < limit and fits(low + width):
        low, width = low + width, 2 * width
    high = min(low + width, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def eps_error_for(target: float | None) -> float:
    """prv's error for a run that has a target: 2 % of it, 0.01 at most; below 0.01 up to 10 %, which takes seconds."""
    return LARGEST_ERROR if target is None else min(LARGEST_ERROR, max(target / 50, min(target / 10, 2e-4)))


def check_mechanism(sigma: float, q: float, steps: float) -> None:
    """Refuse numbers that describe no mechanism.

    Raises:
        ConfigurationError: naming the number.
    """
    if not (sigma >= 0 and math.isfinite(sigma)):
        raise ConfigurationError(f"noise_multiplier={sigma!r}: write a number, 0 or more; 0 means no privacy.")
    if not 0 <= q <= 1:
        raise ConfigurationError(
            f"sample_rate={q!r}: it is the probability that a record is in a step. Write batch size / data set size, "
            "a number between 0 and 1."
        )
    if steps < 0 or steps != int(steps):
        raise ConfigurationError(f"steps={steps!r}: write a whole number, 0 or more.")


def check_delta(delta: float) -> None:
    """Refuse a delta that is not between 0 and 1.

    Raises:
        ConfigurationError: it is not.
    """
    if not 0 < delta < 1:
        raise ConfigurationError(
            f"delta={delta!r}: write a number between 0 and 1, smaller than 1 / (number of records); 1e-5 is usual for "
            "tens of thousands of records."
        )


def check_target(name: str, epsilon: float) -> None:
    """Refuse a budget that is not a finite number above 0.

    Raises:
        ConfigurationError: it is not.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigurationError(f"{name}={epsilon!r}: write a number above 0, such as 3.0; less is more private.")


def _check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        why = " It reports too little, so it is not offered." if accountant == "gdp" else ""
        raise ConfigurationError(f"accountant={accountant!r}:{why} Write 'prv', 'rdp' or 'pld'.")
