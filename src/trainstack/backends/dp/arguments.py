"""`DifferentialPrivacyArguments`, the options of private training."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from trainstack._keywords import SuggestsNames, explain_frozen
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

SMALLEST_LIMIT = 1e-9
"""Clipping norm down to which the norms of gradients have all digits: float32 has no squares of numbers below 1e-19."""


@explain_frozen
@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacyArguments(metaclass=SuggestsNames):
    """The clipping, the noise and the budget of a private run. All of it is public.

    Attributes:
        delta: the probability with which the guarantee may fail; must be given, smaller than 1 / (number of records).
        noise_multiplier: sigma, the noise's standard deviation over the clipping norm. Give this or `target_epsilon`.
        target_epsilon: the noise is calibrated so that all planned steps together stay within it.
        max_epsilon: training stops before the step that would exceed it; by default `target_epsilon`, and without one,
            never.
        per_sample_max_grad_norm: C, at least 1e-9: the gradient of each record is clipped to it. A sequence gives one
            number a layer and needs `clipping="per_layer"`.
        sample_rate: derived as batch size / number of records. PyMarlin's name; refused where it says something else.
        clipping: `"flat"` clips the whole gradient; `"per_layer"` each layer's; `"automatic"` divides by the norm
            instead; `"adaptive"` moves C towards `target_quantile` of the norms, which costs noise, not epsilon.
        target_quantile: of `"adaptive"`: the share of records that are not to be clipped.
        clip_learning_rate: of `"adaptive"`: how fast C follows, per step, in its logarithm.
        count_noise_multiplier: of `"adaptive"`: the noise on the count of unclipped records, in records; by default a
            twentieth of the batch. Must be more than half of `noise_multiplier`.
        grad_mode: the computation of the gradients of single records; `"auto"` takes the fastest exact one.
        accountant: `"prv"`, the tighter one; `"rdp"`, the quicker one; or `"pld"`, dp_accounting's, the tightest for
            many steps at a tiny rate, which takes seconds and needs `trainstack[pld]`.
        dataset_size: N, the number of records that may be published, not below the true one: steps, rate and delta go
            by it, and nothing that a run writes has another. By default the true one, which is then public.
        secure: draw every mask and all noise from the operating system's entropy, which is slower.
        on_unsafe: `"error"` refuses a run without a guarantee; with `"report"` it continues as NOT PRIVATE.
        debug_seed: makes sampling and noise reproducible. The run is then NOT PRIVATE.
        expose_records: give hooks and events the batches, outputs and losses of training, which makes the run NOT
            PRIVATE.
        telemetry: metrics of the training to release with noise, each with its public range: `{"loss": (0, 10)}` for
            the loss of a record, `{"accuracy": (0, 1)}` for a key of the outputs, with one value for each record.
            `{"grad_norm": (0.1, 1.0, 10.0)}` gives thresholds instead, and releases the shares of records whose
            gradient norm is at most each of them, and an estimate of the median. They are recorded as `train/loss`,
            `train/accuracy` and so on, and epsilon covers them. Values outside of a range are clipped to it.
        telemetry_weight: a: each telemetry value of a record is a coordinate of its gradient, of length at most a C.
            More of it makes telemetry more precise and the gradient noisier, by a factor sqrt(1 + k a^2) with k
            coordinates.
        public_validation: validation and test data are public, or hold no record whose privacy matters. Metrics on them
            are then covered, and may decide about schedules, early stopping and the best checkpoint.
        log_train_loss: True records the training loss and all values that user code logs. No noise protects
            these values, and epsilon does not cover them.
        allow_plan_change: resume from a checkpoint with another noise, rate or delta; both parts are accounted for.
        ledger: the privacy ledger that all runs on the dataset charge: a path, or `scheme://...` of a store that
            `register_ledger_store` knows. Statements then have the sum of all its runs. By default each run has its
            own ledger, in its folder.
        ledger_budget: the epsilon, at `delta`, that all runs of `ledger` together may spend. The ledger keeps it, and
            it binds runs that do not give it.
        dataset_name: of the dataset in `ledger`; a run with another name or number of records is refused.
        init_weights_are_public: the initial weights owe nothing to the training data: those of `init_weights_from`, or
            of a private run before on the same module. Otherwise the steps of a private source count, and a source
            without privacy is refused.

    Raises:
        ConfigurationError: a value is wrong, or two contradict each other.

    Examples:
        >>> privacy = ts.DifferentialPrivacyArguments(target_epsilon=3.0, delta=1e-3)
        >>> private = replace(args, backend="sp-dp", differential_privacy_args=privacy)
        >>> trainer = ts.Trainer(
        ...     ts.SupervisedModule(nn.Linear(1, 1), nn.MSELoss(), "sgd", data), private
        ... )
        >>> trainer.train()
        >>> trainer.privacy_statement().epsilon <= 3.0
        True
    """

    ALIASES: ClassVar[dict[str, str]] = {
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
    expose_records: bool = False
    telemetry: Mapping[str, Sequence[float]] = field(default_factory=dict)
    telemetry_weight: float = 0.1
    public_validation: bool = False
    log_train_loss: bool = False
    allow_plan_change: bool = False
    ledger: str | Path | None = None
    ledger_budget: float | None = None
    dataset_name: str | None = None
    init_weights_are_public: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ledger(self)
        _check_budget(self)
        _check_clipping(self)
        _check_telemetry(self)

    @property
    def budget(self) -> float | None:
        """The epsilon that the run may not exceed; None without one."""
        return self.target_epsilon if self.max_epsilon is None else self.max_epsilon

    def without_ledger(self) -> DifferentialPrivacyArguments:
        """The same for a run whose weights are discarded, such as an audit, which must not charge the dataset."""
        return replace(self, ledger=None, ledger_budget=None, dataset_name=None)


def _check_ledger(args: DifferentialPrivacyArguments) -> None:
    for name in ("ledger_budget", "dataset_name"):
        if getattr(args, name) is not None and args.ledger is None:
            raise ConfigurationError(
                f"{name}={getattr(args, name)!r} without a ledger: it is about all runs on a dataset. Write "
                "ledger='.../privacy-ledger.jsonl', a file that all of them charge."
            )
    if args.ledger is not None and not os.fspath(args.ledger):
        raise ConfigurationError(f"ledger={args.ledger!r} is empty. Write a path.")
    if args.ledger_budget is not None:
        check_target("ledger_budget", args.ledger_budget)


def _check_choices(args: DifferentialPrivacyArguments) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            why = "it reports too little. " if value == "gdp" else ""
            raise ConfigurationError(f"{name}={value!r}: {why}Write one of {', '.join(map(repr, choices))}.")
    switches = ("secure", "log_train_loss", "expose_records", "public_validation", "allow_plan_change")
    for name in (*switches, "init_weights_are_public"):
        if not isinstance(getattr(args, name), bool):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write True or False.")
    for name, least in (("dataset_size", 1), ("debug_seed", 0)):
        value = getattr(args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigurationError(f"{name}={value!r}: write a whole number, {least} or more, or None.")
    if args.secure and args.debug_seed is not None:
        raise ConfigurationError(
            f"secure=True and debug_seed={args.debug_seed}: a seed makes the noise known. Remove one of them."
        )
    numbers = ("delta", "noise_multiplier", "target_epsilon", "max_epsilon", "sample_rate", "telemetry_weight")
    for name in (*numbers, "target_quantile", "clip_learning_rate", "count_noise_multiplier", "ledger_budget"):
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
            "step. Write a noise_multiplier above 0, or remove max_epsilon."
        )


def _check_clipping(args: DifferentialPrivacyArguments) -> None:
    norms = args.per_sample_max_grad_norm
    several = isinstance(norms, Sequence) and not isinstance(norms, str)
    for norm in norms if several else (norms,):  # type: ignore[union-attr]
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if not (is_number and SMALLEST_LIMIT <= norm < math.inf):  # type: ignore[operator]
            raise ConfigurationError(
                f"per_sample_max_grad_norm={norms!r}: write a number above 0, or one for each layer; at least "
                f"{SMALLEST_LIMIT:g}, because float32 loses the squares of tiny gradients. It limits the part of a "
                "single record, which the noise has to hide."
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
            "Remove it, or write clipping='adaptive'."
        )
    if not (math.isfinite(counted) and 2 * counted > (args.noise_multiplier or 0.0)):
        raise ConfigurationError(
            f"count_noise_multiplier={counted!r}: write a number above half of the noise multiplier, since the count "
            "would otherwise spend more than the whole step may."
        )


def _check_telemetry(args: DifferentialPrivacyArguments) -> None:
    if not isinstance(args.telemetry, Mapping):
        raise ConfigurationError(f"telemetry={args.telemetry!r}: write a dict of ranges: {{'loss': (0, 10)}}.")
    for name, values in args.telemetry.items():
        given = f"telemetry={{{name!r}: {values!r}}}"
        if not isinstance(name, str) or not name or name in _NO_TELEMETRY:
            raise ConfigurationError(f"{given}: write 'loss', 'grad_norm' or a key of the outputs of train_step.")
        numbers = list(values) if isinstance(values, Sequence) and not isinstance(values, str) else []
        finite = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
        rising = finite and all(low < high for low, high in pairwise(numbers))
        if name == "grad_norm" and not (rising and numbers and numbers[0] > 0):
            raise ConfigurationError(f"{given}: write rising thresholds above 0, such as (0.1, 1.0, 10.0).")
        if name != "grad_norm" and not (rising and len(numbers) == 2):
            raise ConfigurationError(
                f"{given}: write the lowest and the highest value, such as (0, 10). The range is public, so take it "
                "from knowledge that needs no data."
            )
    if not (args.telemetry_weight > 0 and math.isfinite(args.telemetry_weight)):
        raise ConfigurationError(f"telemetry_weight={args.telemetry_weight!r}: write a number above 0, such as 0.1.")
    if "loss" in args.telemetry and args.log_train_loss:
        raise ConfigurationError(
            "telemetry has 'loss' and log_train_loss=True: both would be 'train/loss', one with noise and one without. "
            "Remove one of them."
        )


_NO_TELEMETRY = ("loss_epoch", "grad_norm_epoch", "skipped_steps")
"""Metrics of the trainer."""


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
        """The error bound of prv's epsilon: the most by which it may exceed the truth."""
        return eps_error_for(self.max_epsilon)


def plan_privacy(
    args: DifferentialPrivacyArguments, *, expected_batch_size: int, dataset_size: int, steps: int
) -> PrivacyPlan:
    """Derive the sampling rate and, for a target epsilon, the noise.

    Args:
        args: the arguments of the user.
        expected_batch_size: B, over all processes.
        dataset_size: the number of records; if `args.dataset_size` is given, it is used instead.
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
            "Remove sample_rate: it is derived."
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
