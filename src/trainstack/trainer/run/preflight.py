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
    """Refuse to let metrics decide about a private training that it computes from records without noise.

    Callbacks check their own when the training begins. The best checkpoint by "val/loss", which is kept unless told
    otherwise, is not kept then.

    Raises:
        PrivacyError: with the metric and the cure.
    """
    history, checkpointer = context.history, context.checkpointer
    schedules.check_monitors(history)
    if context.args.monitor is not None:
        history.require_usable(context.args.monitor, "TrainerArguments.monitor")
    wanted = checkpointer.keeps_best_by
    if wanted is not None and (not isinstance(checkpointer, DefaultCheckpointer) or checkpointer.asks_for_best):
        history.require_usable(wanted[0], "keep_best")


def already_finished_message(context: RunContext, plan: TrainingPlan) -> str:
    """Why a run that is over has nothing left to do, and what to write for more."""
    state = context.state
    if plan.max_steps is not None:
        count, what, name, planned = state.global_step, "global step", "max_steps", plan.max_steps
    else:
        count, what, name, planned = state.epoch, "epoch", "epochs", context.args.epochs
    if not state.global_step:
        return f"{name}={planned}: there is nothing to train"
    return (
        f"{count} {what}{' is' if count == 1 else 's are'} trained already, and {name}={planned}: nothing is left to "
        f"do. Write {name}={count + 1} or more to go on, or resume=False or another output_dir to begin anew."
    )


def check_can_train(
    context: RunContext, exhausted_reason: str | None, val_loaders: Callable[[], dict[str, Any]]
) -> None:
    """Refuse to train when no step may be made, or when its first validation is bound to fail.

    `exhausted_reason` says why no step may be made, if that is so; `val_loaders` gives the loaders of the module.

    Raises:
        PrivacyBudgetError: saying what is used up.
        ModuleContractError: there is data to validate on, and no `val_step`.
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
    # the module is asked for its loaders once more, but only where that may find the fault
    with isolated_rng(mix(context.state.seed), context.world.device):
        loaders = val_loaders()
    if loaders:
        raise module._lacks("val_step", "get_val_dataloaders")


def check_schedule_lengths(schedules: Schedules, plan: TrainingPlan, state: RunState, args: TrainerArguments) -> None:
    """Refuse an extension, to the end that `args` give, beyond the end of a schedule that was made for `plan`.

    Raises:
        ConfigurationError: a schedule would end before the run does.
    """
    longer = plan.with_end(args.epochs, args.max_steps)
    planned, counts = (counts_at_end(schedules, one, state) for one in (plan, longer))
    for position, scheduler in enumerate(schedules.schedulers):
        before, count = planned[position], counts[position]
        if count is None or before is None or count <= before:
            continue
        what = short_schedule_reason(scheduler, count, before)
        if what is not None:
            end = f"epochs={args.epochs}" if args.max_steps is None else f"max_steps={args.max_steps}"
            raise ConfigurationError(
                f"train({end}) makes the run longer than scheduler {position} ({type(scheduler).__name__}) was laid "
                f"for: {what}. Write {end} in TrainerArguments, so that it is laid over all of it, or go on from a "
                "checkpoint in a new Trainer, with resume=True and reset_optimizers_schedulers=True."
            )


def import_for_optimizers() -> None:
    """Let torch import what it imports for the first optimizer, on all ranks at the same time.

    torch 2.13.0 imports its compiler then, which takes three seconds, and fifteen on a busy machine. A rank that still
    imports cannot hear that another rank has failed in `get_optimizers_schedulers`.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
