"""What a trainer can be asked about its run, and saying it once: derived from arguments, world and state alone."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from trainstack.backends import World
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.events import Event, Events, Filter
from trainstack.trainer.events.bus import checked_event
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.run_state import RunState
from trainstack.trainer.stopping import Stopper

if TYPE_CHECKING:
    from trainstack.trainer.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])


class TrainerProperties(AbstractTrainer):
    """The facts of a run, under PyMarlin's names."""

    args: TrainerArguments
    state: RunState
    events: Events
    _stopper: Stopper
    _run: Run | None

    @property
    @abstractmethod
    def plan(self) -> TrainingPlan:
        """All step arithmetic of the run."""

    @property
    @abstractmethod
    def world(self) -> World:
        """This process's place among all, and its device."""

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        return self.world.device

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return self.world.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes checkpoints and logs."""
        return self.world.is_main

    @property
    def _sizes(self) -> TrainingPlan:
        """The plan. Before the run is ready it is made from the arguments alone, since no data has been asked for.

        Fitting changes the micro-batch in the plan, not in the arguments.
        """
        if self._run is not None:
            return self._run.data.plan
        args = self.args
        return TrainingPlan.make(
            train_batch_size=args.global_batch_size(self.world.size),
            gpu_batch_size_limit=args.gpu_batch_size_limit,
            world_size=self.world.size,
        )

    @property
    def pergpu_global_batch_size(self) -> int:
        """Samples a global step on one process."""
        return self._sizes.process_batch

    @property
    def train_step_batch_size(self) -> int:
        """Samples a micro-batch: the largest divisor of the process's batch within `gpu_batch_size_limit`."""
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
    def stop_reason(self) -> str | None:
        """Why the last `train()` ended before its epochs did: what was given to `request_stop`, "SIGTERM",
        "SIGUSR1" or "Ctrl-C"; None if it did not."""
        return None if self._stopper.agreed is None else self._stopper.agreed.reason

    @property
    def is_training(self) -> bool:
        """Whether `train()` is under way; False in a `validate()` of its own."""
        return self.events.is_training

    @property
    def train_sampler(self) -> type:
        """What `get_train_dataloader` is given as `sampler`."""
        return RandomSampler

    @property
    def val_sampler(self) -> type:
        """What `get_val_dataloaders` is given as `sampler`."""
        return SequentialSampler

    @property
    def last_epoch(self) -> int:
        """The last epoch that is wholly finished, from 0; -1 before."""
        return self.state.last_epoch

    @property
    def global_steps_finished(self) -> int:
        """Global steps finished since the run began."""
        return self.state.global_step

    @property
    def total_steps_finished(self) -> int:
        """Micro-batches finished on this process since the run began."""
        return self.state.batches

    def print(self, *values: Any, once: Literal["world", "node"] = "world") -> None:
        """Print on the main process only, or on the first process of each machine."""
        if self.is_main_process if once == "world" else self.world.local_rank == 0:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the training at the next step boundary; `train()` then returns.

        Hooks, other threads and signal handlers may call it, on one process or on all. Asked in a validation, the
        training ends after the epoch. An epoch under way is not ended: its hooks and its validation are left out, and
        `train()` called again goes on exactly there.

        Args:
            reason: what `stop_reason` says afterwards.
        """
        self._stopper.ask(reason)

    def on(
        self,
        event: Event,
        *,
        every: int | None = None,
        once: int | bool | None = None,
        when: Callable[..., Any] | None = None,
        priority: int = 0,
    ) -> Callable[[Function], Function]:
        """Subscribe a function to `event` of this trainer, as a decorator or by `trainer.on(event)(function)`.

        The function gets the trainer and what the event gives, or fewer of them from the right. A parameter with a
        default is only filled if it is called like what stands in its place. `every`, `once` and `when` exclude each
        other; what they have counted is saved in checkpoints.

        Args:
            event: a point of the run.
            every: run at the calls n, 2n, 3n, ...
            once: run at the n-th call only; True for the first.
            when: `when(trainer, filter) -> bool`, or `when(trainer)`; `filter.num_called` counts the calls.
            priority: subscribers with a higher one come first.

        Returns:
            A decorator, which returns the function as it is.

        Raises:
            ConfigurationError: the filter is wrong, or the function needs more than the event gives.
        """
        checked_event(event)
        asked = any(value is not None for value in (every, once, when))
        counts = Filter(every=every, once=once, when=when) if asked else None

        def subscribe(function: Function) -> Function:
            self.events.add_function(event, function, counts, priority)
            return function

        return subscribe
