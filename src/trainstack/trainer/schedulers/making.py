"""From what `get_optimizers_schedulers` returned to schedulers that can be stepped: factories are called here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.trainer.placeholders import resolve
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.schedulers.config import SchedulerConfig
from trainstack.trainer.schedulers.schedules import Schedules
from trainstack.trainer.schedulers.timm import TimmSchedulerAdapter, is_timm_scheduler


def is_scheduler(value: Any) -> bool:
    """Whether `value` is a made scheduler: an object, no class, that can be stepped."""
    return callable(getattr(value, "step", None)) and not isinstance(value, type | Optimizer)


def is_scheduler_factory(value: Any) -> bool:
    """Whether `value` makes a scheduler of an optimizer: a function, a class or a `functools.partial`."""
    return callable(value) and not is_scheduler(value) and not isinstance(value, Optimizer)


def make_schedules(returned: Sequence[Any], optimizers: Sequence[Optimizer], plan: TrainingPlan) -> Schedules:
    """Make what is still to be made, and put each scheduler in its rhythm.

    Args:
        returned: schedulers and factories, bare or in a `SchedulerConfig`.
        optimizers: as the backend's layers left them. Where there are several, a factory gets the one at its own
            position.
        plan: gives placeholders their values.

    Raises:
        ModuleContractError: a factory makes no scheduler of its optimizer, or has none.
        ConfigurationError: a rhythm does not suit its scheduler, or a placeholder has no value.
    """
    configs = [value if isinstance(value, SchedulerConfig) else SchedulerConfig(value) for value in returned]
    made = []
    for position, config in enumerate(configs):
        scheduler = config.scheduler
        if is_scheduler_factory(scheduler):
            scheduler = _make(scheduler, position, optimizers, plan)
        if is_timm_scheduler(scheduler):
            scheduler = TimmSchedulerAdapter(scheduler)
        made.append(replace(config, scheduler=scheduler))
        _check_rhythm(made[-1])
    return Schedules(made)


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
            f"scheduler {position} is a factory: {name}, called with the optimizer, gave a {type(scheduler).__name__} "
            "and no scheduler of that optimizer. Give a function such as "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)."
        )
    return scheduler


def _check_rhythm(config: SchedulerConfig) -> None:
    scheduler = config.scheduler
    if isinstance(scheduler, TimmSchedulerAdapter):
        _check_timm(config, type(scheduler.scheduler).__name__)
    elif isinstance(scheduler, ReduceLROnPlateau):
        if config.monitor is None:
            raise ConfigurationError(
                "ReduceLROnPlateau steps on a value at an epoch's end. Say which: "
                "SchedulerConfig(scheduler, monitor='val/loss')."
            )
    elif config.monitor is not None and isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"SchedulerConfig(monitor={config.monitor!r}): {type(scheduler).__name__} takes no value when it steps. "
            "Leave monitor out, or use ReduceLROnPlateau."
        )


def _check_timm(config: SchedulerConfig, kind: str) -> None:
    if (config.interval, config.frequency, config.monitor) != (None, 1, None):
        raise ConfigurationError(
            f"{kind} is one of timm's schedulers, which are told of every update and every epoch and choose "
            "themselves. Return it without interval, frequency and monitor."
        )
    if hasattr(config.scheduler.scheduler, "lr_scheduler"):
        raise ConfigurationError(
            f"timm's {kind} does not keep its whole state, so a resumed run would follow another schedule. Write "
            "SchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor='val/loss')."
        )
