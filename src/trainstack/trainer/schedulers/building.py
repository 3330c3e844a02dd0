"""Construction of schedulers from names, factories and configurations."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.state import RunState
from trainstack.trainer.schedulers import placeholders, warmup
from trainstack.trainer.schedulers.placeholders import resolve
from trainstack.trainer.schedulers.stepping import SchedulerConfig, Schedules, TimmSchedulerAdapter, is_timm_scheduler


def is_scheduler(value: Any) -> bool:
    """Whether `value` is a scheduler object (not a class) with a `step` method."""
    return callable(getattr(value, "step", None)) and not isinstance(value, type | Optimizer)


def is_scheduler_factory(value: Any) -> bool:
    """Whether `value` is a function, a class or a `functools.partial` that makes a scheduler of an optimizer."""
    return callable(value) and not is_scheduler(value) and not isinstance(value, Optimizer)


def make_schedules(
    returned: Sequence[Any],
    optimizers: Sequence[Optimizer],
    plan: TrainingPlan,
    *,
    saves: bool = False,
    log: RunLogger | None = None,
) -> Schedules:
    """Call the factories, and assign an interval to each scheduler.

    Args:
        returned: schedulers and factories, with or without a `SchedulerConfig`.
        optimizers: optimizers after the backend's layers have wrapped them. With several optimizers, a factory gets the
            one at its own position.
        plan: has the values of placeholders.
        saves: whether the run saves checkpoints, which hold the states of schedulers.
        log: logger for the warning about a schedule whose length is given in epochs.

    Raises:
        ModuleContractError: a factory returns no scheduler of its optimizer, or there is no optimizer for it; or a
            scheduler has no state.
        ConfigurationError: an interval does not suit its scheduler, or a placeholder has no value.
    """
    configs = [value if isinstance(value, SchedulerConfig) else SchedulerConfig(value) for value in returned]
    made = []
    for position, config in enumerate(configs):
        scheduler = config.scheduler
        _check_length(scheduler, plan)
        if is_scheduler_factory(scheduler):
            scheduler = _make(scheduler, position, optimizers, plan)
        if is_timm_scheduler(scheduler):
            scheduler = TimmSchedulerAdapter(scheduler)
        made.append(replace(config, scheduler=scheduler))
        _check_interval(made[-1])
        if saves:
            _check_state(scheduler)
        problem = epochs_for_updates_reason(made[-1], plan) or _one_cycle_reason(made[-1], plan)
        if problem is not None and log is not None:
            log.warning(problem)
    return Schedules(made)


def _check_length(scheduler: Any, plan: TrainingPlan) -> None:
    """Refuse a schedule that was made for None steps, which torch finds in the first step only."""
    name = next((name for kind, name in _LENGTHS.items() if isinstance(scheduler, kind)), None)
    if name is not None and getattr(scheduler, name) is None:
        why = "plan.total_steps is None, because the loader has no length. " if plan.total_steps is None else ""
        raise ConfigurationError(
            f"{type(scheduler).__name__} was made with {name}=None. {why}Set max_steps in TrainerArguments, or give a "
            "number."
        )


def _make(factory: Any, position: int, optimizers: Sequence[Optimizer], plan: TrainingPlan) -> Any:
    if len(optimizers) > 1 and position >= len(optimizers):
        raise ModuleContractError(
            f"scheduler {position} is a factory, and there are {len(optimizers)} optimizers: a factory gets the "
            "optimizer at its own position. Return the scheduler itself."
        )
    optimizer = optimizers[position if len(optimizers) > 1 else 0]
    name = getattr(getattr(factory, "func", factory), "__name__", type(factory).__name__)
    try:
        scheduler = resolve(factory, plan)(optimizer)
    except Exception as error:
        annotate(error, f"raised when {name} was called with the optimizer to make scheduler {position}")
        raise
    if not is_scheduler(scheduler) or getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ModuleContractError(
            f"scheduler {position} is a factory: {name}, called with the optimizer, returned a "
            f"{type(scheduler).__name__}, not a scheduler of that optimizer. Write a function such as "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)."
        )
    return scheduler


def _check_interval(config: SchedulerConfig) -> None:
    scheduler = config.scheduler
    kind = type(scheduler.scheduler if isinstance(scheduler, TimmSchedulerAdapter) else scheduler).__name__
    if isinstance(scheduler, TimmSchedulerAdapter):
        if (config.interval, config.frequency, config.monitor) != (None, 1, None):
            raise ConfigurationError(
                f"{kind} is one of timm's schedulers, which are called after every update and every epoch and decide "
                "when to step. Return it without interval, frequency and monitor."
            )
        if hasattr(scheduler.scheduler, "lr_scheduler"):
            raise ConfigurationError(
                f"timm's {kind} does not save its whole state, so a resumed run would follow another schedule. Write "
                "SchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor='val/loss')."
            )
    elif isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        if config.monitor is None:
            raise ConfigurationError(
                "ReduceLROnPlateau steps on a value at the end of an epoch. Name the value: "
                "SchedulerConfig(scheduler, monitor='val/loss')."
            )
    elif config.monitor is not None and isinstance(scheduler, lr_scheduler.LRScheduler):
        raise ConfigurationError(
            f"SchedulerConfig(monitor={config.monitor!r}): {kind} takes no value when it steps. "
            "Remove monitor, or use ReduceLROnPlateau."
        )


def _check_state(scheduler: Any) -> None:
    scheduler = scheduler.scheduler if isinstance(scheduler, TimmSchedulerAdapter) else scheduler
    lacks = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))]
    if lacks:
        raise ModuleContractError(
            f"{type(scheduler).__name__} has no {' and no '.join(lacks)}, and a checkpoint holds the state of each "
            "scheduler. Define state_dict(self), which returns a dict, and load_state_dict(self, state), or save "
            "nothing: checkpointer_args=DefaultCheckpointerArguments(checkpoint=False)."
        )


def epochs_for_updates_reason(config: SchedulerConfig, plan: TrainingPlan) -> str | None:
    """Return a warning if a scheduler steps after each update but its length is probably given in epochs, else None.

    Its length is then at most the number of epochs, and ends in the first half of the updates.
    """
    total = plan.total_steps
    steps = None if config.per_epoch or total is None else horizon(config.scheduler, total)
    if (
        steps is None
        or total is None
        or steps * config.frequency > plan.epochs
        or 2 * steps * config.frequency >= total
    ):
        return None
    every = "each" if config.frequency == 1 else f"every {config.frequency}th"
    return (
        f"{type(config.scheduler).__name__} was made for {steps} step{'s' if steps != 1 else ''}; it steps once after "
        f"{every} of {total} updates. Use self.plan.total_steps, or SchedulerConfig(scheduler, interval='epoch')."
    )


def _one_cycle_reason(config: SchedulerConfig, plan: TrainingPlan) -> str | None:
    """Return a warning if a `OneCycleLR` ends early in its cycle, or steps past its end; else None."""
    scheduler, planned = config.scheduler, plan.epochs if config.per_epoch else plan.total_steps
    if not isinstance(scheduler, lr_scheduler.OneCycleLR) or not planned:
        return None
    steps, length = planned // config.frequency, scheduler.total_steps
    if 2 * steps > length >= steps:
        return None
    what = "epoch" if config.per_epoch else "update"
    end = "torch refuses to step past its end" if length < steps else "the run ends early in its cycle"
    return (
        f"OneCycleLR was made for {length} steps, and makes {steps}, for {planned} {what}s: {end}. Write "
        "OneCycleLR(..., total_steps=self.plan.total_steps) without interval and frequency, so that it steps after "
        "each update."
    )


def horizon(scheduler: Any, total: int) -> int | None:
    """Return the number of steps for which a scheduler of torch was made; None if it has no such number.

    `total` is the number of steps that it will make. A rate that rises, as in a warm-up, or that hardly falls has no
    such number.
    """
    # torch 2.13.0: these two schedulers have no public access to their parts.
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        start = scheduler._milestones[-1]
        last = horizon(scheduler._schedulers[-1], total - start)
        return None if last is None else start + last
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return max((part for one in scheduler._schedulers if (part := horizon(one, total)) is not None), default=None)
    if isinstance(scheduler, lr_scheduler.StepLR):
        return scheduler.step_size if scheduler.gamma ** (total // scheduler.step_size) < _HARDLY else None
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        return max(scheduler.milestones, default=None)
    if isinstance(scheduler, lr_scheduler.LinearLR):
        return scheduler.total_iters if scheduler.end_factor < scheduler.start_factor else None
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        return max((part for one in scheduler.lr_lambdas if (part := _length_of(one)) is not None), default=None)
    for kind, name in _LENGTHS.items():
        if isinstance(scheduler, kind):
            length: int = getattr(scheduler, name)
            return length
    return None


_HARDLY = 0.01
"""A rate that falls below this fraction of its first value within the run has fallen too fast."""
_LENGTHS: dict[type[Any], str] = {
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.OneCycleLR: "total_steps",
}


def _length_of(function: Any) -> int | None:
    """Return the length with which this library or transformers made a function of `LambdaLR`; None if unknown."""
    keywords = getattr(function, "keywords", {})
    length = getattr(function, "total_steps", keywords.get("num_training_steps"))
    return length if isinstance(length, int) else None


def counts_at_end(schedules: Schedules, plan: TrainingPlan, state: RunState) -> list[int | None]:
    """Return the count of each scheduler at the end of the run whose counters are `state`; None if unknown."""
    per_epoch = plan.steps_per_epoch
    epochs: int | None = plan.epochs - state.epoch
    steps = None if per_epoch is None else (plan.epochs - state.epoch) * per_epoch - state.steps_in_epoch
    if plan.max_steps is not None:
        steps = plan.max_steps - state.global_step
        epochs = plan.max_steps // per_epoch - state.epoch if per_epoch else None
    return schedules.counts_after(steps, epochs)


def short_schedule_reason(scheduler: Any, count: int, planned: int) -> str | None:
    """Return the problem of a schedule that is stepped until it has counted to `count`; None if there is none.

    A rate that stays constant above zero is not a problem. The last update uses the rate at `count - 1`.

    Args:
        scheduler: scheduler of torch.
        count: count of its steps at the end of the longer run.
        planned: count of its steps at the end of the run as first planned. If it already exceeded the half period of a
            cosine, the rise is intended.
    """
    # torch 2.13.0: these two schedulers have no public access to their parts.
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        start = scheduler._milestones[-1]
        if count <= start:
            return None
        return short_schedule_reason(scheduler._schedulers[-1], count - start, planned - start)
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        found = (short_schedule_reason(part, count, planned) for part in scheduler._schedulers)
        return next((what for what in found if what is not None), None)
    if isinstance(scheduler, lr_scheduler.OneCycleLR) and count > scheduler.total_steps:
        return f"it ends after {scheduler.total_steps} of its steps, and torch refuses to make more"
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR) and planned <= scheduler.T_max < count:
        return f"after T_max={scheduler.T_max} of its steps the rate would rise again"
    to_zero = isinstance(scheduler, lr_scheduler.LinearLR) and scheduler.end_factor == 0
    if to_zero or isinstance(scheduler, lr_scheduler.PolynomialLR):
        is_zero = count - 1 >= scheduler.total_iters
    else:
        is_zero = isinstance(scheduler, lr_scheduler.LambdaLR) and not any(f(count - 1) for f in scheduler.lr_lambdas)
    return "it ends before, and the rate of the last update would be 0" if is_zero else None


_WHOLE_RUN: dict[str, Any] = {"total_steps": placeholders.TOTAL_STEPS}
_OVER_WHOLE_RUN = (warmup.warmup_cosine, warmup.warmup_linear, warmup.warmup_stable_decay)
_SHAPES: dict[str, Any] = {"inverse_sqrt": warmup.inverse_sqrt} | {
    shape.__name__: functools.partial(shape, **_WHOLE_RUN) for shape in _OVER_WHOLE_RUN
}


_OPTIONS = {
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "num_warmup_steps", "warmup_iters", "warmup_t"), "warmup"),
    **dict.fromkeys(("num_training_steps", "max_steps", "t_total"), "total_steps"),
    **dict.fromkeys(("min_lr_ratio", "min_ratio"), "final_ratio"),
    **dict.fromkeys(("min_lr", "eta_min"), "final_lr"),
}
"""Options of the schedulers of transformers, timm and others, with those of ours."""


def build_scheduler(name: str, **options: Any) -> functools.partial[Any]:
    """Return a factory for the scheduler `name`; return it from `get_optimizers_schedulers` among the schedulers.

    Args:
        name: "warmup_cosine", "warmup_linear" or "warmup_stable_decay", over all steps of the run unless `total_steps`
            is given; "inverse_sqrt"; or a class of `torch.optim.lr_scheduler` such as "StepLR".
        **options: options of the scheduler; may contain placeholders.

    Raises:
        ConfigurationError: there is no such scheduler, or it has no such option.

    Examples:
        >>> scheduler = ts.build_scheduler(
        ...     "warmup_cosine", warmup=0.1, final_ratio=0.01
        ... )
        >>> module = ts.SupervisedModule(
        ...     nn.Linear(1, 1), nn.MSELoss(), "sgd", data, scheduler=scheduler
        ... )
        >>> ts.Trainer(module, args).train()
    """
    known = {**_SHAPES, **{key: getattr(lr_scheduler, key) for key in lr_scheduler.__all__ if key != "LRScheduler"}}
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(known))}."
        raise ConfigurationError(f"there is no scheduler {name!r}. {hint}")
    names = [one for one in inspect.signature(known[name]).parameters if one != "optimizer"]
    for option in options:
        if option not in names:
            alias = _OPTIONS.get(option)
            hint = f"Write {alias}." if alias in names else f"The options are {', '.join(names)}."
            raise ConfigurationError(f"the scheduler {name!r} has no option {option!r}. {hint}")
    return functools.partial(known[name], **options)
