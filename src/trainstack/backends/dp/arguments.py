"""`DifferentialPrivacyArguments`, the options of private training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainstack._keywords import SuggestsNames
from trainstack.backends.dp.accounting import (
    ACCOUNTANTS,
    calibrate_noise,
    check_delta,
    check_mechanism,
    check_target,
    eps_error_for,
)
from trainstack.errors import ConfigurationError

_CHOICES: dict[str, tuple[str, ...]] = {
    "clipping": ("flat", "per_layer", "automatic", "adaptive"),
    "grad_mode": ("auto", "bookkeeping", "vmap", "hooks", "ghost", "loop"),
    "accountant": ACCOUNTANTS,
    "on_unsafe": ("error", "report"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacyArguments(metaclass=SuggestsNames):
    """How a private run clips, how much noise it adds, and what it may spend. All of it is public.

    Attributes:
        delta: the probability with which the guarantee may fail; must be given, smaller than 1 / (number of records).
        noise_multiplier: sigma, the noise's standard deviation over the clipping norm. Give this or `target_epsilon`.
        target_epsilon: the noise is calibrated so that all planned steps together stay within it.
        max_epsilon: training stops before the step that would exceed it; by default `target_epsilon`, and without one,
            never.
        per_sample_max_grad_norm: C, to which the gradient of each record is clipped. A sequence gives one number a
            layer and needs `clipping="per_layer"`.
        sample_rate: derived as batch size / number of records. PyMarlin's name; refused where it says something else.
        clipping: `"flat"` clips the whole gradient; `"per_layer"` each layer's; `"automatic"` divides by the norm
            instead; `"adaptive"` moves C towards `target_quantile` of the norms, which costs noise, not epsilon.
        target_quantile: of `"adaptive"`: the share of records that are not to be clipped.
        clip_learning_rate: of `"adaptive"`: how fast C follows, per step, in its logarithm.
        count_noise_multiplier: of `"adaptive"`: the noise on the count of unclipped records, in records; by default a
            twentieth of the batch. Must be more than half of `noise_multiplier`.
        grad_mode: how gradients of single records are computed; `"auto"` takes the fastest that is exact.
        accountant: `"prv"`, the tighter one; `"rdp"`, the quicker one; or `"pld"`, dp_accounting's, the
            tightest for many steps at a tiny rate, which takes seconds and needs `trainstack[pld]`.
        dataset_size: N, the number of records that may be published, not below the true one: steps, rate and delta go
            by it, and nothing that a run writes has another. By default the true one, which is then public.
        secure: draw every mask and all noise from the operating system's entropy, which is slower.
        on_unsafe: `"error"` refuses what voids the guarantee; `"report"` goes on, and the statement says NOT PRIVATE.
        debug_seed: makes sampling and noise reproducible, and thereby the run NOT PRIVATE.
        log_train_loss: False keeps the training loss, which is not protected, out of logs and history.
        allow_plan_change: go on from a checkpoint with another noise, rate or delta, with both parts accounted for.

    Raises:
        ConfigurationError: a value is wrong, or two contradict each other.
    """

    ALIASES: ClassVar = {
        "epsilon": "target_epsilon",
        "target_delta": "delta",
        "max_grad_norm": "per_sample_max_grad_norm",
        "max_per_sample_grad_norm": "per_sample_max_grad_norm",
        "l2_norm_clip": "per_sample_max_grad_norm",
        "sigma": "noise_multiplier",
        "grad_sample_mode": "grad_mode",
        "secure_mode": "secure",
        "sample_size": "dataset_size",
        "expected_batch_size": "TrainerArguments(train_batch_size=...)",
        "max_physical_batch_size": "TrainerArguments(gpu_batch_size_limit=...)",
        "epochs": "TrainerArguments(epochs=...)",
    }

    delta: float = math.nan
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    per_sample_max_grad_norm: float | Sequence[float] = 1.0
    sample_rate: float | None = None
    clipping: str = "flat"
    target_quantile: float = 0.5
    clip_learning_rate: float = 0.2
    count_noise_multiplier: float | None = None
    grad_mode: str = "auto"
    accountant: str = "prv"
    dataset_size: int | None = None
    secure: bool = False
    on_unsafe: str = "error"
    debug_seed: int | None = None
    log_train_loss: bool = True
    allow_plan_change: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_budget(self)
        _check_clipping(self)

    @property
    def budget(self) -> float | None:
        """The epsilon that the run may not exceed; None without one."""
        return self.target_epsilon if self.max_epsilon is None else self.max_epsilon


def _check_choices(args: DifferentialPrivacyArguments) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            why = "it reports too little. " if value == "gdp" else ""
            raise ConfigurationError(f"{name}={value!r}: {why}Write one of {', '.join(map(repr, choices))}.")
    for name in ("secure", "log_train_loss", "allow_plan_change"):
        if not isinstance(getattr(args, name), bool):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write True or False.")
    for name, least in (("dataset_size", 1), ("debug_seed", 0)):
        value = getattr(args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigurationError(f"{name}={value!r}: write a whole number, {least} or more, or None.")
    if args.secure and args.debug_seed is not None:
        raise ConfigurationError(
            f"secure=True and debug_seed={args.debug_seed}: a seed makes the noise known. Leave one of them out."
        )
    numbers = ("delta", "noise_multiplier", "target_epsilon", "max_epsilon", "sample_rate")
    for name in (*numbers, "target_quantile", "clip_learning_rate", "count_noise_multiplier"):
        value = getattr(args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigurationError(f"{name}={value!r}: write a number.")


def _check_budget(args: DifferentialPrivacyArguments) -> None:
    if math.isnan(args.delta):
        raise ConfigurationError(
            "delta is missing: it is the probability with which the guarantee may fail. Choose it smaller than "
            "1 / (number of records), for example delta=1e-5 for 60,000 records."
        )
    check_delta(args.delta)
    if (args.noise_multiplier is None) == (args.target_epsilon is None):
        given = f"noise_multiplier={args.noise_multiplier} and target_epsilon={args.target_epsilon}"
        raise ConfigurationError(
            f"{given}: exactly one of the two decides the noise. Write target_epsilon=3.0 to have it calibrated, or "
            "noise_multiplier=1.0 to set it yourself."
        )
    for name in ("target_epsilon", "max_epsilon"):
        if getattr(args, name) is not None:
            check_target(name, getattr(args, name))
    check_mechanism(args.noise_multiplier or 0.0, 0.0 if args.sample_rate is None else args.sample_rate, 0)
    if args.noise_multiplier == 0 and args.max_epsilon is not None:
        raise ConfigurationError(
            f"noise_multiplier=0 and max_epsilon={args.max_epsilon}: without noise epsilon is infinite from the first "
            "step. Write a noise_multiplier above 0, or leave max_epsilon out."
        )


def _check_clipping(args: DifferentialPrivacyArguments) -> None:
    norms = args.per_sample_max_grad_norm
    several = isinstance(norms, Sequence) and not isinstance(norms, str)
    for norm in norms if several else (norms,):  # type: ignore[union-attr]
        if isinstance(norm, bool) or not isinstance(norm, int | float) or not (norm > 0 and math.isfinite(norm)):
            raise ConfigurationError(
                f"per_sample_max_grad_norm={norms!r}: write a number above 0, or one for each layer: what a single "
                "record may add is what the noise has to hide."
            )
    if several and (args.clipping != "per_layer" or not norms):
        raise ConfigurationError(
            f"per_sample_max_grad_norm={norms!r} with clipping={args.clipping!r}: several norms are one for each "
            "layer. Write clipping='per_layer', or one number."
        )
    if not 0 < args.target_quantile < 1:
        raise ConfigurationError(f"target_quantile={args.target_quantile!r}: write a number between 0 and 1.")
    if not (args.clip_learning_rate > 0 and math.isfinite(args.clip_learning_rate)):
        raise ConfigurationError(f"clip_learning_rate={args.clip_learning_rate!r}: write a number above 0.")
    counted = args.count_noise_multiplier
    if counted is None:
        return
    if args.clipping != "adaptive":
        raise ConfigurationError(
            f"count_noise_multiplier={counted!r} with clipping={args.clipping!r}: only adaptive clipping counts. "
            "Leave it out, or write clipping='adaptive'."
        )
    if not (math.isfinite(counted) and 2 * counted > (args.noise_multiplier or 0.0)):
        raise ConfigurationError(
            f"count_noise_multiplier={counted!r}: write a number above half of the noise multiplier, since the count "
            "would otherwise spend more than the whole step may."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """One step's mechanism, and how many of them are planned.

    Attributes:
        noise_multiplier: sigma.
        sample_rate: q, the probability with which each record is in a step.
        delta: of the guarantee.
        accountant: `"prv"`, `"rdp"` or `"pld"`.
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
        power = 10.0 ** math.floor(math.log10(0.5 / records))
        usual = float(f"{math.floor(0.5 / records / power) * power:.0e}")  # half of it with one digit, rounded down
        raise ConfigurationError(
            f"delta={delta} with {records} records: a mechanism that publishes each record with probability delta "
            f"would pass. Write less than 1/{records} = {1 / records:.2g}, for example {usual}."
        )
