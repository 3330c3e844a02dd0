"""What a trainer can be asked about its run, and saying it once: derived from arguments, world and state alone."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler

from trainstack.backends import World
from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.events import Event, Events, Filter
from trainstack.trainer.events.bus import checked_event
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.run_state import RunState
from trainstack.trainer.stopping import Stopper
from trainstack.trainer.together import by_all

if TYPE_CHECKING:
    from trainstack.trainer.run import Run
    from trainstack.trainer.saving import Saver

Function = TypeVar("Function", bound=Callable[..., Any])


class TrainerProperties(AbstractTrainer):
    """The facts of a run, under PyMarlin's names."""

    args: TrainerArguments
    state: RunState
    events: Events
    _stopper: Stopper
    _saver: Saver
    _run: Run | None
    _is_made: bool
    _making_ready: bool

    @abstractmethod
    def _ready(self) -> Run:
        """Open the backend, restore what is to be resumed, and prepare the module; once."""

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

    # --- for callbacks -------------------------------------------------------------------------------------

    def _prepared(self, name: str) -> Run:
        """The run, for the member `name`; refused as long as the trainer or the module is still being made."""
        if self._run is None and (self._making_ready or not self._is_made):
            raise ConfigurationError(
                f"trainer.{name} was used before the optimizers and the plan exist. Use it from on_ready on; on_init "
                "and the methods that make optimizers and loaders come too early."
            )
        return self._ready()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that step, in the order in which `get_optimizers_schedulers` returned them.

        They are the live objects. A scheduler sets "lr" of their `param_groups` after each step.

        Raises:
            ConfigurationError: they do not exist yet, in `on_init` and `get_optimizers_schedulers`.
        """
        return self._prepared("optimizers").loop.work.optimizers

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers that step, without their `SchedulerConfig`, in the order in which they were returned.

        They are the live objects. The trainer steps them; a callback only reads them.

        Raises:
            ConfigurationError: they do not exist yet, in `on_init` and `get_optimizers_schedulers`.
        """
        return self._prepared("schedulers").loop.schedules.schedulers

    @property
    def next_log_step(self) -> int:
        """The first log point after the finished global steps: a multiple of `log_every`, or `max_steps`.

        A callback computes what `on_log` records only in the step before it, which ends at the log point:
        `trainer.state.global_step + 1 == trainer.next_log_step`.

        Raises:
            ConfigurationError: the plan does not exist yet, in `on_init` and `get_optimizers_schedulers`.
        """
        return self._prepared("next_log_step").next_log_step

    def limit_steps_per_epoch(self, *, train: int | None = None, val: int | None = None) -> None:
        """Lower `max_train_steps_per_epoch` and `max_val_steps_per_epoch`, before the plan is made: in `on_init`.

        Plan and schedulers are then made for the shorter epochs. A lower limit of the arguments stays.

        Args:
            train: global steps of an epoch; None for no further limit.
            val: validation batches of each loader; None for no further limit.

        Raises:
            ConfigurationError: the plan exists already, or a limit is no whole number from 1 on.
        """
        if self._run is not None or self._making_ready:
            raise ConfigurationError(
                f"limit_steps_per_epoch(train={train!r}, val={val!r}) was called after the plan was made. Call it in "
                "on_init of a Callback, or before train()."
            )
        asked = {"max_train_steps_per_epoch": train, "max_val_steps_per_epoch": val}
        limits = {name: limit for name, limit in asked.items() if limit is not None}
        replace(self.args, **limits)  # type: ignore[arg-type]  # refuses what is no limit
        lower = {name: min(limit, getattr(self.args, name) or limit) for name, limit in limits.items()}
        self.args = replace(self.args, **lower)  # type: ignore[arg-type]

    def call_at_step(self, step: int, function: Callable[..., Any]) -> None:
        """Call `function` once, when global step `step` is finished: after its log point, before its validation.

        Other steps cost nothing. The function may do what a subscriber of an event may do: validate, save a checkpoint,
        or stop the training. On several processes each one asks for the same call. Checkpoints do not keep the request,
        so ask in `on_train_begin` if `step` is still to come. A run that ends before `step` does not call it.

        Args:
            step: a global step after `state.global_step`.
            function: takes the trainer, or nothing.

        Raises:
            ConfigurationError: the step is no whole number or is finished already, the function needs more than the
                trainer, or the run does not exist yet (in `on_init`).
        """
        run = self._prepared("call_at_step")
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.state.global_step:
            raise ConfigurationError(
                f"call_at_step({step!r}, ...): {self.state.global_step} global steps are finished. Write a later step, "
                "a whole number."
            )
        self.events.call_at(step, function)
        run.loop.attend_at = 0  # at the next boundary the loop computes anew which step is next

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training `parameters` from the next step on: no gradient, no weight decay, no momentum.

        In one process they do not require gradients meanwhile. A layer that sums gradients over processes must know
        from the start which parameters are trained; there gradients are computed, and dropped before clipping.
        Parameters that are frozen already are left as they are. All processes call it alike. Checkpoints do not keep
        it, so call it in `on_train_epoch_begin`.

        Raises:
            ConfigurationError: the run is private, something is no parameter, a step is under way, or the optimizers do
                not exist yet.
        """
        run, given = self._freezing("freeze", parameters)
        frozen = run.loop.frozen
        for parameter in given:
            if parameter.requires_grad and id(parameter) not in frozen:
                frozen[id(parameter)] = parameter
                parameter.requires_grad_(run.loop.work.gradients_reduced_by is not None)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train `parameters` again from the next step on. Those that are trained are left as they are.

        Raises:
            ConfigurationError: as for `freeze`; or a parameter does not require gradients, and `freeze` was not called
                with it.
        """
        run, given = self._freezing("unfreeze", parameters)
        frozen = run.loop.frozen
        if not all(parameter.requires_grad or id(parameter) in frozen for parameter in given):
            raise ConfigurationError(
                "unfreeze was given a parameter with requires_grad=False, which trainer.freeze has not frozen, so that "
                "the backend does not expect a gradient of it. Leave requires_grad=True in the module, and call "
                "trainer.freeze in on_train_epoch_begin."
            )
        for parameter in given:
            if frozen.pop(id(parameter), None) is not None:
                parameter.requires_grad_(True)

    def _freezing(self, name: str, parameters: Iterable[nn.Parameter]) -> tuple[Run, list[nn.Parameter]]:
        run, given = self._prepared(name), list(parameters)
        if self.trainer_backend.is_private:
            raise ConfigurationError(
                f"trainer.{name} cannot change what a private run trains. Freeze for good in the module instead: "
                "requires_grad_(False) before it is given to the trainer."
            )
        wrong = next((one for one in given if not isinstance(one, nn.Parameter)), None)
        if wrong is not None:
            raise ConfigurationError(
                f"trainer.{name} was given a {type(wrong).__name__}. Write parameters: module.encoder.parameters()."
            )
        if self.state.current_step > self.state.global_step:
            raise ConfigurationError(
                f"trainer.{name} was called in the middle of global step {self.state.current_step}. Call it between "
                "steps, in on_train_epoch_begin or on_train_step_end."
            )
        return run, given

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """A block in which the module has the weights that are evaluated: the `evaluation_context` of each callback.

        Use it to export what was validated, such as the averages of `EMA`. Do not train in it.
        """
        return self.events.evaluation_contexts()

    def keep_trained_weights(self) -> None:
        """Keep the trained weights; from here on write others into the module's parameters and buffers, in place.

        For `on_train_end`: the export has the others, checkpoints have the trained ones, and `train()` called again
        continues from the trained ones. A second call does nothing.

        Raises:
            ConfigurationError: a training is under way, or has failed.
        """
        if self.is_training:
            raise ConfigurationError(
                "keep_trained_weights was called in a training, which would go on with other weights. Call it in "
                "on_train_end where status is 'finished' or 'stopped'; for evaluations define evaluation_context."
            )
        self.events.aside.lay(self.module)

    @property
    def keeps_trained_weights(self) -> bool:
        """Whether the module has other weights than the trained ones, see `keep_trained_weights`."""
        return self.events.aside.is_laid

    @by_all
    def load_export(self, path: str | os.PathLike[str]) -> None:
        """Load the module's state from the folder `path`, which `export` has written, on all processes.

        The main process reads it. Call `keep_trained_weights` before it where the trained weights must not be lost.

        Raises:
            CheckpointError: the folder has no export, or a damaged one.
        """
        self._prepared("load_export")
        self.module.update_state(self._saver.read_export(path))

    # --- events --------------------------------------------------------------------------------------------

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
