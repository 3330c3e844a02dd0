"""Advice on a batch that is too small for its noise."""

from __future__ import annotations

import math

from trainstack.backends.dp.arguments import PrivacyPlan
from trainstack.backends.dp.epsilon import NO_NOISE, rdp_epsilon

LEAST_RATIO = 1.0
"""Below it, the noise of a step is longer than the mean of clipped gradients can be."""
_SMALLEST_SIGMA = 0.05
"""Below it, the central limit leaves the range of floats, and epsilon is above 100 in any case."""
_MOST_CHECKS = 5


def signal_to_noise(batch: float, noise_multiplier: float, parameters: int) -> float:
    """`batch / (noise_multiplier * sqrt(parameters))`.

    The mean of clipped gradients is at most C long. The noise in it has the standard deviation `noise_multiplier * C /
    batch` in each of the `parameters`, and so a length of about `noise_multiplier * C * sqrt(parameters) / batch`.
    Their ratio does not depend on C.
    """
    return batch / (noise_multiplier * math.sqrt(parameters))


def advice_rows(plan: PrivacyPlan, parameters: int) -> list[tuple[str, str]]:
    """Rows of the printed plan: the ratio, and a larger batch where it is below `LEAST_RATIO`.

    Args:
        plan: noise, batch and steps of the run.
        parameters: the number of trained numbers.

    Returns:
        Label and text; empty where nothing is trained or the run has no noise.
    """
    batch, sigma = plan.expected_batch_size, plan.noise_multiplier
    if sigma < NO_NOISE or not parameters:
        return []
    ratio = signal_to_noise(batch, sigma, parameters)
    text = (
        f"{ratio:.2g} = batch {batch} / (noise multiplier {sigma:.4g} * sqrt({parameters:,} trained parameters)): the "
        "longest possible mean gradient over the length of its noise"
    )
    if ratio < LEAST_RATIO and sigma >= _SMALLEST_SIGMA:
        text += "\n" + _advice(plan, parameters)
    return [("signal to noise", text)]


def larger_batch(plan: PrivacyPlan, parameters: int) -> tuple[int, float]:
    """The smallest batch whose ratio is `LEAST_RATIO` at the same epsilon and epochs, and its noise multiplier.

    It is found with the central limit of privacy accounting (Bu et al. 2020, arXiv 1911.11607), which costs
    microseconds, and rounded up to two digits. Its noise is then checked by Renyi accounting, against that of `plan`.

    Returns:
        The number of records and the noise that they allow, where no batch is large enough.
    """

    def reaches(batch: int) -> bool:
        return signal_to_noise(batch, _noise_by_central_limit(plan, batch), parameters) >= LEAST_RATIO

    low, high = plan.expected_batch_size, plan.dataset_size
    if reaches(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
    digit = 10 ** max(0, int(math.log10(high)) - 1)
    batch = min(-(-high // digit) * digit, plan.dataset_size)
    return batch, _checked_noise(plan, batch)


def _advice(plan: PrivacyPlan, parameters: int) -> str:
    batch, sigma = larger_batch(plan, parameters)
    ratio = signal_to_noise(batch, sigma, parameters)
    begin = f"below {LEAST_RATIO:g}, the noise is longer than the gradient: "
    page = 'See "Batch size, clipping, learning rate" in docs/privacy.md.'
    if ratio < 0.95 * LEAST_RATIO:
        larger = (
            f"all {plan.dataset_size} records in each step would give {ratio:.2g} at the same epsilon and epochs. "
            if plan.expected_batch_size < plan.dataset_size
            else "the batch has all records already. "
        )
        return f"{begin}{larger}Train fewer parameters, or start from pretrained weights. {page}"
    return (
        f"{begin}train_batch_size={batch} gives {ratio:.2g} at the same epsilon and epochs, with noise multiplier "
        f"{sigma:.4g}. {page}"
    )


def _steps(plan: PrivacyPlan, batch: int) -> int:
    """Steps of as many epochs with another batch."""
    return math.ceil(plan.planned_steps * plan.expected_batch_size / batch)


def _noise_by_central_limit(plan: PrivacyPlan, batch: int) -> float:
    """The noise multiplier at which `q * sqrt(steps * (exp(1 / sigma^2) - 1))` is that of `plan`."""
    spent = plan.planned_steps * plan.sample_rate**2 * math.expm1(plan.noise_multiplier**-2)
    return 1 / math.sqrt(math.log1p(spent / (_steps(plan, batch) * (batch / plan.dataset_size) ** 2)))


def _checked_noise(plan: PrivacyPlan, batch: int) -> float:
    """The noise by the central limit, raised by 1 % at a time until Renyi accounting agrees; each look takes 30 ms."""
    sigma, q, steps = _noise_by_central_limit(plan, batch), batch / plan.dataset_size, _steps(plan, batch)
    allowed = rdp_epsilon([(plan.noise_multiplier, plan.sample_rate, plan.planned_steps)], plan.delta)
    for _ in range(_MOST_CHECKS):
        if rdp_epsilon([(sigma, q, steps)], plan.delta) <= allowed:
            break
        sigma *= 1.01
    return sigma
