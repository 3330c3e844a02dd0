"""The properties of a trainer: sizes, folders, counters and parts of the run."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler

from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.mixins.base import TrainerBase

if TYPE_CHECKING:
    from trainstack.trainer.run.view import RunView


class PropertiesMixin(TrainerBase):
    """Read-only values of a trainer, and its repr."""

    @property
    def plan(self) -> TrainingPlan:
        """All step arithmetic of the run."""
        return self._ready().data.plan

    @property
    def output_dir(self) -> Path:
        """The absolute path of the run's folder. With `output_dir=None` it is chosen when the run is prepared.

        Raises:
            ConfigurationError: it is not chosen yet (in `on_init`).
        """
        directory = self._context.directory
        if not directory.is_settled and self._is_made and not self._making_ready:
            self._ready()
        return directory.path

    @property
    def log_dir(self) -> Path:
        """The folder of the writers and the report: `output_dir`, unless `writer_args` has another folder."""
        _ = self.output_dir
        return self._context.directory.log_dir

    @property
    def view(self) -> RunView:
        """Read-only counters, sizes and loaders of the run."""
        from trainstack.trainer.run.view import RunView

        return RunView(self._ready())

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return self.world.size > 1

    @property
    def _sizes(self) -> TrainingPlan:
        if self._run is not None:  # fitting changes the micro-batch of the plan, not the arguments
            return self._run.data.plan
        args = self.args
        return TrainingPlan.make(
            train_batch_size=args.global_batch_size(self.world.size),
            gpu_batch_size_limit=args.gpu_batch_size_limit,
            world_size=self.world.size,
            is_sampled=self._context.stack.is_private,
        )

    @property
    def pergpu_global_batch_size(self) -> int:
        """Samples a global step on one process."""
        return self._sizes.process_batch

    @property
    def train_step_batch_size(self) -> int:
        """Largest number of samples in a micro-batch; the last one of a step may have fewer."""
        return self._sizes.micro_batch

    @property
    def gradient_accumulation(self) -> int:
        """Micro-batches a global step on one process."""
        return self._sizes.accumulation

    @property
    def val_step_batch_size(self) -> int:
        """Samples a validation batch on one process."""
        return self.args.val_batch_size or self.train_step_batch_size

    @property
    def estimated_global_steps_per_epoch(self) -> int:
        """An upper bound on the global steps of an epoch; `plan.steps_per_epoch` is exact."""
        return self.plan.estimated_global_steps_per_epoch

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the run, in the order in which `get_optimizers_schedulers` returned them.

        These are the objects in use, not copies. A scheduler sets "lr" of their `param_groups` after each step.

        Raises:
            ConfigurationError: they do not exist yet (in `on_init` and `get_optimizers_schedulers`).
        """
        return self._prepared("optimizers").loop.work.optimizers

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers of the run, without their `SchedulerConfig`, in the order in which they were returned.

        These are the objects in use, not copies. The trainer steps them; do not step them in a callback.

        Raises:
            ConfigurationError: they do not exist yet (in `on_init` and `get_optimizers_schedulers`).
        """
        return self._prepared("schedulers").loop.schedules.schedulers

    @property
    def next_log_step(self) -> int:
        """The first log point after the finished global steps: a multiple of `log_every`, or `max_steps`.

        Compute values for `on_log` only in the step before the log point:
        `trainer.state.global_step + 1 == trainer.next_log_step`.

        Raises:
            ConfigurationError: the plan does not exist yet (in `on_init` and `get_optimizers_schedulers`).
        """
        return self._prepared("next_log_step").due.next_log_step

    @property
    def stop_reason(self) -> str | None:
        """The reason why the last `train()` ended before its last epoch: the argument of `request_stop`, "SIGTERM",
        "SIGUSR1" or "Ctrl-C"; None if it did not."""
        return None if self._stopper.agreed is None else self._stopper.agreed.reason

    @property
    def is_training(self) -> bool:
        """Whether `train()` is running; False in a `validate()` outside of training."""
        return self.events.is_training

    @property
    def train_sampler(self) -> type:
        """The argument `sampler` of `get_train_dataloader`."""
        return RandomSampler

    @property
    def val_sampler(self) -> type:
        """The argument `sampler` of `get_val_dataloaders`."""
        return SequentialSampler

    @property
    def last_epoch(self) -> int:
        """The last completely finished epoch, counted from 0; -1 before the first."""
        return self.state.last_epoch

    @property
    def global_steps_finished(self) -> int:
        """Global steps finished since the start of the run."""
        return self.state.global_step

    @property
    def total_steps_finished(self) -> int:
        """Micro-batches finished on this process since the start of the run."""
        return self.state.batches

    def __repr__(self) -> str:
        """Return the module, the backend, the progress and the folder of the run."""
        context, state = self._context, self.state
        if self._training:
            status = "training"
        elif self._finished:
            status = "finished"
        else:
            status = "not started" if not state.global_step else f"stopped: {self.stop_reason or 'not finished'}"
        place = str(context.directory.path) if context.directory.is_settled else "no folder yet"
        return (
            f"{type(self).__name__}({type(self.module).__name__}, backend={context.stack.spec!r}, {status}, "
            f"epoch {state.epoch} of {self.args.epochs}, step {state.global_step}, {place})"
        )

    def _repr_html_(self) -> str:
        """Return the repr and the table of epochs as HTML, for notebooks."""
        return f"<p>{escape(repr(self))}</p>{self.history._repr_html_()}"
