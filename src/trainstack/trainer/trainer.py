"""`Trainer` trains, validates, tests and predicts with a module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeVar, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler

from trainstack.backends import TrainerBackend, World, build_trainer_backend
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, DefaultCheckpointer, WarmStartReport, read_model
from trainstack.errors import (
    ConfigurationError,
    LeaseError,
    ModuleContractError,
    PeerError,
    Preempted,
    StopTraining,
    TrainstackError,
)
from trainstack.ranks import global_rank
from trainstack.stage import Stage
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments, limit_for_dev_run
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.intervals import whole_steps
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import ModuleExtras
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import seed_everything
from trainstack.trainer.core.state import RunState, UserState
from trainstack.trainer.events import Callback, Event, Events, Filter
from trainstack.trainer.events.bus import check_event
from trainstack.trainer.module_checks import check_parts, complete_monitor, refuse_argument_of_train
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.resume.left_out_weights import note_initial_weights, with_left_out_weights
from trainstack.trainer.resume.restoring import origin_of, restore_module, select_resume_state, start_from_weights
from trainstack.trainer.resume.saving import Saver, check_storable, save_after_exception
from trainstack.trainer.run.stopping import (
    Request,
    Stopped,
    Stopper,
    end_when_idle,
    raise_early,
    raise_for_signal,
    stop_after,
    stop_on_signals,
)
from trainstack.trainer.run_directory import RunDirectory
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.provenance import Provenance

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement
    from trainstack.trainer.evaluation.evaluator import EvaluationOutputs
    from trainstack.trainer.reporting.reporter import Reporter
    from trainstack.trainer.run.lr_finder import LRFinderResult
    from trainstack.trainer.run.run import Run
    from trainstack.trainer.run.view import RunView

Function = TypeVar("Function", bound=Callable[..., Any])


class Trainer(AbstractTrainer):
    """Trains a module as its arguments say.

    Args:
        module: model, steps, optimizers and data.
        args: everything else.
        trainer_backend: a stack you built, or a backend string; wins over `args.backend`.
        checkpointer: keeps and finds checkpoints; by default a `DefaultCheckpointer` that saves under
            `args.output_dir`.
        run_history: where metrics are recorded; a new `RunHistory` by default.
        callbacks: objects that subscribe to events by their methods, or classes of them; one of these, or a list.
        train_step: a function that is called for `train_step` of the module, as if it were that method: it computes the
            loss. What steps optimizers itself is a layer, see `register_layer`.
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

    module: ModuleInterface
    trainer_backend: TrainerBackend
    checkpointer: DefaultCheckpointer | AbstractCheckpointer
    history: RunHistory
    state: RunState
    events: Events
    user_state: UserState
    warm_start_report: WarmStartReport | None = None
    _run: Run | None = None
    _reporter: Reporter | None = None
    _evaluation: Run | None = None  # evaluates as long as nothing is to be trained
    _training = _finished = _making_ready = _is_made = _is_copy = False
    _then_raise: Exception | None = None

    def __init__(
        self,
        module: ModuleInterface,
        args: TrainerArguments,
        trainer_backend: TrainerBackend | str | None = None,
        checkpointer: AbstractCheckpointer | None = None,
        *,
        run_history: RunHistory | None = None,
        callbacks: Callback | type[Callback] | Iterable[Callback | type[Callback]] | None = None,
        train_step: Callable[..., Any] | None = None,
        val_step: Callable[..., Any] | None = None,
        metrics: Any = None,
    ) -> None:
        self._given = (trainer_backend, checkpointer, callbacks := _listed(callbacks), train_step, val_step, metrics)
        check_parts(type(self), module, args, trainer_backend, checkpointer, train_step, val_step)
        args = _settled(args, module, metrics)
        trainer_backend = _stack_of(trainer_backend, args, self)
        if checkpointer is None or args.fast_dev_run:
            checkpointer = DefaultCheckpointer(args.placed_checkpointer_args)
        self._context = context = RunContext(
            module=module,
            args=args,
            stack=trainer_backend,
            checkpointer=checkpointer,
            history=RunHistory() if run_history is None else run_history,
            events=Events(self, module, _all_callbacks(args, callbacks), RunLogger(args.log_level)),
            state=RunState(seed=args.seed),
            user_state=UserState(),
            directory=RunDirectory(args, module, checkpointer, private=trainer_backend.is_private),
            train_step=train_step,
            val_step=val_step,
            extras=ModuleExtras(module),
        )
        self.module, self.trainer_backend, self.checkpointer = module, trainer_backend, checkpointer
        self.history, self.events = context.history, context.events
        self.state, self.user_state = context.state, context.user_state
        self._saver, self._stopper, self._metrics = Saver(context, self._take_checkpoint), Stopper(), metrics
        self._give_signals_back = end_when_idle(self, enabled=args.handle_signals)
        self.events.fire(Event.INIT)
        self._is_made = True

    # --- running -------------------------------------------------------------------------------------------

    def train(self, *, epochs: int | None = None, max_steps: int | float | None = None, **unknown: NoReturn) -> None:
        """Train the epochs that are left, validate after each, save, and export the model at the end.

        Does nothing once it is through. Call it again after an interruption or an exception to go on from where it
        stopped; a hook that raised counts as called. What `request_stop` has ended counts as through: the model is
        exported and `on_end_train` called.

        Args:
            epochs: train until so many are trained in all, instead of what the arguments say.
            max_steps: the same, counted in global steps.
            unknown: is refused, with the place where the trainer takes it.

        Raises:
            Preempted: SIGTERM, SIGHUP or SIGUSR1 came; what was trained is saved. Ends the process with exit code 75.
            KeyboardInterrupt: Ctrl-C was pressed, and what was trained is saved; or it was pressed twice.
            ModuleContractError: the module broke its contract; the message says how.
            NonFiniteError: a loss or gradient became inf or nan.
            PeerError: another process has failed, or did not come to a collective in time.
            CheckpointError: a checkpoint that was asked for cannot be read, or one cannot be written.
            LeaseError: another process owns the directory of the run, or has taken it over.
            ConfigurationError: it was called from one of its own hooks or steps, or with an unknown argument.
        """
        if unknown:
            refuse_argument_of_train(next(iter(unknown)))
        if self._training:
            raise ConfigurationError(
                f"train() was called while it runs (after global step {self.state.global_step}), from a hook or a "
                "step. Call it again when it has returned, with train(epochs=...) for more epochs."
            )
        self._refuse_copy(epochs, max_steps)
        if epochs is not None or max_steps is not None:
            self._extend(epochs, max_steps)
        stopper, saver, late = self._stopper, self._saver, None
        saver.owner.is_interrupted = lambda: stopper.has_signal
        signals = stop_on_signals(
            stopper,
            enabled=self.args.handle_signals,
            announce=global_rank() == 0,
            can_agree=lambda: self._context.is_open,
        )
        with signals, closing(saver.owner):
            try:
                run = self._ready(to_train=True)
            except BaseException as error:
                self._heed_early_signal(error)
                raise
            if self.args.on_interrupt == "return" and self.world.size > 1:
                raise ConfigurationError(
                    "on_interrupt='return' with several processes: a launcher ends the others when Ctrl-C is pressed. "
                    "Leave it out, and continue in another start with resume='auto'."
                )
            if not self._finished:
                late = self._train_until_stopped(run)
                stopper.leave_together()
        if not self._finished or late is not None:
            log = self._context.log if self.is_main_process else None
            returns = self.args.on_interrupt == "return"
            raise_for_signal(stopper.agreed, late, saver.stop_message(), log, returns=returns)
        self._raise_requested()

    def _refuse_copy(self, epochs: int | None, max_steps: int | float | None) -> None:
        if self._is_copy and not (self._finished and epochs is max_steps is None):
            raise ConfigurationError(
                "this is a pickled copy of a Trainer that has trained. It has no optimizer states, so it evaluates, "
                "predicts and exports only. To train further make a new Trainer with resume=True, which loads the "
                "last checkpoint."
            )

    def _raise_requested(self) -> None:
        then_raise, self._then_raise = self._then_raise, None
        if then_raise is not None:
            raise then_raise

    def _heed_early_signal(self, error: BaseException) -> None:
        """`error` ended `train()` before training began: record a signal as its cause.

        A rank that is lost after a signal came here has most likely got the signal as well.

        Raises:
            Preempted: in place of the error of a lost rank.
        """
        pending = self._stopper.drop()
        lost = isinstance(error, PeerError | LeaseError) or type(error) is TrainstackError
        if lost and pending is not None:
            self._record_interruption(str(error))
            raise_early(pending, shown=global_rank() == 0)
        if isinstance(error, Preempted | KeyboardInterrupt):
            self._record_interruption(str(error))

    def _record_interruption(self, reason: str) -> None:
        if global_rank() == 0 and self.args.wants_report:
            from trainstack.trainer.reporting.report.facts import record_interruption  # not in every run

            directory = self._context.directory
            if directory.may_note(self.args):
                record_interruption(directory.log_dir, type(self.module).__name__, reason)

    def _train_until_stopped(self, run: Run) -> Request | None:
        """Train in a run that is ready; returns a signal that came too late to be heeded, if there is one."""
        from trainstack.trainer.data.loading import explain_worker_deaths
        from trainstack.trainer.reporting.reporter import Reporter

        context, saver, stopper = self._context, self._saver, self._stopper
        reporter = self._reporter = Reporter(context)
        self._training = True
        with stop_after(stopper, self.args):
            try:
                with context.fail_together():
                    self._train(run, reporter)
            except BaseException as error:  # the other processes know by now
                # writes under way end first; then the subscribers act, whose states the save after them keeps
                saver.finish_after(error)
                explain_worker_deaths(error)
                self.events.fail(error)
                with suppress(TrainstackError):  # no ledger any more; the statement on the disk has all planned steps
                    run.note_stop()
                wanted = self.args.save_on_exception
                if wanted is True or (isinstance(wanted, tuple) and isinstance(error, wanted)):
                    save_after_exception(error, context, self._take_checkpoint, within_s=saver.save_time_budget.seconds)
                reporter.fail(error)
                raise
            finally:
                run.leave_training()
                self._training = context.busy = False
                saver.pending_save = saver.pending_pin = False  # no step boundary follows; paths wait for the next one
                self._reporter = None
                reporter.close()
                late = stopper.end()
                if context.world.is_main:
                    context.directory.end(finished=self._finished)
        return late

    def _train(self, run: Run, reporter: Reporter) -> None:
        from trainstack.trainer.run.memory_fitting import fit_micro_batch
        from trainstack.trainer.run.preflight import already_finished_message, check_can_train

        context, state, saver, stopper = self._context, self.state, self._saver, self._stopper
        plan, work, every = run.data.plan, run.loop.work, self.checkpointer.every_n_steps
        save_every = None if every is None else whole_steps("every_n_steps", every, plan)
        run.validation.trainer = self
        resumed = state.global_step or None
        stopper.begin(run.loop, self.world)
        check_storable(context, self.get_state)
        saver.begin_run(run.loop.wake, resumed=resumed is not None)
        run.begin_training()
        if self.args.fit_micro_batch:
            fit_micro_batch(context, run.data, work)
            plan = run.data.plan
        reporter.open(run.data, work, resumed)
        if run.is_over:
            reporter.text(already_finished_message(context, plan))
        else:
            check_can_train(context, run.exhausted_reason, lambda: run.evaluator.loaders_of(Stage.VAL))
        if self.args.sanity_val_steps:
            run.sanity_check(self.args.sanity_val_steps)
        state.current_step = state.global_step  # a step that failed is no longer under way
        try:
            with suppress(Stopped):
                self.events.begin_train()
                run.fire_train_begin()
                stopper.stop_if_requested()
                while not run.is_over and run.exhausted_reason is None:
                    run.train_epoch(reporter, self.save_checkpoint, save_every)
        except StopTraining as stop:
            raise ModuleContractError(
                "StopTraining was raised in a step, a loader or a metric, which cannot be left half-way. Raise it in a "
                "hook (on_end_backward, on_end_train_step, on_end_val_epoch, ...) or in a subscriber of an event, or "
                "call trainer.request_stop(reason), after which the step under way is finished."
            ) from stop
        run.end(reporter, self._end_with_export)

    def _end_with_export(self) -> None:
        self.save_model_checkpoint()
        assert self._run is not None
        self._finished = self._run.is_over  # before on_end_train, which is called once

    def _extend(self, epochs: int | None, max_steps: int | float | None) -> None:
        """Extend the run; a refused extension changes nothing.

        Existing schedulers keep the length that they were made with. Fractions of the run are those of the longer one.
        A `fast_dev_run` keeps its end.
        """
        if self.args.fast_dev_run:
            return
        args = replace(self.args, epochs=self.args.epochs if epochs is None else epochs, max_steps=max_steps)
        if self._run is None:
            self.args = args
        else:
            self._run.extend_training(args)
            self._finished = False

    def privacy_statement(self) -> PrivacyStatement:
        """What is guaranteed, at this moment, to those whose records are trained on; `.text` and `.to_json()`."""
        self._ready()
        return self.trainer_backend.privacy_statement()

    def close(self) -> None:
        """Give back what was taken from the outside: the loader's workers, and the backend's process group."""
        for run in (self._run, self._evaluation):
            if run is not None:
                run.data.close()
        self._saver.owner.release()
        self.trainer_backend.close()
        self._give_signals_back()

    def _ready(self, *, to_train: bool = False) -> Run:
        """Open the backend, restore what is to be resumed, and prepare the module; once.

        What is to be resumed `to_train` on is chosen by the owner of the directories alone.
        """
        if self._run is not None and to_train and not self._finished:
            with self._context.fail_together():
                self._saver.owner.take()
        if self._run is None:
            if self._making_ready:
                raise ConfigurationError(
                    "the trainer was asked for its plan or state while it makes the module ready. In "
                    "get_optimizers_schedulers and get_train_dataloader use self.plan."
                )
            self._making_ready = True
            try:
                with self._context.fail_together():
                    self._make_ready(to_train)
            except BaseException:
                self._run = None
                self.state.update_state(RunState(seed=self.args.seed).get_state())
                raise
            finally:
                self._making_ready = False
        return cast("Run", self._run)

    def _make_ready(self, to_train: bool) -> None:
        from trainstack.trainer.run.agreement import agree_on_setup
        from trainstack.trainer.run.preflight import import_for_optimizers
        from trainstack.trainer.run.run import Run

        if self.world.size > 1:
            import_for_optimizers()
        agree_on_setup(self._context)
        checkpoint = self._restore(to_train)
        self._evaluation = None
        self._run = Run(self._context, self._stopper, self._saver, self._metrics)
        self._context.extras.begin()
        self.events.fire(Event.READY)
        if checkpoint.is_empty:
            self.trainer_backend.on_fresh_start(retry=self.args.resume == "auto")
        else:
            self._run.resume(checkpoint, self.update_state)

    def _restore(self, to_train: bool) -> Checkpoint:
        """Give the module the weights that it goes on with; the checkpoint that is continued, empty if none is.

        Weights to start from are taken once, so that an evaluation before training changes nothing.
        """
        context = self._context
        self._saver.choose_directory(to_train=to_train)
        context.extras = ModuleExtras(self.module)
        checkpoint = with_left_out_weights(context, self.load_checkpoints(), self._saver)
        checkpoint = select_resume_state(checkpoint, context)
        restore_module(self.module, checkpoint)
        if self._evaluation is None or not checkpoint.is_empty:
            self.warm_start_report = start_from_weights(
                context, self._saver.read_weights, self._saver.fetch, resumed=not checkpoint.is_empty
            )
            if self.warm_start_report is not None:
                self.events.fire(Event.LOAD_MODEL, self.warm_start_report)
        if checkpoint.is_empty and not self.checkpointer.keeps_frozen:
            note_initial_weights(context, self._saver)
        self.state.update_state(checkpoint.trainer_state or {})
        return checkpoint

    def _ready_to_evaluate(self) -> Run:
        """As `_ready`, without training data and optimizers as long as nothing is to be trained.

        Training prepares the module anew. A stack that cannot do that is prepared for training now, and so it is where
        a subscriber waits for `READY`.
        """
        again = all(layer.prepares_again for layer in self.trainer_backend.layers())
        if self._run is not None or not again or self.events.has_foreign(Event.READY):
            return self._ready()
        if self._evaluation is None:
            if self._making_ready:
                return self._ready()  # which refuses it
            self._making_ready = True
            try:
                with self._context.fail_together():
                    self._evaluation = self._make_evaluation()
            finally:
                self._making_ready = False
        return self._evaluation

    def _make_evaluation(self) -> Run:
        from trainstack.trainer.run.agreement import agree_on_setup
        from trainstack.trainer.run.run import Run

        agree_on_setup(self._context)
        checkpoint = self._restore(to_train=False)
        run = Run(self._context, self._stopper, self._saver, self._metrics, trains=False)
        run.resume_evaluation(checkpoint)
        return run

    def _take_checkpoint(self, *, pinned: bool = False, after: BaseException | None = None) -> Checkpoint:
        return self._ready().take_checkpoint(self.get_state, pinned=pinned, after=after)

    # --- evaluation ----------------------------------------------------------------------------------------

    def validate(
        self,
        dataloaders: Any = None,
        *,
        log: bool | None = None,
        keep_outputs: bool = True,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Run `val_step` over validation data and call `on_end_val_epoch`. Callbacks may call it in any hook.

        Before training it needs neither training data nor optimizers, except with a layer that prepares both together,
        such as `dp`. The weights are then those of `resume` or `init_weights_from`, or the module's own.

        Args:
            dataloaders: a loader, a data set with a length, or a dict of them by name; the module's by default. The
                loss of the loader "shifted" is called `val/shifted/loss`, that of a single loader `val/loss`.
            log: whether metrics go to the history; by default only within training, from a hook.
            keep_outputs: whether outputs are returned; if False they are collected only where `on_end_val_epoch` takes
                them, which saves memory.
            batch_size: samples a batch, on each process, of data sets and of the module's loaders; by default
                `args.val_batch_size`.
            collate_fn: makes batches of the data sets that are given.
            pad_value: fills up outputs whose shapes differ in another dimension than the first, at the end of each
                dimension. Without it such outputs come back as a list with one tensor a batch.

        Returns:
            The outputs by loader; their attribute `metrics` has losses and metrics by name.
        """
        with self._context.fail_together():
            run = self._ready() if log and self.args.resume is not False else self._ready_to_evaluate()
            outputs = run.evaluator.run_standalone(
                Stage.VAL,
                dataloaders,
                log,
                keep_outputs,
                batch_size=batch_size,
                collate_fn=collate_fn,
                pad_value=pad_value,
            )
            if self._saver.pending_save and not self._context.busy:
                self._saver.pending_save = False
                self._saver.save(force=True)
            return outputs

    def test(
        self,
        dataloaders: Any = None,
        *,
        log: bool | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Run `test_step` over test data, as `validate` does.

        Raises:
            ModuleContractError: there is no data.
        """
        with self._context.fail_together():
            run = self._ready() if log and self.args.resume is not False else self._ready_to_evaluate()
            return run.evaluator.run_standalone(
                Stage.TEST, dataloaders, log, batch_size=batch_size, collate_fn=collate_fn, pad_value=pad_value
            )

    def predict(
        self,
        dataloader: Any,
        *,
        stream: bool = False,
        batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pad_value: float | None = None,
    ) -> Any:
        """Run `predict_step` over `dataloader`; returns what it returned, joined in data set order.

        Args:
            dataloader: a loader or a data set, or a dict of them by name, which gives a dict of outputs.
            stream: return an iterator over the outputs of single batches, on the CPU, in data set order. It predicts
                as it is read, so that nothing is collected. On several processes all of them get all batches, and read
                to the same place.
            batch_size: as for `validate`.
            collate_fn: as for `validate`.
            pad_value: as for `validate`.

        Raises:
            ConfigurationError: `stream` with a dict or with `pad_value`.
        """
        if stream and (isinstance(dataloader, dict) or pad_value is not None):
            raise ConfigurationError(
                "predict(stream=True) gives the outputs of each batch as predict_step returned them: give one loader "
                "or data set, and no pad_value."
            )
        with self._context.fail_together():
            evaluator = self._ready_to_evaluate().evaluator
            loaders = evaluator.loaders_over(dataloader, batch_size, collate_fn, "the caller of predict")
            if stream:
                return evaluator.stream(Stage.PREDICT, loaders["default"])
            outputs = evaluator.evaluate(Stage.PREDICT, loaders, keep=True, pad_value=pad_value)
            return outputs if isinstance(dataloader, dict) else outputs["default"]

    def gather(self, outputs: Any) -> Any:
        """What every process gives, joined along dimension 0 in the order of the ranks, on every process.

        Tensors may differ in their first dimension; lists are put one after the other; dicts and tuples are joined
        item by item. All processes must call it together.
        """
        with self._context.fail_together():
            self._ready()
            return self.trainer_backend.gather(outputs)

    # --- checkpoints ---------------------------------------------------------------------------------------

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
            force: save even if no checkpoint is due.
            pin: also force a save, and exempt it from retention.
            path: of a folder that the checkpointer has nothing to do with; `resume=path` goes on from it. Asked for in
                the middle of something, an ordinary checkpoint is saved beside it.
            once: `"node"` writes `path` on the first process of each machine, for folders that they do not share.

        Called in the middle of something, from a hook or a step, it is done at the end of the step, or of the epoch
        when training has ended: a checkpoint holds a state from which a run can go on exactly.

        Raises:
            NonFiniteError: a loss, a gradient or the weights are inf or nan; nothing was written.
            CheckpointError: the checkpoint could not be written; older ones are intact.
        """
        with self._context.fail_together():
            run, saver = self._ready(), self._saver
            saver.pending_pin |= pin
            saver.pending_paths += [] if path is None else [(path, once)]
            if self._context.busy:
                saver.pending_save = True
                run.loop.wake()
            elif path is not None:
                saver.save_requested()
            else:
                saver.save(force or pin)

    def save_model_checkpoint(self) -> None:
        """Export the module's state alone; an export is never taken for a point to resume from."""
        with self._context.fail_together():
            self._saver.save_model(self.plan)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        part: str = "",
        card: Mapping[str, Any] | None = None,
        check_finite: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Write the module's state as the folder `path`, with a README; see `export_model`.

        Args:
            path: of the folder, or an address such as `s3://bucket/model`, where its manifest is written last.
            part: of the module, such as `"model"`: its weights alone, under its own names, with the configuration that
                its `from_pretrained` reads. Of a `PeftModel` the adapters alone.
            card: fields for the README's front matter, the metadata of a model card, such as `{"license": "mit"}`.
            check_finite: refuse weights and buffers that became inf or nan.
            overwrite: replace an export of other weights at `path`, with all files in it.

        Raises:
            NonFiniteError: the weights are inf or nan, and `check_finite` is True; nothing was written.
            CheckpointError: an export of other weights is there; nothing was written.
            ConfigurationError: the module has no such part.
        """
        if check_finite:
            self._ready().check_finite("No export was written; write check_finite=False to export it as it is.")
        self._saver.save_model(self.plan, path, part=part, card=card, overwrite=overwrite)

    def __repr__(self) -> str:
        """Module, backend, how far the run is, and its folder."""
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
        """The repr and the table of epochs, for notebooks."""
        return f"<p>{escape(repr(self))}</p>{self.history._repr_html_()}"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse a loop, which nothing would call.

        Raises:
            ConfigurationError: it is called `train_batch_loop` or `evaluate_batch_loop`.
        """
        if name in ("train_batch_loop", "evaluate_batch_loop"):
            raise ConfigurationError(
                f"trainer.{name} = ...: a Trainer has one loop, above all backends, so that their results agree. "
                "Replace a part of a step with a layer (register_layer), or the step with Trainer(train_step=...) or "
                "val_step=...; to write a loop, drive a stack of build_trainer_backend with train_dl."
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Refuse a copy, which would share the files, the processes and the counters of the run."""
        raise ConfigurationError(
            "a Trainer cannot be copied: it holds locks, files and processes of one run. Copy the module, "
            "copy.deepcopy(trainer.module), and give it to a new Trainer."
        )

    def __getstate__(self) -> dict[str, Any]:
        """What it was made of, counters, history and the states of callbacks: no process, file, lock or optimizer.

        Raises:
            ConfigurationError: it is training, or was given the layers of a backend as an object.
        """
        if self._training:
            raise ConfigurationError("a Trainer cannot be pickled while it trains. Pickle it before or after train().")
        names = ("trainer_backend", "checkpointer", "callbacks", "train_step", "val_step", "metrics")
        given = dict(zip(names, self._given, strict=True))
        if isinstance(given["trainer_backend"], TrainerBackend):
            raise ConfigurationError(
                "a Trainer with a backend object cannot be pickled, since its layers hold processes and handles. Write "
                "the backend as a string, with its options in backend_options."
            )
        state: dict[str, Any] = {"module": self.module, "args": self.args, **given}
        if self._run is not None:
            state["kept"] = {name: getattr(self, name).get_state() for name in _KEPT_IN_PICKLES}
            state["finished"] = self._finished
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make it anew. A copy of one that has trained evaluates and exports; it does not train further."""
        kept, finished = state.pop("kept", None), state.pop("finished", False)
        if kept is not None:  # the module has its weights already
            state["args"] = replace(state["args"], resume=False, init_weights_from=None, overwrite=False)
        Trainer.__init__(self, **state)
        for name, one in (kept or {}).items():
            getattr(self, name).update_state(one)
        self._finished, self._is_copy = finished, kept is not None

    def load_checkpoints(self) -> Checkpoint:
        """What the checkpointer finds to continue from, as `args.resume` says; an empty one if nothing."""
        return self._saver.load()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        mode: Literal["full", "weights_and_optimizer", "weights"] = "full",
    ) -> None:
        """Take what `path` holds, as a new trainer with `resume=path` does; `validate()` and `train()` go on from it.

        Args:
            path: of a checkpoint, or one of the words that `resume` takes: "last", "best".
            mode: what is taken, see `resume_mode` of `TrainerArguments`.

        Raises:
            ConfigurationError: a training or an evaluation is under way; or a layer, such as `dp`, has prepared this
                run and cannot do it again.
            CheckpointError: the checkpoint cannot be read.
        """
        if self._training or self._making_ready or self._context.busy:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}) was called in a training or an evaluation, whose state it would "
                "replace. Call it when train() or validate() has returned."
            )
        rigid = [layer.name for layer in self.trainer_backend.layers() if not layer.prepares_again]
        if self._run is not None and rigid:
            raise ConfigurationError(
                f"load_checkpoint({os.fspath(path)!r}): {', '.join(map(repr, rigid))} cannot prepare a module twice. "
                f"Make a new Trainer with TrainerArguments(resume={os.fspath(path)!r})."
            )
        before = self.args, self._run, self._evaluation, self._finished
        self.args = replace(self.args, resume=path, resume_mode=mode)
        self._run, self._evaluation, self._finished = None, None, False
        state = self.state.get_state()
        self.state.update_state(RunState(seed=self.args.seed).get_state())
        try:
            self._ready_to_evaluate()
        except BaseException:
            self.args, self._run, self._evaluation, self._finished = before
            self.state.update_state(state)
            raise
        for run in before[1:3]:
            if run is not None:
                run.data.close()

    def get_state(self) -> dict[str, Any]:
        """Counters, optimizers, schedulers and running means. Override to add to it."""
        return self._ready().loop.get_state()

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Take back what `get_state` returned; nothing for None.

        Raises:
            CheckpointMismatchError: optimizers or schedulers are not those of the checkpoint.
        """
        if state:
            run, fresh = self._ready(), self.args.reset_optimizers_schedulers
            run.loop.update_state(state, fresh_optimizers=fresh, log=run.log)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        part: str = "",
        card: Mapping[str, Any] | None = None,
        include: Iterable[Literal["checkpoint", "logs"]] = (),
        commit_message: str = "Upload a model trained with trainstack",
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Export the module's state and upload that.

        `part` and `card` are those of `export`. Other arguments and errors are those of the function `push_to_hub`.

        Args:
            include: what else goes into the commit: `"checkpoint"`, the newest of this run, as the folder `checkpoint`;
                `"logs"`, the files of writers and the report, as the folder `logs`.

        Returns:
            The URL of the commit.

        Raises:
            ConfigurationError: `include` names something else, or there is no checkpoint, or the run is private.
        """
        include = tuple(include)
        if set(include) - {"checkpoint", "logs"}:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): write 'checkpoint', 'logs' or both, in a tuple."
            )
        if include and self.trainer_backend.is_private:
            raise ConfigurationError(
                f"push_to_hub(include={include!r}): the run is private. Its guarantee covers the export alone, not all "
                "that checkpoints and logs hold. Leave include out."
            )
        options: dict[str, Any] = {"commit_message": commit_message, "private": private, "revision": revision}
        options |= {"token": token, "endpoint": endpoint}
        with self._context.fail_together():
            self._ready().check_finite("Nothing was uploaded.")
            return self._saver.push_to_hub(self.plan, repo_id, part=part, card=card, include=include, **options)

    # --- read-only -----------------------------------------------------------------------------------------

    @property
    def args(self) -> TrainerArguments:
        """The arguments in force; `on_init` of a callback may replace them."""
        return self._context.args

    @args.setter
    def args(self, args: TrainerArguments) -> None:
        self._context.args = args

    @property
    def plan(self) -> TrainingPlan:
        """All step arithmetic of the run."""
        return self._ready().data.plan

    @property
    def world(self) -> World:
        """This process's place among all, and its device."""
        return self._context.world

    @property
    def output_dir(self) -> Path:
        """The folder of the run, absolute. With `output_dir=None` it is chosen when the run is made.

        Raises:
            ConfigurationError: it is not chosen yet, in `on_init`.
        """
        directory = self._context.directory
        if not directory.is_settled and self._is_made and not self._making_ready:
            self._ready()
        return directory.path

    @property
    def log_dir(self) -> Path:
        """Where writers and the report write: `output_dir`, unless `writer_args` name another folder."""
        _ = self.output_dir
        return self._context.directory.log_dir

    @property
    def view(self) -> RunView:
        """Counters, sizes and loaders of the run, to be read."""
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
        """Samples a micro-batch, at most; the last one of a step may have fewer."""
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
            ConfigurationError: the plan exists already, a limit is no whole number from 1 on, or that of the arguments
                is a fraction.
        """
        if self._run is not None or self._making_ready:
            raise ConfigurationError(
                f"limit_steps_per_epoch(train={train!r}, val={val!r}) was called after the plan was made. Call it in "
                "on_init of a Callback, or before train()."
            )
        asked = {"max_train_steps_per_epoch": train, "max_val_steps_per_epoch": val}
        limits = {name: limit for name, limit in asked.items() if limit is not None}
        fractions = [name for name in limits if isinstance(getattr(self.args, name), float)]
        if fractions:
            raise ConfigurationError(
                f"limit_steps_per_epoch: {fractions[0]}={getattr(self.args, fractions[0])} is a fraction, and which of "
                "the two limits is lower is not known before the plan. Leave one of them out."
            )
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
        self._prepared("call_at_step").call_at_step(step, function)

    def end_epoch(self) -> None:
        """Leave out the rest of the epoch: its end follows after the step under way, or after its first step.

        Hooks, validation, schedulers and checkpoints of the epoch's end come as usual, then the next epoch begins. On
        several processes each one calls it in the same step. Checkpoints keep the request.

        Raises:
            ConfigurationError: no epoch is trained, the run is private, or it does not exist yet (in `on_init`).
        """
        self._prepared("end_epoch").end_epoch()

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training `parameters` from the next step on: no gradient, no weight decay, no momentum.

        They do not require gradients meanwhile. All ranks call it alike. A run that resumes in full has the same
        parameters frozen.

        Raises:
            ConfigurationError: the run is private, something is no parameter, a step is under way, or the optimizers do
                not exist yet.
        """
        self._prepared("freeze").freeze(parameters)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train `parameters` from the next step on: they require gradients. An optimizer must hold them.

        Raises:
            ConfigurationError: as for `freeze`.
        """
        self._prepared("unfreeze").unfreeze(parameters)

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
        self.events.weight_swap.swap_in(self.module)

    @property
    def keeps_trained_weights(self) -> bool:
        """Whether the module has other weights than the trained ones, see `keep_trained_weights`."""
        return self.events.weight_swap.is_active

    def post_processing(self) -> AbstractContextManager[None]:
        """A block in which a callback may change parameters and buffers of a private run.

        A private run refuses each change that no optimizer has made, since it may carry records into later steps
        without clipping and noise. Within the block compute from weights and public values alone, as for an average of
        weights: then the change is post-processing, which differential privacy covers. It does nothing in other runs.

        Raises:
            PrivacyError: something has been changed before the block.
        """
        self._prepared("post_processing")
        return self.trainer_backend.post_processing()

    def load_export(self, path: str | os.PathLike[str]) -> None:
        """Load the module's state from the folder `path`, which `export` has written, on all processes.

        The main process reads it. Call `keep_trained_weights` before it where the trained weights must not be lost.

        Raises:
            CheckpointError: the folder has no export, or a damaged one.
            PrivacyError: a run without a guarantee has trained it, and this run is private.
        """
        with self._context.fail_together():
            self._prepared("load_export")
            if self.trainer_backend.is_private:
                origin = self._saver.run_on_rank_zero(lambda: origin_of(Path(path)), "reading the origin of an export")
                self.trainer_backend.on_initial_weights(origin)
            state = self._saver.run_on_rank_zero(lambda: read_model(path), "reading an export of the model")
            self.module.update_state(state)

    # --- requests and subscriptions -------------------------------------------------------------------------

    def print(
        self,
        *values: Any,
        once: Literal["world", "node"] = "world",
        sep: str = " ",
        end: str = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """`print` on the main process only, or on the first process of each machine."""
        if self.is_main_process if once == "world" else self.world.local_rank == 0:
            print(*values, sep=sep, end=end, file=sys.stdout if file is None else file, flush=flush)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Let the trackers among the writers upload a file or a folder, on the main process.

        A private run uploads what it is given: the caller vouches that the file may be published.

        Args:
            path: it must stay as it is until the training has ended, since the upload may come later.
            name: in the tracker; by default that of the file.

        Raises:
            ConfigurationError: there is no such file, or no training is under way.
        """
        path = Path(path).absolute()
        reporter = self._writing("log_artifact")
        if self.is_main_process and not path.exists():
            raise ConfigurationError(f"log_artifact: there is no file or folder {path}. Write it first.")
        reporter.log_artifact(path, name or path.name)

    def _log_media(self, kind: str, name: str, make: Callable[[], Any], provenance: Provenance | None) -> None:
        self._writing(kind)
        self._context.sink.record_media(kind, name, make, provenance)

    def _writing(self, method: str) -> Reporter:
        """The reporter, whose writers are open, for `method`."""
        if self._reporter is None:
            raise ConfigurationError(
                f"trainer.{method} was called while no training is under way, so no writer is open. Call it in a hook "
                "or a subscriber of an event, such as on_end_val_epoch or on_train_end."
            )
        return self._reporter

    def request_stop(self, reason: str, *, then_raise: Exception | None = None) -> None:
        """Ask for the end of the training at the next step boundary; `train()` then returns.

        Hooks, other threads and signal handlers may call it, on one process or on all. Asked in a validation, the
        training ends after the epoch. An epoch under way is not ended: its hooks and its validation are left out, and
        `train()` called again goes on exactly there.

        Args:
            reason: what `stop_reason` says afterwards.
            then_raise: what `train()` raises on this process once the training has ended in good order. Ask on all
                processes to have it raised on all.
        """
        self._then_raise = then_raise
        self._stopper.request(reason)

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
        check_event(event)
        asked = any(value is not None for value in (every, once, when))
        counts = Filter(every=every, once=once, when=when) if asked else None

        def subscribe(function: Function) -> Function:
            self.events.add_function(event, function, counts, priority)
            return function

        return subscribe

    def off(self, function: Callable[..., Any]) -> None:
        """Take back all subscriptions of `function`; in the loop it takes effect with the next epoch.

        Raises:
            ConfigurationError: it has not subscribed to an event of this trainer.
        """
        if not self.events.remove(function):
            raise ConfigurationError(
                f"off({function!r}): it has not subscribed. Give the function or the bound method that was given to "
                "trainer.on(event)."
            )


