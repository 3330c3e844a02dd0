"""`EpochLengths` updates the plan with the length of the data of each epoch."""

from __future__ import annotations

from dataclasses import replace

from trainstack.errors import CheckpointMismatchError, ModuleContractError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.state import RunState


class EpochLengths:
    """Updates the plan if the length of the data changes between epochs, and warns of wrong lengths.

    Args:
        log: logs the warning.

    Attributes:
        may_change: whether an epoch may have another length than the previous one.
        expected: the number of samples of the resumed epoch; None if unknown.
    """

    def __init__(self, log: RunLogger) -> None:
        self._log, self._reported = log, False
        self.may_change = False
        self.expected: int | None = None

    def follow(self, before: TrainingPlan, now: TrainingPlan, state: RunState) -> TrainingPlan:
        """The plan `before` with the lengths of `now`, the plan for the data of the current epoch.

        Raises:
            CheckpointMismatchError: the run resumes within the epoch, and its data had another length.
            ModuleContractError: the length has changed, and a schedule depends on the previous length.
        """
        expected = self.expected if self.expected is not None or not state.steps_in_epoch else before.samples_per_epoch
        self.expected = None
        if None not in (expected, now.samples_per_epoch) and now.samples_per_epoch != expected:
            raise CheckpointMismatchError(
                f"the checkpoint was written within epoch {state.epoch} of a data set of {expected} samples; the data "
                f"set now has {now.samples_per_epoch}. Resume with the same data, or from a checkpoint at the end of "
                "an epoch."
            )
        if (now.samples_per_epoch, now.steps_per_epoch) == (before.samples_per_epoch, before.steps_per_epoch):
            return before
        if None not in (before.samples_per_epoch, now.samples_per_epoch) and not self.may_change:
            raise ModuleContractError(
                f"get_train_dataloader returned a data set of {now.samples_per_epoch} samples; the run was planned for "
                f"{before.samples_per_epoch}, and so were schedulers that step after each update. Return data of the "
                "same length in every epoch, or write max_steps=..., or SchedulerConfig(scheduler, interval='epoch')."
            )
        if now.samples_per_epoch is not None and now.micro_batch != before.micro_batch:
            now = now.with_micro_batch(before.micro_batch)
        return replace(
            before,
            samples_per_epoch=now.samples_per_epoch,
            batches_per_epoch=now.batches_per_epoch,
            steps_per_epoch=now.steps_per_epoch,
            last_step_samples=now.last_step_samples,
        )

    def report(self, plan: TrainingPlan, state: RunState) -> None:
        """Warn once if the finished epoch had another number of steps than planned from the length of its loader."""
        planned, done, last = plan.steps_per_epoch, state.steps_in_epoch, plan.max_steps
        differs = plan.samples_per_epoch is None and planned is not None and done != planned
        if differs and (last is None or state.global_step < last) and not self._reported:
            self._reported = True
            self._log.warning(
                f"epoch {state.epoch} had {done} global steps, but schedules and progress are planned for {planned}, "
                "from the length of the training loader. Return the number of samples from __len__ of the data set, or "
                "write max_steps=..."
            )
