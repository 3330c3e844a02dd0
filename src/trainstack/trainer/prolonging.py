"""Training on, further than the arguments said."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainstack.trainer.resuming import check_schedules
from trainstack.trainer.rhythm import ValidationSchedule, whole_steps

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer


def prolong(trainer: Trainer, epochs: int | None, max_steps: int | float | None) -> None:
    """Give a trainer's run another end, where it stands.

    Schedulers that are made already go on as they were laid; fractions of the run are those of the longer one.

    Args:
        trainer: trained or not.
        epochs: of the whole run; then its steps are not limited.
        max_steps: global steps of the whole run, whatever its epochs.

    Raises:
        ConfigurationError: one of the two is no such number.
        CheckpointMismatchError: a schedule would end before the run does.
    """
    trainer.args = args = replace(
        trainer.args, epochs=trainer.args.epochs if epochs is None else epochs, max_steps=max_steps
    )
    run = trainer._run
    if run is None:
        return
    run.args = args
    run.data.plan_anew(args)
    run.module.plan = run.data.plan
    run.validation = ValidationSchedule(args.validate_every, run.data.plan)
    run.log_interval = run.loop.measure_every = whole_steps("log_every", args.log_interval, run.data.plan)
    check_schedules(run)
    trainer._finished = False
