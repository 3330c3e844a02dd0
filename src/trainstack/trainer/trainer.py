"""`Trainer`: brings a module, a backend and a checkpointer together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from trainstack.backends import TrainerBackend, World, build_trainer_backend
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, DefaultCheckpointer
from trainstack.errors import ModuleContractError
from trainstack.stage import Stage
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.argument_checks import check_trainer_parts
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.evaluation import named_loaders
from trainstack.trainer.history import RunHistory
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.run import Run
from trainstack.trainer.run_state import RunState
from trainstack.trainer.snapshot import (
    check_plan,
    get_loop_state,
    refuse_poisoned,
    restore_module,
    take_checkpoint,
    update_loop_state,
)


class Trainer(AbstractTrainer):
    """Trains a module as its arguments say.

    Args:
        module: model, steps, optimizers and data.
        args: everything else.
        trainer_backend: a stack you built, or a backend string; wins over `args.backend`.
        checkpointer: keeps and finds checkpoints; by default a `DefaultCheckpointer` that saves under
            `args.output_dir`.
        run_history: where metrics are recorded; a new `RunHistory` by default.

    Attributes:
        history: the metrics of the run.
        state: where the run stands.

    Raises:
        ConfigurationError: something given is of the wrong kind, or the backend string is wrong.
    """

    def __init__(
        self,
        module: ModuleInterface,
        args: TrainerArguments,
        trainer_backend: TrainerBackend | str | None = None,
        checkpointer: AbstractCheckpointer | None = None,
        *,
        run_history: RunHistory | None = None,
    ) -> None:
        check_trainer_parts(module, args, trainer_backend, checkpointer)
        self.module = module
        self.args = args
        if not isinstance(trainer_backend, TrainerBackend):
            trainer_backend = build_trainer_backend(trainer_backend or args.backend, **args.layer_options)
        self.trainer_backend = trainer_backend
        self.trainer_backend.claim(self)
        self.checkpointer = checkpointer or DefaultCheckpointer(args.placed_checkpointer_args)
        self.history = run_history or RunHistory()
        self.state = RunState(seed=args.seed)
        self._opened: World | None = None
        self._run: Run | None = None
        self._saved_at: tuple[int, int] | None = None
        self._finished = False

    # --- running -------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train the epochs that are left, validate after each, save, and export the model at the end.

        Does nothing once it is through. Call it again after an interruption to go on from where it stopped.

        Raises:
            ModuleContractError: the module broke its contract; the message says how.
            NonFiniteError: a loss or gradient became inf or nan.
            CheckpointError: a checkpoint that was asked for cannot be read, or one cannot be written.
        """
        run, state = self._ready(), self.state
        if self._finished:
            return
        reporter = Reporter(self.args, self.history, is_main=self.is_main_process)
        try:
            resumed = state.global_step or None
            if self.is_main_process:
                self.checkpointer.begin_run(resumed=resumed is not None)
            reporter.open(self.plan, self.trainer_backend.spec, str(self.device), resumed)
            if state.epoch >= self.args.epochs:
                reporter.text(f"all {self.args.epochs} epochs are trained already; nothing is left to do")
            self.module.train()
            while state.epoch < self.args.epochs:
                run.train_epoch(reporter, self.save_checkpoint, self.checkpointer.every_n_steps)
            run.restore_rng_once()
            self.save_checkpoint(force=True)
            self.save_model_checkpoint()
            if run.hooks.end_train is not None:
                run.hooks.end_train(state.global_step)
            reporter.write()
            self._finished = True
        finally:
            reporter.close()

    def validate(self) -> dict[str, Any]:
        """Run `val_step` over all validation data and call `on_end_val_epoch`; returns the outputs by loader."""
        run = self._ready()
        return run.evaluate(Stage.VAL, run.val_loaders(), keep=True)

    def test(self) -> dict[str, Any]:
        """Run `test_step` over all test data; returns the outputs by loader.

        Raises:
            ModuleContractError: `get_test_dataloaders` returned no data.
        """
        run = self._ready()
        loaders = self.module.get_test_dataloaders(sampler=SequentialSampler, batch_size=self.val_step_batch_size)
        named = named_loaders(loaders, "get_test_dataloaders")
        if not named:
            raise ModuleContractError(
                f"{type(self.module).__name__} has no test data. Define get_test_dataloaders(sampler, batch_size)."
            )
        return run.evaluate(Stage.TEST, named, keep=True)

    def predict(self, dataloader: Any) -> Any:
        """Run `predict_step` over `dataloader`; returns what it returned, joined in data set order.

        A dict of loaders gives a dict of outputs.
        """
        run = self._ready()
        outputs = run.evaluate(Stage.PREDICT, named_loaders(dataloader, "the caller of predict"), keep=True)
        return outputs if isinstance(dataloader, dict) else outputs["default"]

    def close(self) -> None:
        """Give back what the backend took from the outside, such as a process group."""
        self.trainer_backend.close()

    def _ready(self) -> Run:
        """Open the backend, restore what is to be resumed, and prepare the module; once."""
        if self._run is None:
            checkpoint = self.load_checkpoints()
            restore_module(self.module, checkpoint)
            self.state.update_state(checkpoint.trainer_state or {})
            run = Run(self.module, self.args, self.trainer_backend, self.world, self.state, self.history)
            self._run = run
            if not checkpoint.is_empty:
                self._resume(run, checkpoint)
        return self._run

    def _resume(self, run: Run, checkpoint: Checkpoint) -> None:
        check_plan(checkpoint, run.data.plan, self.state, run.log)
        if self.state.seed != self.args.seed:
            run.log.warning(
                f"the run began with seed={self.state.seed} and goes on with it; seed={self.args.seed} is not used."
            )
        self.update_state(checkpoint.trainer_state)
        self.trainer_backend.update_state(checkpoint.trainer_backend_state or {})
        if checkpoint.history_state is not None:
            self.history.update_state(checkpoint.history_state)
        run.pending_rng = checkpoint.rng_state
        self._saved_at = (self.state.global_step, self.state.epoch)

    # --- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(self, force: bool = False) -> None:
        """Hand the states of trainer, backend and module to the checkpointer; `force` saves out of turn as well.

        Raises:
            NonFiniteError: a loss, a gradient or the weights are inf or nan; nothing was written.
            CheckpointError: the checkpoint could not be written; older ones are intact.
        """
        run, place = self._ready(), (self.state.global_step, self.state.epoch)
        if not self.is_main_process or place == self._saved_at:
            return
        run.loop.meter.drain()
        refuse_poisoned(self.module, self.state.global_step)
        if self.checkpointer.save(take_checkpoint(self), self.state.last_epoch, force) is not None:
            self._saved_at = place

    def save_model_checkpoint(self) -> None:
        """Export the module's state alone; an export is never taken for a point to resume from."""
        if self.is_main_process:
            self.checkpointer.save_model(self.module.get_state(), self.state.last_epoch)

    def load_checkpoints(self) -> Checkpoint:
        """What the checkpointer finds to continue from, as `args.resume` says; an empty one if nothing."""
        return self.checkpointer.load(*(() if self.args.resume is False else (self.args.resume,)))

    def get_state(self) -> dict[str, Any]:
        """Counters, optimizers, schedulers and running means. Override to add to it."""
        return get_loop_state(self._ready().loop)

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Take back what `get_state` returned; nothing for None.

        Raises:
            CheckpointMismatchError: optimizers or schedulers are not those of the checkpoint.
        """
        if state:
            run, fresh = self._ready(), self.args.reset_optimizers_schedulers
            update_loop_state(run.loop, state, fresh_optimizers=fresh, log=run.log)

    # --- read-only -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> TrainingPlan:
        """All step arithmetic of the run."""
        return self._ready().data.plan

    @property
    def world(self) -> World:
        """This process's place among all, and its device."""
        if self._opened is None:
            self._opened = self.trainer_backend.open(self.args.chosen_device)
        return self._opened

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
            train_batch_size=args.train_batch_size,
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
        return self.args.val_batch_size

    @property
    def estimated_global_steps_per_epoch(self) -> int:
        """An upper bound on the global steps of an epoch; `plan.steps_per_epoch` is exact."""
        return self.plan.estimated_global_steps_per_epoch

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