def _listed(callbacks: Any) -> Any:
    return list(callbacks) if isinstance(callbacks, Iterable) else callbacks


_KEPT_IN_PICKLES = ("state", "user_state", "history", "events")


def find_lr(trainer: Trainer, *, start: float = 1e-7, end: float = 10.0, steps: int = 100) -> LRFinderResult:
    """Train for some steps while the learning rate grows from `start` to `end`, and undo all of it.

    It ends early once the loss is not finite or far above its minimum. A step that moves nothing, such as an overflow
    in fp16, is followed by another at the same rate. Hooks are not called, schedules stand still, and afterwards the
    run is what it was: weights, buffers, gradients, optimizers, modes, random numbers, history. The method is that of
    L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), with the steepest slope as the answer.

    Args:
        trainer: about to train, or between two calls of `train`. All processes call it together.
        start: the first learning rate; where parameter groups differ, that of the highest, the others in proportion to
            those that they were made with.
        end: the last.
        steps: global steps from one to the other.

    Raises:
        ConfigurationError: the range is none; the run is private, since the trial would spend privacy; the order of the
            training data is not the library's; or it is called from within training.
    """
    if not 0 < start < end or steps < 3:
        raise ConfigurationError(
            f"find_lr(start={start}, end={end}, steps={steps}): write 0 < start < end, and at least 3 steps."
        )
    from trainstack.trainer.run.lr_finder import try_rates

    run = trainer._ready()
    return try_rates(run.context, run.data, run.loop.work, run.modes.decide().modes, start, end, steps)


def _stack_of(given: TrainerBackend | str | None, args: TrainerArguments, owner: Trainer) -> TrainerBackend:
    if not isinstance(given, TrainerBackend):
        given = build_trainer_backend(given or args.resolved_backend, **args.layer_options)
    given.bind(owner)
    return given


def _settled(args: TrainerArguments, module: ModuleInterface, metrics: Any) -> TrainerArguments:
    """The arguments of a run of `module`; seeds the generators of the process if they ask for that."""
    if args.seed_everything:
        seed_everything(args.seed)
    return complete_monitor(limit_for_dev_run(args), module, metrics)


def _all_callbacks(args: TrainerArguments, given: Any) -> Iterable[Any] | None:
    """The callbacks `given`, with the default ones where the arguments ask for them."""
    if isinstance(given, Callback) or (isinstance(given, type) and issubclass(given, Callback)):
        given = [given]
    if not args.default_callbacks:
        return cast("Iterable[Any] | None", given)
    from trainstack.trainer.callbacks import with_defaults  # the ready-made ones are loaded when used

    return with_defaults(given)
