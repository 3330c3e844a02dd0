"""`Trainer` trains, validates, tests and predicts with a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from trainstack.backends import TrainerBackend, build_trainer_backend
from trainstack.checkpointing import AbstractCheckpointer, DefaultCheckpointer
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
from trainstack.trainer.arguments import TrainerArguments, limit_for_dev_run
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.intervals import whole_steps
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import ModuleExtras
from trainstack.trainer.core.random_state import seed_everything
from trainstack.trainer.core.state import RunState, UserState
from trainstack.trainer.events import Callback, Event, Events
from trainstack.trainer.mixins.control import ControlMixin
from trainstack.trainer.mixins.evaluation import EvaluationMixin
from trainstack.trainer.mixins.output import OutputMixin
from trainstack.trainer.mixins.properties import PropertiesMixin
from trainstack.trainer.mixins.saving import SavingMixin
from trainstack.trainer.module_checks import check_parts, complete_monitor, refuse_argument_of_train
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.resume.checkpoint_states import check_storable
from trainstack.trainer.resume.saving import Saver, save_after_exception
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

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement
    from trainstack.trainer.reporting.reporter import Reporter
    from trainstack.trainer.run.lr_finder import LRFinderResult
    from trainstack.trainer.run.run import Run


_ELSEWHERE = {
    "add_callback_fn": "trainer.on(Event...)(function)",
    "create_run_config": "trainer.args and trainer.plan",
    "evaluate": "trainer.validate(data), or trainer.test(data)",
    "compile": "TrainerArguments(compile=True)",
    "fit": "trainer.train()",
    "load": 'TrainerArguments(resume="auto"), or init_weights_from=... for the weights alone',
    "load_checkpoint": 'TrainerArguments(resume="auto"), or init_weights_from=... for the weights alone',
    "load_state_dict": "trainer.module.load_state_dict(...)",
    "get_num_epochs": "trainer.args.epochs",
    "get_num_update_steps": "trainer.plan.total_steps",
    "run": "trainer.train()",
    "run_config": "trainer.args and trainer.plan",
    "run_history": "trainer.history",
    "run_evaluation": "trainer.validate(data), or trainer.test(data)",
    "save": "trainer.export(path)",
    "save_model": "trainer.export(path)",
    "state_dict": "trainer.module.state_dict()",
    "test_model": "trainer.test(data)",
    "train_model": "trainer.train()",
}
"""Members of the trainers of pytorch-accelerated, fastNLP, Lightning and transformers, and their counterparts."""


_NO_MODULE = cast("ModuleInterface", None)
"""Lets the library refuse a trainer without a module, and name the place of its other arguments."""


class Trainer(EvaluationMixin, SavingMixin, ControlMixin, OutputMixin, PropertiesMixin):
    """Trains a module as specified by its arguments.

    Args:
        module: model, steps, optimizers and data.
        args: all options of the run; `TrainerArguments()` by default.
        trainer_backend: a stack of layers, or a backend string; overrides `args.backend`.
        checkpointer: saves and finds checkpoints; by default a `DefaultCheckpointer` that saves in `args.output_dir`.
        run_history: object in which metrics are recorded; a new `RunHistory` by default.
        callbacks: objects whose methods subscribe to events, or classes of them; one of these, or a list. Those of the
            module's `get_callbacks` come after them.
        train_step: function that replaces the module's method `train_step`; it computes the loss. To replace the
            optimizer step, write a layer, see `register_layer`.
        val_step: function that replaces the module's method `val_step`.
        metrics: metrics by name, objects with `update`, `compute` and `reset`; instead of the module's.
        unknown: refused, with the place of the argument.

    Attributes:
        module: the module.
        trainer_backend: the stack of layers.
        checkpointer: saves and finds checkpoints.
        history: the metrics of the run.
        events: the subscribers of events; `on` adds to them.
        state: the counters of the run.
        user_state: your own values, saved with checkpoints.
        warm_start_report: tensors that `init_weights_from` has loaded; None before, and if nothing was loaded.

    Raises:
        ConfigurationError: an argument has the wrong type, or the backend string is invalid.

    Examples:
        >>> trainer = ts.Trainer(
        ...     module, args, callbacks=[ts.callbacks.EarlyStopping(patience=3)]
        ... )
        >>> trainer.train()
        >>> trainer.global_steps_finished
        8
        >>> loss = trainer.history.get_latest_metric("val/loss")
        >>> folder = trainer.export("line")
    """

    module: ModuleInterface
    trainer_backend: TrainerBackend
    checkpointer: DefaultCheckpointer | AbstractCheckpointer
    history: RunHistory
    events: Events
    state: RunState
    user_state: UserState

    def __init__(
        self,
        module: ModuleInterface = _NO_MODULE,
        args: TrainerArguments | None = None,
        trainer_backend: TrainerBackend | str | None = None,
        checkpointer: AbstractCheckpointer | None = None,
        *,
        run_history: RunHistory | None = None,
        callbacks: Callback | type[Callback] | Iterable[Callback | type[Callback]] | None = None,
        train_step: Callable[..., Any] | None = None,
        val_step: Callable[..., Any] | None = None,
        metrics: Any = None,
        **unknown: NoReturn,
    ) -> None:
        self._given = (trainer_backend, checkpointer, callbacks := _listed(callbacks), train_step, val_step, metrics)
        args = check_parts(type(self), module, args, trainer_backend, checkpointer, train_step, val_step, unknown)
        args = _settled(args, module, trainer_backend, metrics, checkpointer)
        trainer_backend, checkpointer = _stack_of(trainer_backend, args, self), _checkpointer_of(checkpointer, args)
        self._context = context = RunContext(
            module=module,
            args=args,
            stack=trainer_backend,
            checkpointer=checkpointer,
            history=RunHistory() if run_history is None else run_history,
            events=Events(self, module, _all_callbacks(args, module, callbacks), RunLogger(args.log_level)),
            state=RunState(seed=args.seed),
            user_state=UserState(),
            directory=RunDirectory(args, module, checkpointer, private=trainer_backend.is_private),
            train_step=train_step,
            val_step=val_step,
            extras=ModuleExtras(module),
        )
        context.directory.set_in_code = _set_in_code(*self._given)
        self.module, self.trainer_backend, self.checkpointer = module, trainer_backend, checkpointer
        self.history, self.events = context.history, context.events
        self.state, self.user_state = context.state, context.user_state
        self._saver, self._stopper, self._metrics = Saver(context, self._take_checkpoint), Stopper(), metrics
        self._give_signals_back = end_when_idle(self, enabled=args.handle_signals)
        self.events.fire(Event.INIT)
        self._is_made = True

    def train(self, *, epochs: int | None = None, max_steps: int | float | None = None, **unknown: NoReturn) -> None:
        """Train the remaining epochs, validate after each, save checkpoints, and export the model at the end.

        For a finished run it does nothing. After an interruption or an exception, a second call continues where it
        stopped; a hook that raised an error counts as called. A run that `request_stop` has stopped counts as finished:
        the model is exported and `on_end_train` called.

        Args:
            epochs: total number of epochs, instead of the value in the arguments.
            max_steps: total number of global steps, instead of the value in the arguments.
            unknown: always an error, which names the right place for the argument.

        Raises:
            Preempted: after SIGTERM, SIGHUP or SIGUSR1, when the state is saved. Ends the process with exit code 75.
            KeyboardInterrupt: after Ctrl-C, when the state is saved; or after a second Ctrl-C.
            ModuleContractError: the module violates its contract; the message has the reason.
            NonFiniteError: a loss or gradient became inf or nan.
            PeerError: another process has failed, or did not join a collective in time.
            CheckpointError: the checkpoint to resume from cannot be read, or a checkpoint cannot be written.
            LeaseError: another process owns the directory of the run, or has taken it over.
            ConfigurationError: it was called from a hook or a step of its run, or with an unknown argument.
        """
        if unknown:
            refuse_argument_of_train(next(iter(unknown)))
        if self._training:
            raise ConfigurationError(
                f"train() was called while it runs (after global step {self.state.global_step}), from a hook or a "
                "step. Call it again after it has returned, with train(epochs=...) for more epochs."
            )
        self._refuse_copy(epochs, max_steps)
        if epochs is not None or max_steps is not None:
            self._extend(epochs, max_steps)
        stopper, saver, late, then_raise = self._stopper, self._saver, None, None
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
                self._handle_early_signal(error)
                raise
            if self.args.on_interrupt == "return" and self.world.size > 1:
                raise ConfigurationError(
                    "on_interrupt='return' with several processes: a launcher ends the others when Ctrl-C is pressed. "
                    "Remove it, and continue in another start with resume='auto'."
                )
            if not self._finished:
                late, then_raise = self._train_until_stopped(run)
                stopper.leave_together()
        if not self._finished or late is not None:
            log = self._context.log if self.is_main_process else None
            returns = self.args.on_interrupt == "return"
            raise_for_signal(stopper.agreed, late, saver.stop_message(), log, returns=returns)
        if then_raise is not None:
            raise then_raise

    def _refuse_copy(self, epochs: int | None, max_steps: int | float | None) -> None:
        if self._is_copy and not (self._finished and epochs is max_steps is None):
            raise ConfigurationError(
                "this is a pickled copy of a Trainer that has trained. It has no optimizer states, so it can only "
                "evaluate, predict and export. To train further make a new Trainer with resume=True, which loads the "
                "last checkpoint."
            )

    def _handle_early_signal(self, error: BaseException) -> None:
        """After `error` ended `train()` before training began, record a signal as its cause.

        If a rank is lost after a signal came to this process, it has most likely got the signal too.

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
            from trainstack.trainer.reporting.report.facts import record_interruption  # rarely needed

            directory = self._context.directory
            if directory.may_note(self.args):
                record_interruption(directory.log_dir, type(self.module).__name__, reason)

    def _train_until_stopped(self, run: Run) -> tuple[Request | None, Exception | None]:
        """Train a prepared run; return a signal that came too late to stop it, and an error to raise, or None."""
        from trainstack.trainer.data.loading import explain_worker_deaths
        from trainstack.trainer.reporting.reporter import Reporter

        context, saver, stopper = self._context, self._saver, self._stopper
        reporter = self._reporter = Reporter(context)
        self._training = True
        with stop_after(stopper, self.args):
            try:
                with context.fail_together():
                    self._train(run, reporter)
            except BaseException as error:  # fail_together has informed the other processes
                # Order: current writes must end first. Then subscribers run, because the save after them keeps their
                # states. The report is last, because it lists all files.
                saver.finish_after(error)
                explain_worker_deaths(error)
                run.end_recording("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
                self.events.fail(error)
                if run.start.begun is not None:  # a refused start has used no metric and leaves the account as it was
                    with suppress(TrainstackError):  # the ledger is lost; the statement on disk has all planned steps
                        run.note_stop()
                wanted = self.args.save_on_exception
                if wanted is True or (isinstance(wanted, tuple) and isinstance(error, wanted)):
                    save_after_exception(error, context, self._take_checkpoint, within_s=saver.save_time_budget.seconds)
                reporter.fail(error)
                raise
            finally:
                run.end_recording("failed")  # has an effect only if an interrupt has skipped the lines above
                run.leave_training()
                self._training = context.busy = False
                saver.pending_save = saver.pending_pin = False  # no step boundary follows; paths wait for a later one
                self._reporter = None
                reporter.close()
                ended = stopper.end()
                if context.world.is_main:
                    context.directory.end(finished=self._finished)
        return ended

    def _train(self, run: Run, reporter: Reporter) -> None:
        from trainstack.trainer.run.memory_fitting import fit_micro_batch
        from trainstack.trainer.run.preflight import already_finished_message, check_can_train

        context, state, saver, stopper = self._context, self.state, self._saver, self._stopper
        plan, work, every = run.data.plan, run.loop.work, self.checkpointer.every_n_steps
        save_every = None if every is None else whole_steps("every_n_steps", every, plan)
        run.due.validation.trainer = self
        resumed = state.global_step or None
        stopper.begin(run.loop, self.world)
        check_storable(context, self.get_state)
        saver.begin_run(run.loop.wake, resumed=resumed is not None)
        run.begin_training()
        if self.args.fit_micro_batch:
            fit_micro_batch(context, run.data, work)
            plan = run.data.plan
        reporter.open(run.data, work, run.loop.schedules, resumed)
        if run.is_over:
            reporter.text(already_finished_message(context, plan))
        else:
            check_can_train(context, run.exhausted_reason, lambda: run.evaluator.loaders_of(Stage.VAL))
        if self.args.sanity_val_steps:
            run.sanity_check(self.args.sanity_val_steps)
        state.current_step = state.global_step  # a step that failed is not the current step any more
        try:
            with suppress(Stopped):
                self.events.begin_train()
                run.fire_train_begin()
                if not run.is_over:
                    run.begin_recording()
                stopper.stop_if_requested()
                run.validate_at_start()
                while not run.is_over and run.exhausted_reason is None:
                    run.train_epoch(reporter, self.save_checkpoint, save_every)
        except StopTraining as stop:
            raise ModuleContractError(
                "StopTraining was raised in a step, a loader or a metric, which cannot end half-way. Raise it in a "
                "hook (on_end_backward, on_end_train_step, on_end_val_epoch, ...) or in a subscriber of an event, or "
                "call trainer.request_stop(reason), which lets the current step finish."
            ) from stop
        run.end(reporter, self._end_with_export)

    def _end_with_export(self) -> None:
        self.save_model_checkpoint()
        assert self._run is not None
        self._finished = self._run.is_over  # before on_end_train, so that it is called once

    def _extend(self, epochs: int | None, max_steps: int | float | None) -> None:
        """Extend the run; an extension that raises an error changes nothing.

        Existing schedulers keep their length. Fractions of the run are fractions of the longer run. A `fast_dev_run`
        keeps its end.
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
        """Return the current guarantee to the people whose records are in the training data: `.text`, `.to_json()`."""
        self._ready()
        return self.trainer_backend.privacy_statement()

    def close(self) -> None:
        """Release external resources: the loader's workers, and the backend's process group."""
        for run in (self._run, self._evaluation):
            if run is not None:
                run.data.close()
        self._saver.owner.release()
        self.trainer_backend.close()
        self._give_signals_back()

    def __getattr__(self, name: str) -> Any:
        """Name the counterpart of a member of another library's trainer.

        Raises:
            AttributeError: always; Python calls this method only for missing attributes.
        """
        if name in _ELSEWHERE:
            raise AttributeError(f"a Trainer has no {name!r}. Write {_ELSEWHERE[name]}.", name=name, obj=self)
        return super().__getattribute__(name)  # repeats the lookup, so that an error in a property keeps its message

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, except a loop, which would never be called.

        Raises:
            ConfigurationError: the name is `train_batch_loop` or `evaluate_batch_loop`.
        """
        if name in ("train_batch_loop", "evaluate_batch_loop"):
            raise ConfigurationError(
                f"trainer.{name} = ...: a Trainer has one loop, above all backends, so that their results agree. "
                "Replace a part of a step with a layer (register_layer), or the step with Trainer(train_step=...) or "
                "val_step=...; to write a loop, drive a stack of build_trainer_backend with train_dl."
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Raise an error, because a copy would share the files, the processes and the counters of the run."""
        raise ConfigurationError(
            "a Trainer cannot be copied: it holds locks, files and processes of one run. Copy the module, "
            "copy.deepcopy(trainer.module), and give it to a new Trainer."
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments, counters, history and states of callbacks: no processes, files, locks or optimizers.

        Raises:
            ConfigurationError: training is running, or the backend was given as an object.
        """
        if self._training:
            raise ConfigurationError("a Trainer cannot be pickled while it trains. Pickle it before or after train().")
        given = dict(zip(_GIVEN, self._given, strict=True))
        if isinstance(given["trainer_backend"], TrainerBackend):
            raise ConfigurationError(
                "a Trainer with a backend object cannot be pickled, because its layers hold processes and handles. "
                "Write the backend as a string, with its options in backend_options."
            )
        state: dict[str, Any] = {"module": self.module, "args": self.args, **given}
        if self._run is not None:
            state["kept"] = {name: getattr(self, name).get_state() for name in _KEPT_IN_PICKLES}
            state["lineage"] = self._context.lineage
            state["finished"] = self._finished
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the trainer again. A copy of a trained one can evaluate and export, but not train further."""
        kept, finished, lineage = state.pop("kept", None), state.pop("finished", False), state.pop("lineage", None)
        if kept is not None:  # the module has its weights already
            state["args"] = replace(state["args"], resume=False, init_weights_from=None, overwrite=False)
        Trainer.__init__(self, **state)
        for name, one in (kept or {}).items():
            getattr(self, name).update_state(one)
        if lineage is not None:
            self._context.lineage = lineage
        self._finished, self._is_copy = finished, kept is not None
        self._copied_states = kept and kept["events"]


_GIVEN = ("trainer_backend", "checkpointer", "callbacks", "train_step", "val_step", "metrics")
"""The arguments of `Trainer` that `TrainerArguments` does not hold, in the order of `Trainer._given`."""


def _listed(callbacks: Any) -> Any:
    """Return `callbacks`, a single one too, as a list; `Events` refuses other values."""
    if isinstance(callbacks, Callback) or (isinstance(callbacks, type) and issubclass(callbacks, Callback)):
        return [callbacks]
    return list(callbacks) if isinstance(callbacks, Iterable) else callbacks


def _set_in_code(*given: Any) -> list[str]:
    """Return the names of those of `_GIVEN` that a file of arguments does not have, with the classes of callbacks."""
    found = {name: value for name, value in zip(_GIVEN, given, strict=True) if not isinstance(value, str | None)}
    classes = [one if isinstance(one, type) else type(one) for one in found.pop("callbacks", [])]
    names = f"callbacks ({', '.join(one.__name__ for one in classes)})"
    return [*found, *([names] if classes else [])]


_KEPT_IN_PICKLES = ("state", "user_state", "history", "events")


def find_lr(trainer: Trainer, *, start: float = 1e-7, end: float = 10.0, steps: int = 100) -> LRFinderResult:
    """Find a learning rate: train some steps while the rate grows from `start` to `end`, and undo all of them.

    It ends early if the loss is not finite or far above its minimum. A step that changes no weights, such as after an
    overflow in fp16, is repeated with another batch at the same rate. Hooks are not called and schedulers do not step.
    Afterwards weights, buffers, gradients, optimizers, modes, random numbers and history are restored. The method is
    that of L. N. Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), with the steepest slope as the
    result.

    Args:
        trainer: trainer before training, or between two calls of `train`. All processes call it together.
        start: the first learning rate; if parameter groups differ, that of the group with the highest rate, and the
            others in proportion to their initial rates.
        end: the last learning rate.
        steps: number of global steps, at least 3.

    Returns:
        The suggested rate and the measured losses.

    Raises:
        ConfigurationError: the range is invalid; the run is private, because the trial would spend privacy; the
            training data have a custom order; or it is called during training.

    Examples:
        >>> found = ts.find_lr(ts.Trainer(module, args), steps=20)
        >>> args = replace(args, epochs=3)
        >>> 0 < found.suggestion < 10
        True
    """
    if not 0 < start < end or steps < 3:  # a slope needs two differences
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


def _checkpointer_of(given: AbstractCheckpointer | None, args: TrainerArguments) -> AbstractCheckpointer:
    return DefaultCheckpointer(args.placed_checkpointer_args) if given is None or args.fast_dev_run else given


def _settled(
    args: TrainerArguments, module: ModuleInterface, backend: Any, metrics: Any, checkpointer: Any
) -> TrainerArguments:
    """Return the arguments of a run of `module`; seeds the generators of the process if `seed_everything` is set."""
    if isinstance(backend, str):
        args = replace(args, backend=backend)
    if args.seed_everything:
        seed_everything(args.seed)
    return complete_monitor(limit_for_dev_run(args), module, metrics, checkpointer)


def _all_callbacks(args: TrainerArguments, module: ModuleInterface, given: Any) -> Iterable[Any] | None:
    """Return the callbacks `given`, those of the module, and the default ones if the arguments require them."""
    own = module.get_callbacks()
    if not isinstance(own, Iterable):
        raise ModuleContractError(
            f"{type(module).__name__}.get_callbacks returned {own!r}. Return a list of callbacks, or [] for none."
        )
    if given is None or isinstance(given, list):
        given = [*(given or ()), *own]
    if not args.default_callbacks:
        return cast("Iterable[Any] | None", given)
    from trainstack.trainer.callbacks import with_defaults  # not at the top: loads all ready-made callbacks

    return with_defaults(given)
