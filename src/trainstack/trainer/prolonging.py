"""Training on, further than the arguments said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainstack.errors import ConfigurationError
from trainstack.trainer.rhythm import ValidationSchedule, whole_steps
from trainstack.trainer.schedulers.length import counts_at_end, why_too_short

if TYPE_CHECKING:
    from trainstack.trainer.arguments import TrainerArguments
    from trainstack.trainer.plan import TrainingPlan
    from trainstack.trainer.run import Run
    from trainstack.trainer.trainer import Trainer


def prolong(trainer: Trainer, epochs: int | None, max_steps: int | float | None) -> None:
    """Give a trainer's run another end, where it stands.

    Schedulers that are made already go on as they were laid; fractions of the run are those of the longer one. A
    `fast_dev_run` keeps its end.

    Args:
        trainer: trained or not; as it was, where the longer run is refused.
        epochs: of the whole run; then its steps are not limited.
        max_steps: global steps of the whole run, whatever its epochs.

    Raises:
        ConfigurationError: one of the two is no such number, or a schedule would end before the run does.
    """
    if trainer.args.fast_dev_run:
        return
    args = replace(trainer.args, epochs=trainer.args.epochs if epochs is None else epochs, max_steps=max_steps)
    run = trainer._run
    if run is None:
        trainer.args = args
        return
    longer = run.data.plan.with_end(args.epochs, args.max_steps)
    _refuse_short_schedules(run, args, longer)
    trainer.args = run.args = args
    run.data.set_plan(longer)
    run.validation = ValidationSchedule(args.validate_every, run.data.plan)
    run.log_interval = run.loop.measure_every = whole_steps("log_every", args.log_interval, run.data.plan)
    trainer._finished = False


def _refuse_short_schedules(run: Run, args: TrainerArguments, longer: TrainingPlan) -> None:
    plan, schedules = run.data.plan, run.loop.schedules
    planned, counts = (counts_at_end(schedules, one, run.state) for one in (plan, longer))
    for position, scheduler in enumerate(schedules.schedulers):
        before, count = planned[position], counts[position]
        if count is None or before is None or count <= before:
            continue
        what = why_too_short(scheduler, count, before)
        if what is not None:
            end = f"epochs={args.epochs}" if args.max_steps is None else f"max_steps={args.max_steps}"
            raise ConfigurationError(
                f"train({end}) makes the run longer than scheduler {position} ({type(scheduler).__name__}) was laid "
                f"for: {what}. Write {end} in TrainerArguments, so that it is laid over all of it, or go on from a "
                "checkpoint in a new Trainer, with resume=True and reset_optimizers_schedulers=True."
            )
