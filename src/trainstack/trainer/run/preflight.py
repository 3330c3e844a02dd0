"""Checks before a training begins or is extended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainstack.checkpointing import DefaultCheckpointer
from trainstack.errors import ConfigurationError, PrivacyBudgetError
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state import RunState
from trainstack.trainer.module_checks import lacks_method
from trainstack.trainer.schedulers.building import counts_at_end, short_schedule_reason
from trainstack.trainer.schedulers.stepping import Schedules


def check_monitors(context: RunContext, schedules: Schedules) -> None:
    """Refuse metrics of a private training that control it and are computed from records without noise.

    Callbacks check their metrics when the training begins. A private run does not keep the best checkpoint by
    "val/loss" by default.

    Raises:
        PrivacyError: names the metric and the correction.
    """
    history, checkpointer = context.history, context.checkpointer
    schedules.check_monitors(history)
    if context.args.monitor is not None:
        history.require_usable(context.args.monitor, "TrainerArguments.monitor")
    wanted = checkpointer.keeps_best_by
    if wanted is not None and (not isinstance(checkpointer, DefaultCheckpointer) or checkpointer.asks_for_best):
        history.require_usable(wanted[0], "keep_best")


def already_finished_message(context: RunContext, plan: TrainingPlan) -> str:
    """A message for a run that is over: the reason, and the argument that continues it."""
    state = context.state
    if plan.max_steps is not None:
        count, unit, name, planned = state.global_step, "global step", "max_steps", plan.max_steps
    else:
        count, unit, name, planned = state.epoch, "epoch", "epochs", context.args.epochs
    if not state.global_step:
        return f"{name}={planned}: there is nothing to train"
    return (
        f"{count} {unit}{' is' if count == 1 else 's are'} trained already, and {name}={planned}: nothing is left to "
        f"do. To continue, write {name}={count + 1} or more. To start again, write resume=False or another output_dir."
    )


def check_can_train(
    context: RunContext, exhausted_reason: str | None, val_loaders: Callable[[], dict[str, Any]]
) -> None:
    """Refuse to train if no step is allowed, or if the first validation would fail.

    `exhausted_reason` is the reason why no step is allowed, or None. `val_loaders` returns the loaders of the module.

    Raises:
        PrivacyBudgetError: no step is allowed.
        ModuleContractError: there are validation loaders, and no `val_step`.
    """
    module = context.module
    if exhausted_reason is not None:
        raise PrivacyBudgetError(exhausted_reason)
    if (
        context.args.validate_every == 0
        or not lacks_method(module, "val_step", context.val_step)
        or lacks_method(module, "get_val_dataloaders")
    ):
        return
    # an additional call of `get_val_dataloaders`, made only if it can find the mistake
    with isolated_rng(mix(context.state.seed), context.world.device):
        loaders = val_loaders()
    if loaders:
        raise module._lacks("val_step", "get_val_dataloaders")


def check_schedule_lengths(schedules: Schedules, plan: TrainingPlan, state: RunState, args: TrainerArguments) -> None:
    """Refuse to extend the run to the end in `args` if a schedule that was made for `plan` ends before.

    Raises:
        ConfigurationError: a schedule would end before the run does.
    """
    longer = plan.with_end(args.epochs, args.max_steps)
    planned, counts = (counts_at_end(schedules, one, state) for one in (plan, longer))
    for position, scheduler in enumerate(schedules.schedulers):
        before, count = planned[position], counts[position]
        if count is None or before is None or count <= before:
            continue
        reason = short_schedule_reason(scheduler, count, before)
        if reason is not None:
            end = f"epochs={args.epochs}" if args.max_steps is None else f"max_steps={args.max_steps}"
            raise ConfigurationError(
                f"train({end}) makes the run longer than scheduler {position} ({type(scheduler).__name__}) was planned "
                f"for: {reason}. Write {end} in TrainerArguments, so that the schedule covers the whole run. Or resume "
                "from a checkpoint in a new Trainer, with resume=True and reset_optimizers_schedulers=True."
            )


def import_for_optimizers() -> None:
    """Make torch import the modules that the first optimizer needs, on all ranks at the same time.

    torch 2.13.0 then imports its compiler. This takes three seconds, and fifteen on a busy machine. During the import a
    rank does not notice that another rank has failed in `get_optimizers_schedulers`.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
