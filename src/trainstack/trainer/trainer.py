"""`Trainer`: brings a module, a backend and a checkpointer together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

from torch.utils.data import SequentialSampler

from trainstack.backends import PrivacyStatement, TrainerBackend, World, build_trainer_backend
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, DefaultCheckpointer
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.stage import Stage
from trainstack.trainer.argument_checks import check_trainer_parts
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.evaluation import named_loaders
from trainstack.trainer.history import RunHistory
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.properties import TrainerProperties
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.run import Run
from trainstack.trainer.run_state import RunState
from trainstack.trainer.saving import Saver
from trainstack.trainer.snapshot import (
    check_plan,
    get_loop_state,
    restore_module,
    rng_of_rank,
    update_loop_state,
)


class Trainer(TrainerProperties):
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
        self._saver = Saver(self)
        self._finished = self._making_ready = False

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
            self._saver.begin_run(resumed=resumed is not None)
            reporter.open(self.plan, self.trainer_backend.spec, str(self.device), resumed)
            if state.epoch >= self.args.epochs:
                reporter.text(f"all {self.args.epochs} epochs are trained already; nothing is left to do")
            self.module.train()
            run.refuse_over()
            while state.epoch < self.args.epochs and run.why_over is None:
                run.train_epoch(reporter, self.save_checkpoint, self.checkpointer.every_n_steps)
            run.restore_rng_once()
            self._saver.save(run, force=True, unless_saved=True)
            self.save_model_checkpoint()
            if run.hooks.end_train is not None:
                run.hooks.end_train(state.global_step)
            reporter.write()
            if self.trainer_backend.is_private:
                reporter.end_private_run(self.privacy_statement(), run.why_over)
            self._finished = True
        except BaseException as error:
            origin = self.world.comm.origin_of(error)
            if origin is not error:
                raise origin from error
            self.world.comm.post_failure(error)
            raise
        finally:
            run.busy = run.save_asked = False
            reporter.close()

    def validate(self) -> dict[str, Any]:
        """Run `val_step` over all validation data and call `on_end_val_epoch`; returns the outputs by loader."""
        run = self._ready()
        outputs = run.evaluate(Stage.VAL, run.val_loaders(), keep=True)
        if run.save_asked and not run.busy:
            run.save_asked = False
            self._saver.save(run, force=True)
        return outputs

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

    def gather(self, outputs: Any) -> Any:
        """What every process gives, joined along dimension 0 in the order of the ranks, on every process.

        Tensors may differ in their first dimension; lists are put one after the other; dicts and tuples are joined
        item by item. All processes must call it together.
        """
        self._ready()
        return self.trainer_backend.gather(outputs)

    def print(self, *values: Any, once: Literal["world", "node"] = "world") -> None:
        """Print on the main process only, or on the first process of each machine."""
        if self.is_main_process if once == "world" else self.world.local_rank == 0:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def privacy_statement(self) -> PrivacyStatement:
        """What is guaranteed, at this moment, to those whose records are trained on; `.text` and `.to_json()`."""
        self._ready()
        return self.trainer_backend.privacy_statement()

    def close(self) -> None:
        """Give back what the backend took from the outside, such as a process group."""
        self.trainer_backend.close()

    def _ready(self) -> Run:
        """Open the backend, restore what is to be resumed, and prepare the module; once."""
        if self._run is None:
            if self._making_ready:
                raise ConfigurationError(
                    "the trainer was asked for its plan or state while it makes the module ready. In "
                    "get_optimizers_schedulers and get_train_dataloader use self.plan."
                )
            self._making_ready = True
            try:
                self._make_ready()
            except BaseException:
                self._run, self.state = None, RunState(seed=self.args.seed)
                raise
            finally:
                self._making_ready = False
        return cast(Run, self._run)

    def _make_ready(self) -> None:
        checkpoint = self.load_checkpoints()
        restore_module(self.module, checkpoint)
        self.state.update_state(checkpoint.trainer_state or {})
        self._run = Run(self.module, self.args, self.trainer_backend, self.world, self.state, self.history)
        if not checkpoint.is_empty:
            self._resume(self._run, checkpoint)

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
        rng = rng_of_rank(checkpoint.rng_state, self.world, self.state)
        if rng is not None:
            run.pending_rng, run.epoch_rng = rng["now"], rng["epoch"]
        self._saver.saved_at = (self.state.global_step, self.state.epoch)

    # --- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(self, force: bool = False) -> None:
        """Hand the states of trainer, backend and module to the checkpointer; `force` saves out of turn as well.

        Called in the middle of something, from a hook or a step, it is done at the end of the step, or of the epoch
        when training has ended: a checkpoint holds a state from which a run can go on exactly.

        Raises:
            NonFiniteError: a loss, a gradient or the weights are inf or nan; nothing was written.
            CheckpointError: the checkpoint could not be written; older ones are intact.
        """
        run = self._ready()
        if run.busy:
            run.save_asked, run.loop.attend_at = True, 0
        else:
            self._saver.save(run, force)

    def save_model_checkpoint(self) -> None:
        """Export the module's state alone; an export is never taken for a point to resume from."""
        self._saver.save_model()

    def load_checkpoints(self) -> Checkpoint:
        """What the checkpointer finds to continue from, as `args.resume` says; an empty one if nothing."""
        return self._saver.load()

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
