"""`PrivacyPlan`: the constants of a private run, fixed before its first step and none of them read off the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainstack.backends.dp.accounting import calibrate_noise, eps_error_for
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """One step's mechanism, and how many of them are planned.

    Attributes:
        noise_multiplier: sigma.
        sample_rate: q, the probability with which each record is in a step.
        delta: of the guarantee.
        accountant: `"prv"` or `"rdp"`.
        max_epsilon: training stops before it is exceeded; None for never.
        planned_steps: of the whole run.
        expected_batch_size: B, by which the noisy sum is divided.
        dataset_size: N, public.
    """

    noise_multiplier: float
    sample_rate: float
    delta: float
    accountant: str
    max_epsilon: float | None
    planned_steps: int
    expected_batch_size: int
    dataset_size: int

    @property
    def eps_error(self) -> float:
        """What prv's epsilon may lie above the truth."""
        return eps_error_for(self.max_epsilon)


def plan_privacy(
    args: DifferentialPrivacyArguments, *, expected_batch_size: int, dataset_size: int, steps: int
) -> PrivacyPlan:
    """Derive the sampling rate and, for a target epsilon, the noise.

    Args:
        args: what the user wrote.
        expected_batch_size: B, over all processes.
        dataset_size: how many records there are; `args.dataset_size` is used instead where it is given.
        steps: of the whole run.

    Raises:
        ConfigurationError: rate or delta do not fit the number of records, or the target cannot be reached.
    """
    records = dataset_size if args.dataset_size is None else args.dataset_size
    rate = sampling_rate(expected_batch_size, records, args.sample_rate)
    check_delta_for(args.delta, records)
    sigma = args.noise_multiplier
    if sigma is None:
        assert args.target_epsilon is not None  # the arguments hold exactly one of the two
        sigma = calibrate_noise(args.target_epsilon, args.delta, rate, steps, args.accountant)
    return PrivacyPlan(
        noise_multiplier=float(sigma),
        sample_rate=rate,
        delta=float(args.delta),
        accountant=args.accountant,
        max_epsilon=args.budget,
        planned_steps=steps,
        expected_batch_size=expected_batch_size,
        dataset_size=records,
    )


def sampling_rate(batch: int, records: int, given: float | None = None) -> float:
    """The probability with which a record is in a step: `batch / records`.

    Raises:
        ConfigurationError: it would be above 1, or `given` says something else.
    """
    if batch > records:
        raise ConfigurationError(
            f"train_batch_size={batch} with {records} records: a record would be in a step with a probability above 1. "
            f"Write at most {records}."
        )
    rate = batch / records
    if given is not None and not math.isclose(given, rate, rel_tol=1e-6):
        raise ConfigurationError(
            f"sample_rate={given} contradicts train_batch_size={batch} over {records} records, which is {rate:.6g}. "
            "Leave sample_rate out: it is derived."
        )
    return rate


def check_delta_for(delta: float, records: int) -> None:
    """Refuse a delta that lets a mechanism pass which publishes single records.

    Raises:
        ConfigurationError: `delta` is 1 / `records` or more.
    """
    if delta >= 1 / records:
        raise ConfigurationError(
            f"delta={delta} with {records} records: a mechanism that publishes each record with probability delta "
            f"would pass. Write less than 1/{records} = {1 / records:.2g}, for example {_round_down(0.5 / records)}."
        )


def _round_down(value: float) -> float:
    """`value` with one digit, not above it."""
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.floor(value / power) * power:.0e}")
