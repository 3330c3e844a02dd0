"""Training on, further than the arguments said."""

from __future__ import annotations

from trainstack.errors import ConfigurationError
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.run_state import RunState
from trainstack.trainer.schedulers.length import counts_at_end, why_too_short
from trainstack.trainer.schedulers.schedules import Schedules


def refuse_short_schedules(schedules: Schedules, plan: TrainingPlan, state: RunState, args: TrainerArguments) -> None:
    """Refuse an extension beyond the end of a schedule.

    Args:
        schedules: of the run.
        plan: the present one, for which the schedules were made.
        state: the counters of the run.
        args: with the new end.

    Raises:
        ConfigurationError: a schedule would end before the run does.
    """
    longer = plan.with_end(args.epochs, args.max_steps)
    planned, counts = (counts_at_end(schedules, one, state) for one in (plan, longer))
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
