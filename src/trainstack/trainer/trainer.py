"""`Trainer`: brings a module, a backend and a checkpointer together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, cast

from trainstack.backends import TrainerBackend, World, build_trainer_backend
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, DefaultCheckpointer, WarmStartReport
from trainstack.errors import ConfigurationError
from trainstack.trainer.admission import admit, refuse_nested, what_is_done
from trainstack.trainer.aftermath import save_after
from trainstack.trainer.argument_checks import check_trainer_parts
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.dev_run import for_dev_run
from trainstack.trainer.ending import end_training
from trainstack.trainer.evaluating_trainer import EvaluatingTrainer
from trainstack.trainer.events import Callback, Event, Events
from trainstack.trainer.fitting import fit_micro_batch
from trainstack.trainer.history import RunHistory
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.prolonging import prolong
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.resuming import resume, start_from_weights, what_the_mode_keeps
from trainstack.trainer.rhythm import whole_steps
from trainstack.trainer.run import Run
from trainstack.trainer.run_state import RunState
from trainstack.trainer.saving import Saver
from trainstack.trainer.signals import end_by_signal, signals_ask
from trainstack.trainer.signatures import check_val_step
from trainstack.trainer.snapshot import get_loop_state, restore_module, update_loop_state
from trainstack.trainer.stopping import Stopped, Stopper
from trainstack.trainer.together import by_all
from trainstack.trainer.user_state import UserState

if TYPE_CHECKING:
    from trainstack.backends.dp.statement import PrivacyStatement


class Trainer(EvaluatingTrainer):
    """Trains a module as its arguments say.

    Args:
        module: model, steps, optimizers and data.
        args: everything else.
        trainer_backend: a stack you built, or a backend string; wins over `args.backend`.
        checkpointer: keeps and finds checkpoints; by default a `DefaultCheckpointer` that saves under
            `args.output_dir`.
        run_history: where metrics are recorded; a new `RunHistory` by default.
        callbacks: objects that subscribe to events by their methods, or classes of them.
        val_step: a function that is called for `val_step` of the module, as if it were that method.
        metrics: by name, anything with `update`, `compute` and `reset`; instead of the module's.

    Attributes:
        history: the metrics of the run.
        events: who subscribes to what; `on` adds to it.
        state: where the run stands.
        user_state: for data of your own; saved with checkpoints.
        warm_start_report: what `init_weights_from` gave the module; None before, and where nothing was taken from it.

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
        callbacks: Iterable[Callback | type[Callback]] | None = None,
        val_step: Callable[..., Any] | None = None,
        metrics: Any = None,
    ) -> None:
        check_trainer_parts(module, args, trainer_backend, checkpointer)
        check_val_step(val_step)
        self.module = module
        self.args = args = for_dev_run(args)
        if not isinstance(trainer_backend, TrainerBackend):
            trainer_backend = build_trainer_backend(trainer_backend or args.backend, **args.layer_options)
        self.trainer_backend = trainer_backend
        self.trainer_backend.claim(self)
        self.checkpointer = (not args.fast_dev_run and checkpointer) or DefaultCheckpointer(
            args.placed_checkpointer_args
        )
        self.history = run_history or RunHistory()
        self.state = RunState(seed=args.seed)
        self.user_state = UserState()
        self._metrics, self._val_step = metrics, val_step
        self.warm_start_report: WarmStartReport | None = None
        self._opened: World | None = None
        self._run: Run | None = None
        self._saver = Saver(self)
        self._stopper = Stopper()
        self._finished = self._making_ready = self._is_made = False
        if args.default_callbacks:
            from trainstack.trainer.callbacks.defaults import with_defaults  # the ready-made ones are loaded when used

            callbacks = with_defaults(callbacks)
        self.events = Events(self, callbacks)
        self.events.fire(Event.INIT)
        self._is_made = True

    # --- running -------------------------------------------------------------------------------------------

    def train(self, *, epochs: int | None = None, max_steps: int | float | None = None) -> None:
        """Train the epochs that are left, validate after each, save, and export the model at the end.

        Does nothing once it is through. Call it again after an interruption to go on from where it stopped. What
        `request_stop` has ended counts as through: the model is exported and `on_end_train` called.

        Args:
            epochs: train until so many are trained in all, instead of what the arguments say; see `prolong`.
            max_steps: so for global steps.

        Raises:
            Preempted: SIGTERM or SIGUSR1 came; what was trained is saved. Ends the process with exit code 75.
            KeyboardInterrupt: Ctrl-C was pressed, and what was trained is saved; or it was pressed twice.
            ModuleContractError: the module broke its contract; the message says how.
            NonFiniteError: a loss or gradient became inf or nan.
            PeerError: another process has failed, or did not come to a collective in time.
            CheckpointError: a checkpoint that was asked for cannot be read, or one cannot be written.
            ConfigurationError: it was called from one of its own hooks or steps.
        """
        if self._run is not None:
            refuse_nested(self._run)
        if epochs is not None or max_steps is not None:
            prolong(self, epochs, max_steps)
        run = self._ready()
        if self._finished:
            return
        reporter = Reporter(self.args, self.history, is_main=self.is_main_process)
        run.training = True
        with signals_ask(self._stopper, wanted=self.args.handle_signals, says=self.is_main_process):
            try:
                self._train(run, reporter)
            except BaseException as error:  # the other processes know by now
                self._saver.finish_after(error)
                self.events.fail(error)
                if self.args.save_on_exception:
                    save_after(error, self, run, within_s=self._saver.grace.seconds)
                reporter.fail(self, error)
                raise
            finally:
                run.training = run.busy = run.save_asked = run.pin_asked = False
                reporter.close()
                late = self._stopper.end()
        end_by_signal(
            self._stopper.agreed, late, self._saver.last_words(run), run.log if self.is_main_process else None
        )

    @by_all
    def _train(self, run: Run, reporter: Reporter) -> None:
        state, stopper = self.state, self._stopper
        every = self.checkpointer.every_n_steps
        save_every = None if every is None else whole_steps("every_n_steps", every, run.data.plan)
        run.validation.trainer = self
        resumed = state.global_step or None
        stopper.begin(run.loop, self.world)
        self._saver.begin_run(run, resumed=resumed is not None)
        self.module.train()
        if self.args.fit_micro_batch:
            fit_micro_batch(run)
        reporter.open(self, resumed)
        if run.is_over:
            reporter.text(what_is_done(run))
        admit(run)
        if self.args.sanity_val_steps:
            run.evaluator.try_out(self.args.sanity_val_steps)
        state.current_step = state.global_step  # a step that failed is no longer under way
        with suppress(Stopped):
            self.events.begin_train()
            stopper.settle()
            while not run.is_over and run.why_over is None:
                run.train_epoch(reporter, self.save_checkpoint, save_every)
        end_training(self, run, reporter)
        self._finished = run.is_over

    def privacy_statement(self) -> PrivacyStatement:
        """What is guaranteed, at this moment, to those whose records are trained on; `.text` and `.to_json()`."""
        self._ready()
        return self.trainer_backend.privacy_statement()

    def close(self) -> None:
        """Give back what was taken from the outside: the loader's workers, and the backend's process group."""
        if self._run is not None:
            self._run.data.close()
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

    @by_all
    def _make_ready(self) -> None:
        checkpoint = what_the_mode_keeps(self.load_checkpoints(), self.args, self.trainer_backend)
        restore_module(self.module, checkpoint)
        self.module._own_val_step = self._val_step
        self.warm_start_report = start_from_weights(self, resumed=not checkpoint.is_empty)
        self.state.update_state(checkpoint.trainer_state or {})
        parts = (self.module, self.args, self.trainer_backend, self.world, self.state, self.history, self._stopper)
        self._run = Run(*parts, self.events, self._metrics)
        self.events.fire(Event.READY)
        if checkpoint.is_empty:
            self.trainer_backend.start_afresh(again=self.args.resume == "auto")
        else:
            resume(self, self._run, checkpoint)

    # --- checkpoints ---------------------------------------------------------------------------------------

    @by_all
    def save_checkpoint(
        self,
        force: bool = False,
        *,
        pin: bool = False,
        path: str | os.PathLike[str] | None = None,
        once: Literal["world", "node"] = "world",
    ) -> None:
        """Hand the states of trainer, backend and module to the checkpointer, or write them as the folder `path`.

        Args:
            force: save out of turn as well.
            pin: so too, and keep it for good: it is never deleted to make room for others.
            path: of a folder that the checkpointer has nothing to do with; `resume=path` goes on from it. Asked for in
                the middle of something, an ordinary checkpoint is saved beside it.
            once: `"node"` writes `path` on the first process of each machine, for folders that they do not share.

        Called in the middle of something, from a hook or a step, it is done at the end of the step, or of the epoch
        when training has ended: a checkpoint holds a state from which a run can go on exactly.

        Raises:
            NonFiniteError: a loss, a gradient or the weights are inf or nan; nothing was written.
            CheckpointError: the checkpoint could not be written; older ones are intact.
        """
        run = self._ready()
        run.pin_asked |= pin
        run.paths_asked += [] if path is None else [(path, once)]
        if run.busy:
            run.save_asked, run.loop.attend_at = True, 0
        elif path is not None:
            self._saver.save_where_asked(run)
        else:
            self._saver.save(run, force or pin)

    @by_all
    def save_model_checkpoint(self) -> None:
        """Export the module's state alone; an export is never taken for a point to resume from."""
        self._saver.save_model()

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the module's state as the folder `path`, with a README; see `export_model`."""
        self._saver.save_model(path)

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
