"""Schedules and the length of a run: how far each will have counted at its end, and which are too short for it."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.run_state import RunState
from trainstack.trainer.schedulers.schedules import Schedules


def counts_at_end(schedules: Schedules, plan: TrainingPlan, state: RunState) -> list[int | None]:
    """What each scheduler will have counted to when the run that stands at `state` is over; None if unknown."""
    per_epoch = plan.steps_per_epoch
    epochs: int | None = plan.epochs - state.epoch
    steps = None if per_epoch is None else (plan.epochs - state.epoch) * per_epoch - state.steps_in_epoch
    if plan.max_steps is not None:
        steps = plan.max_steps - state.global_step
        epochs = plan.max_steps // per_epoch - state.epoch if per_epoch else None
    return schedules.counts_after(steps, epochs)


def why_too_short(scheduler: Any, count: int, planned: int) -> str | None:
    """What is wrong with a schedule that is stepped until it has counted to `count`; None if nothing is known to be.

    Rates that merely stay where they are above zero are fine. The last update is made with the rate at `count - 1`.

    Args:
        scheduler: of torch.
        count: of its steps, at the end of the longer run.
        planned: likewise, of the run as it was planned; who has planned to go beyond a cosine means to swing.
    """
    # torch 2.13.0: there is no public way to the parts of these two schedulers.
    if isinstance(scheduler, SequentialLR):
        start = scheduler._milestones[-1]
        if count <= start:
            return None
        return why_too_short(scheduler._schedulers[-1], count - start, planned - start)
    if isinstance(scheduler, ChainedScheduler):
        found = (why_too_short(part, count, planned) for part in scheduler._schedulers)
        return next((what for what in found if what is not None), None)
    if isinstance(scheduler, OneCycleLR) and count > scheduler.total_steps:
        return f"it ends after {scheduler.total_steps} of its steps, and torch refuses to make more"
    if isinstance(scheduler, CosineAnnealingLR) and planned <= scheduler.T_max < count:
        return f"after T_max={scheduler.T_max} of its steps the rate would rise again"
    if _is_zero(scheduler, count - 1):
        return "it ends before, and the rate of the last update would be 0"
    return None


def _is_zero(scheduler: Any, step: int) -> bool:
    """Whether every rate is 0 after `step` steps, where that can be computed."""
    if isinstance(scheduler, PolynomialLR) or (isinstance(scheduler, LinearLR) and scheduler.end_factor == 0):
        return step >= scheduler.total_iters
    return isinstance(scheduler, LambdaLR) and all(function(step) == 0 for function in scheduler.lr_lambdas)
