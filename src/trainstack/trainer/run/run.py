"""`Run` trains a prepared module epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from trainstack.backends import TrainerBackend, World
from trainstack.backends.random_streams import RandomStreams
from trainstack.backends.trained_before import trained_before
from trainstack.checkpointing import DefaultCheckpointer
from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.stage import Stage
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.context import RunContext, ignore, nothing
from trainstack.trainer.core.changes import Description
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import isolated_rng, separate_ranks
from trainstack.trainer.core.shards import has_shards
from trainstack.trainer.core.state import EpochEnd, RunState
from trainstack.trainer.core.tensors import (
    check_finite_weights,
    check_storable_buffers,
    nonfinite_buffers,
    refuse_diverged,
)
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.evaluation.collector import as_arguments
from trainstack.trainer.evaluation.evaluator import Evaluator
from trainstack.trainer.evaluation.loader_pass import evaluation_pass
from trainstack.trainer.evaluation.metrics import Metrics
from trainstack.trainer.events import Event, Events
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.events.optimizer_modes import OptimizerModes
from trainstack.trainer.module_checks import check_signatures
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.recording.recorder import Recorder
from trainstack.trainer.recording.starting import begin_recording
from trainstack.trainer.reporting.loss_meter import shown_indices
from trainstack.trainer.reporting.reporter import Reporter
from trainstack.trainer.resume.lineage import note_data
from trainstack.trainer.resume.module_generators import renew_generators
from trainstack.trainer.resume.saving import Saver
from trainstack.trainer.run.agreement import agree_on_start, agree_on_values
from trainstack.trainer.run.beginnings import Beginnings
from trainstack.trainer.run.due_work import DueWork
from trainstack.trainer.run.epoch_start import EpochStart
from trainstack.trainer.run.loop import train_steps
from trainstack.trainer.run.making import connect_module, make_hooks, make_loop
from trainstack.trainer.run.preflight import check_monitors, check_schedule_lengths
from trainstack.trainer.run.step_checks import StepChecks
from trainstack.trainer.run.step_verifier import make_verifier
from trainstack.trainer.run.stopping import Stopped, Stopper
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.run.training_modes import TrainingModes
from trainstack.trainer.run.trial import restore_after
from trainstack.trainer.start_description import describe_code, describe_start
from trainstack.trainer.tracking.history import RunHistory


def failure_location(state: RunState, data: TrainingData, position: int | None, rank: int = 0) -> str:
    """Describe the place of an exception within the training: epoch, step, micro-batch and samples.

    `position` counts the micro-batches of the step, from 0. It is None outside of forward and backward passes.
    """
    plan = data.plan
    place = f"in epoch {state.epoch}, global step {state.current_step}"
    place = f"on rank {rank}, {place}" if plan.world_size > 1 else place
    if position is None:
        return place
    if plan.accumulation > 1:
        place += f", micro-batch {position} of {plan.accumulation}"
    indices = data.current_indices(state, position)  # computed here, so that other steps cost nothing
    if indices is None:
        return place
    return f"{place}, with the samples {shown_indices(indices)} of the training data set"


class Run:
    """A module that a stack has prepared, with its data and its training loop.

    Args:
        context: the context of the trainer. The state of its module is already restored.
        stopper: tells whether the run is to stop. The training data check it, too.
        saver: writes the run's checkpoints.
        metrics: the metrics of the trainer; None for those of the module.
        trains: False for a run that only evaluates, without training data and optimizers.

    Attributes:
        data: the training data and the plan.
        evaluator: runs validation, test and prediction.
        loop: the parts and counters of the training loop.
        due: does the work between steps.
        start: begins epochs.
        modes: the modes in which the parts of the module train.
        may_be_nonfinite: names of buffers that held inf or nan when the run was made.
        resumed_log: the run id of the resumed checkpoint, and the heads of its step logs.
    """

    context: RunContext
    module: ModuleInterface
    stack: TrainerBackend
    world: World
    history: RunHistory
    events: Events
    log: RunLogger
    stopper: Stopper
    saver: Saver
    state: RunState
    modes: TrainingModes
    streams: RandomStreams | None
    data: TrainingData
    due: DueWork
    hooks: Hooks
    loop: TrainLoop
    beginnings: Beginnings
    step_checks: StepChecks
    evaluator: Evaluator
    start: EpochStart
    may_be_nonfinite: frozenset[str]
    resumed_log: tuple[str | None, Sequence[str | None]] = (None, ())
    _recorder: Recorder | None = None
    _code: Mapping[str, str] | None = None
    _compare_values = True  # before the next step
    _compared_at = -1  # the last global step after which the weights of all ranks were compared
    _epoch_unsaved = _ranks_are_separate = False

    def __init__(
        self, context: RunContext, stopper: Stopper, saver: Saver, metrics: Any = None, *, trains: bool = True
    ) -> None:
        self.context, self.stopper, self.saver = context, stopper, saver
        self.module, self.stack, self.world, self.state = context.module, context.stack, context.world, context.state
        self.history, self.events, self.log = context.history, context.events, context.log
        module, args, world, state = self.module, context.args, self.world, self.state
        made_metrics = Metrics(metrics, module)
        self.modes = TrainingModes(module, self.stack.is_private)
        check_signatures(module, self.log, context.val_step, self.stack)
        self.streams = streams = self.stack.random_streams(world)
        with isolated_rng(streams or mix(state.seed), world.device):
            records = self.stack.public_dataset_size
            self.data = TrainingData(module, args, world, state, self.log, records, streams, asks=trains)
        saves = context.checkpointer.is_due(0, force=True)
        self._hash_samples(saves)
        self.due = DueWork(context, self.data, stopper, saver)
        connect_module(context, self.data)
        self.hooks = make_hooks(context, stopper)
        self.loop = make_loop(context, self.data, self.hooks, self.due.log_interval, trains=trains, saves=saves)
        self.events.optimizer_modes = OptimizerModes(self.loop.work.optimizers)
        if not self.stack.is_private:
            self.loop.meter.find_samples = self.data.indices_of
        self.beginnings = Beginnings(context, self.loop)
        self.step_checks = StepChecks(context, self.loop, made_metrics)
        self.evaluator = Evaluator(
            context,
            metrics=made_metrics,
            data=self.data,
            hooks=self.hooks,
            stopper=stopper,
            validations=self.beginnings,
            work=lambda: self.loop.work,
        )
        self.due.loop, self.due.evaluator = self.loop, self.evaluator
        parts = (self.loop, self.hooks, self.modes, self.beginnings, self.due)
        self.start = EpochStart(context, self.data, *parts, streams, saves=saves)
        self.may_be_nonfinite = nonfinite_buffers(self.stack, module)
        if isinstance(context.checkpointer, DefaultCheckpointer) and context.checkpointer.args.checkpoint:
            check_storable_buffers(module)

    def _hash_samples(self, saves: bool) -> None:
        if (saves or self.world.size > 1) and not self.stack.is_private:  # a private run stores nothing about samples
            self.data.sample_hashes = self.data.hash_samples()
            self.data.hashes_epochs = saves and self.world.is_main and bool(self.data.sample_hashes)
        note_data(self.context, self.data)

    def describe(self) -> Description:
        """The description of everything that determines the results, for checkpoints and the step log."""
        if self._code is None:
            self._code = describe_code(self.context)
        return describe_start(self.context, self.data, self._code)

    def train_epoch(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        """Train the rest of the current epoch, validate and save.

        `save` writes a checkpoint. It is called with True at the global steps that are multiples of `save_every`.

        Raises:
            Stopped: a stop was requested. The run is at a step boundary, or between two validation batches.
        """
        state = self.state
        self.context.busy = True
        self.due.begin_epoch(reporter, save, save_every)
        if self._epoch_unsaved:  # the save at the end of the last epoch has failed
            self._save_epoch()
        steps = self.start.begin()
        reporter.start_epoch(state, self.data.plan)
        if not state.epoch_end:
            self._train_steps(steps)
            if self.is_over:
                reporter.progress.end_epoch()
                return
        self._end_epoch(reporter)
        self._epoch_unsaved = True
        reporter.end_epoch(state, self.data.plan)
        self._save_epoch()
        self.stopper.stop_if_requested()

    def _save_epoch(self) -> None:
        self.due.save_epoch()
        self._epoch_unsaved = False

    def _end_epoch(self, reporter: Reporter) -> None:
        """Do the remaining parts of the end of the epoch, each once, and advance to the next epoch."""
        # The order matters: hooks may log the monitored metric, schedulers read it after the validation. Each part is
        # marked as done before user code runs in it; the validation only after it, because it can be continued.
        state, monitor = self.state, self.context.args.monitor
        if state.epoch_end < EpochEnd.LOSS:
            self.data.compare_streams()
            self.data.lengths.report(self.data.plan, state)
        if state.begin_epoch_end(EpochEnd.LOSS):
            reporter.end_training_epoch(state, self.loop.meter)
        if state.begin_epoch_end(EpochEnd.HOOKS):
            self._end_train_epoch()
        if state.epoch_end < EpochEnd.VALIDATION and self.due.validation.after_epoch(state.epoch):
            self.evaluator.validate(reporter)  # a signal may interrupt it
        state.begin_epoch_end(EpochEnd.VALIDATION)
        if state.epoch_end < EpochEnd.SCHEDULERS:
            may_lack = self.due.validation.is_sparse and not self.evaluator.has_validated
            if monitor is not None and self.evaluator.has_validated:
                self.history.require_usable(monitor, "TrainerArguments.monitor")
                self.history.get_latest_metric(monitor)  # raises an error with the existing names if it is missing
            self.loop.schedules.end_epoch(self.history, state.epoch, self.world.comm, may_lack=may_lack)
        state.begin_epoch_end(EpochEnd.SCHEDULERS)
        if state.begin_epoch_end(EpochEnd.EVENT):
            self.events.fire(Event.EPOCH_END, state.epoch)
        state.finish_epoch()

    def _train_steps(self, steps: Iterator[StepBatches]) -> None:
        state, due = self.state, self.due
        self.loop.on_due = due.attend
        due.set_next_step()
        if self._compare_values:
            agree_on_values(self.context)
            self._compare_values = False
        goes_on = state.interrupted or state.validates  # an interrupted validation continues first
        due.attended = -1 if goes_on else state.global_step
        state.due_part = state.due_part if goes_on else 0
        try:
            with suppress(Stopped):
                if goes_on:
                    due.attend()
                left = islice(steps, self._steps_left())
                recorded = left if self._recorder is None else self._recorder.watch(left)
                with self.step_checks.watching(recorded) as watched:
                    train_steps(self.loop, watched)
        except BaseException as error:
            step, attended = state.global_step, due.attended
            is_due = attended < 0 or step >= self.loop.next_due_step
            state.interrupted = state.current_step == step != attended and is_due
            if isinstance(error, Exception):
                annotate(error, failure_location(state, self.data, self.loop.failed_in, self.world.rank))
            raise
        self.stopper.stop_if_requested()
        if not state.steps_in_epoch:
            raise ModuleContractError(
                f"the loader that get_train_dataloader returned for epoch {state.epoch} gave no batch at all. Return a "
                "loader with data. If it is an iterator, create a new one in each call."
            )

    def _steps_left(self) -> int | None:
        """The largest number of steps left in the current epoch; None if only the data limit it."""
        cap, most = self.data.plan.max_steps_per_epoch, self.data.plan.max_steps
        left = [] if cap is None else [cap - self.state.steps_in_epoch]
        left += [] if most is None else [most - self.state.global_step]
        left += [0 if self.state.steps_in_epoch else 1] if self.state.ends_epoch else []
        return max(0, min(left)) if left else None

    def sanity_check(self, batches: int) -> None:
        """Run the validation on the first `batches` of each loader (-1: on all), and restore all states.

        Raises:
            ConfigurationError: the monitored metric lacks the prefix of a metric of the validation.
        """
        context, seed = self.context, mix(self.state.seed)
        with isolated_rng(seed, self.world.device):
            self.events.fire(Event.SANITY_CHECK_BEGIN)
            with restore_after(context, self.loop.work, seed, f"sanity_val_steps={batches}", trains=False):
                results = self.evaluator.sanity_check(None if batches < 0 else batches)
            self.events.fire(Event.SANITY_CHECK_END, results)
        monitor = context.args.monitor
        meant = next((name for name in results if name.endswith(f"/{monitor}")), None)
        if monitor not in results and meant is not None:
            raise ConfigurationError(f"monitor={monitor!r}: the validation gives {meant!r}. Write monitor={meant!r}.")

    def validate_at_start(self) -> None:
        """Validate before the first global step, if the arguments ask for it, and record the results."""
        if self.context.args.validate_at_start and not self.state.global_step:
            self.evaluator.run_standalone(Stage.VAL, None, log=True, keep_outputs=False)

    def fire_train_begin(self) -> None:
        """Call the subscribers of `TRAIN_BEGIN`."""
        with self.beginnings.train_begin(over=self.is_over):
            self.events.fire(Event.TRAIN_BEGIN)

    def begin_training(self) -> None:
        """Prepare a call of `train()`.

        In a new run, the ranks draw different random numbers from here on. Initial weights are made before.

        Raises:
            ConfigurationError: the ranks differ, or `verify_replay` is set and steps cannot be run twice.
            PrivacyError: a metric controls a private training and is computed from records without noise.
        """
        check_monitors(self.context, self.loop.schedules)
        self.loop.verifier = make_verifier(self.context, self.loop.work, self.loop.makes_updates)
        agree_on_start(self.context, self.data, self.loop.work, self.loop.schedules)
        self._compare_values = True
        if not self.stack.is_private:
            trained_before.note(self.module.parameters(), None)
        if self.streams is not None:
            renew_generators(self.context, self.streams, "training")
        elif self.start.pending_rng is None and not self._ranks_are_separate:
            separate_ranks(self.world)
        self._ranks_are_separate = True
        self.modes.begin(self.log)
        for timer in (self.due.validation.timer, self.due.save_timer):
            timer.begin(self.state.global_step)

    def begin_recording(self) -> None:
        """Record the following steps, if the arguments ask for that. All processes call this together."""
        loop, context = self.loop, self.context
        resumed, self.resumed_log = self.resumed_log, (None, ())
        recorder = begin_recording(context, self.data, loop.work.optimizers, self.due.log_interval, resumed)
        if recorder is None:
            return
        self._recorder, loop.records_rates, loop.meter.on_entries = recorder, True, recorder.take
        if recorder.records_tensors:
            loop.before_update, loop.after_update = recorder.before_update, recorder.after_update
        context.log_head, context.note_saved = recorder.head, recorder.note_checkpoint

    def end_recording(self, status: str) -> None:
        """End the step log with "finished", "stopped", "interrupted" or "failed". Each process calls it separately."""
        recorder, self._recorder, loop, context = self._recorder, None, self.loop, self.context
        if recorder is None:
            return
        context.log_head, context.note_saved = nothing, ignore
        loop.records_rates, loop.meter.on_entries, loop.before_update, loop.after_update = False, None, None, None
        recorder.end(status)

    def leave_training(self) -> None:
        """Undo the modes that hooks have set, at the end of `train()`."""
        self.modes.undo({} if self.start.begun is None else self.start.begun.modes)

    def _end_train_epoch(self) -> None:
        hook, collector = self.hooks.end_train_epoch, self.loop.epoch_outputs
        calls: list[Callable[[], Any]] = [lambda: self.events.fire(Event.TRAIN_EPOCH_END, self.state.epoch)]
        if hook is not None and collector is not None and self.hooks.epoch_outputs and collector.is_empty:
            self.log.warning("on_end_train_epoch is not called: the outputs for it were lost in the interruption.")
        elif hook is not None:
            outputs = [] if collector is None else self.stack.gather(collector.all_outputs_alike(self.world.comm))
            given = as_arguments(outputs) if self.hooks.epoch_outputs else ()
            calls.insert(0, lambda: hook(self.state.global_step, *given))
        if collector is not None:
            collector.reset()
        call_all(calls)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained, or all steps if their number was given."""
        state, plan = self.state, self.data.plan
        if plan.max_steps is None:
            return state.epoch >= plan.epochs
        if state.epoch_end or state.validates or state.interrupted or state.global_step < plan.max_steps:
            return False
        return not state.steps_in_epoch or plan.ends_within_epoch(state.global_step, state.steps_in_epoch)

    @property
    def exhausted_reason(self) -> str | None:
        """The reason why no further step is allowed, as a sentence; None if one is, or if none is planned."""
        sampling, planned = self.stack.sampling, self.data.plan.total_steps
        if sampling is None or (planned is not None and self.state.global_step >= planned):
            return None
        return sampling.exhausted_reason() if sampling.steps_allowed(1) == 0 else None

    def extend_training(self, args: TrainerArguments) -> None:
        """Extend the run to the end that `args` give.

        Raises:
            ConfigurationError: a schedule would end before the run does. The run is then unchanged.
        """
        check_schedule_lengths(self.loop.schedules, self.data.plan, self.state, args)
        self.context.args = args
        self.data.set_plan(self.data.plan.with_end(args.epochs, args.max_steps))
        self.due.set_intervals()

    def end(self, reporter: Reporter, export: Callable[[], None]) -> None:
        """End a training without an exception: save, call the subscribers, and export the module.

        `export` writes the module's state. It is not called if a signal has interrupted the run.
        """
        agreed, step = self.stopper.agreed, self.state.global_step
        if agreed is not None:
            self.note_stop(agreed.is_chosen)
        self.start.restore_rng_once()
        reporter.write()  # before the save: the saved history counts as written
        self.saver.save(force=True, unless_saved=True)
        if self._compared_at != step:
            self.refuse_diverged("No model was exported.")
        self.saver.finish()
        self.end_recording("finished" if agreed is None else "interrupted" if agreed.signal is not None else "stopped")
        if agreed is not None:
            self.events.fire(Event.STOP_TRAINING, agreed.reason)
            if agreed.signal is not None:
                self.events.end_train("interrupted")
                reporter.text(self.saver.finish_uploads(is_signalled=True))
                reporter.end("interrupted", agreed.reason)
                return
            reporter.text(f"stopped after global step {step}: {agreed.reason}")
        if self.is_over:
            self.beginnings.end_training()
        self.events.end_train("finished" if agreed is None else "stopped")
        export()
        if self.hooks.end_train is not None:
            self.hooks.end_train(step)
        reporter.write()
        reporter.text(self.saver.finish_uploads())
        reporter.end_private_run(self.exhausted_reason)
        status, reason = ("finished", self.exhausted_reason) if agreed is None else ("stopped", agreed.reason)
        reporter.end(status, reason, self.saver.exported_as)

    def note_stop(self, is_chosen: bool = False) -> None:
        """Note that the training ends before its planned end for another reason than the privacy budget.

        A user who sees metrics of a private run may have stopped it because of them, also by a signal or an exception.
        """
        planned, layers = self.data.plan.total_steps, self.stack.layers()
        shows_metrics = any(layer.private and (layer.released_metrics or layer.public_validation) for layer in layers)
        if planned is not None and (is_chosen or shows_metrics):
            self.stack.on_chosen_stop(max(0, planned - self.state.global_step))

    def refuse_diverged(self, outcome: str) -> None:
        """Refuse weights that differ between the ranks.

        Raises:
            PeerError: they differ; the message ends with `outcome`.
        """
        if self.world.size > 1:
            if not has_shards(self.module):  # with shards, the layer may gather whole tensors for an evaluation
                with evaluation_pass(self.stack, self.loop.work):  # gives added parameters the values of rank 0
                    pass
            refuse_diverged(self.loop.work, self.state.global_step, outcome)
        self._compared_at = self.state.global_step

    def check_finite(self, advice: str) -> None:
        """Refuse weights or buffers that became inf or nan.

        Raises:
            NonFiniteError: names the first of them; the message ends with `advice`.
        """
        with self.context.fail_together():
            check_finite_weights(self.stack, self.loop.work, self.may_be_nonfinite, (), self.state.global_step, advice)
