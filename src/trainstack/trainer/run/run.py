"""`Run` trains a prepared module epoch by epoch; `RunView` reads it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from trainstack.backends import TrainerBackend, Workload, World
from trainstack.backends.losses import looks_summed
from trainstack.backends.trained_before import trained_before
from trainstack.checkpointing import Checkpoint, DefaultCheckpointer
from trainstack.errors import ConfigurationError, ModuleContractError, PeerError, annotate
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.intervals import Timer, ValidationSchedule, is_log_point, whole_steps
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import EXTRAS
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import capture_rng, isolated_rng, restore_rng, separate_ranks
from trainstack.trainer.core.several_updates import check_updates
from trainstack.trainer.core.state import DuePart, EpochEnd, RunState
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
from trainstack.trainer.module_checks import check_optimizers_schedulers, check_signatures
from trainstack.trainer.module_interface import MicroBatchInfo, ModuleInterface, StepView
from trainstack.trainer.reporting.loss_meter import shown_indices
from trainstack.trainer.reporting.reporter import Reporter
from trainstack.trainer.resume.module_generators import renew_generators, restore_generators
from trainstack.trainer.resume.own_states import overrides_update_state, restore_own_buffers
from trainstack.trainer.resume.restoring import (
    SAMPLES,
    check_resumable,
    check_schedules,
    comparable_samples,
    must_have_settings,
    restore_module,
    rng_of_rank,
    warn_of_differences,
    warn_of_other_samples,
)
from trainstack.trainer.resume.run_snapshot import optimized_parameters
from trainstack.trainer.resume.saving import Saver, make_checkpoint
from trainstack.trainer.run.agreement import (
    agree_on_start,
    agree_on_values,
    agree_on_workload,
    share_initial_values,
)
from trainstack.trainer.run.beginnings import Beginnings, BegunEpoch
from trainstack.trainer.run.loop import train_steps
from trainstack.trainer.run.preflight import check_monitors, check_schedule_lengths
from trainstack.trainer.run.step_checks import StepChecks
from trainstack.trainer.run.stopping import Stopped, Stopper
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.run.training_modes import TrainingModes
from trainstack.trainer.run.trial import restore_after
from trainstack.trainer.schedulers.building import make_schedules
from trainstack.trainer.torch_settings import prepare_model, reuses_memory
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.log_sink import LogSink

MOST_PENDING_STEPS = 1000
"""The losses of at most so many steps wait on the device, however far apart log points are."""


def failure_location(state: RunState, data: TrainingData, position: int | None, rank: int = 0) -> str:
    """Where the step stood in which an exception was raised, worked out only now that it was.

    `position` counts the micro-batches of the step, from 0; None outside of forward and backward passes.
    """
    plan = data.plan
    place = f"in epoch {state.epoch}, global step {state.current_step}"
    place = f"on rank {rank}, {place}" if plan.world_size > 1 else place
    if position is None:
        return place
    if plan.accumulation > 1:
        place += f", micro-batch {position} of {plan.accumulation}"
    indices = data.indices_under_way(state, position)
    if indices is None:
        return place
    return f"{place}, with the samples {shown_indices(indices)} of the training data set"


class Run:
    """A module made ready on a stack.

    Args:
        context: of the trainer, whose module has its state back already.
        stopper: asked when the run is to stop, also by whoever supplies its data.
        saver: writes the run's checkpoints.
        metrics: given to the trainer; None for the module's.
        trains: False for a run that only evaluates: the module is asked for no training data and no optimizers.

    Attributes:
        data: the training data and the plan.
        evaluator: runs validation, test and prediction.
        validation: when to validate in training.
        log_interval: global steps between two log points.
        loop: what the loop works with.
        pending_rng: the random state to go on with; used up when training goes on.
        epoch_rng: the random state that the epoch under way began with.
        modes: in which the parts of the module train.
        may_be_nonfinite: names of buffers that held inf or nan when the run was made.
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
    data: TrainingData
    hooks: Hooks
    loop: TrainLoop
    beginnings: Beginnings
    step_checks: StepChecks
    evaluator: Evaluator
    may_be_nonfinite: frozenset[str]
    validation: ValidationSchedule
    log_interval: int
    pending_rng: Mapping[str, Any] | None = None
    epoch_rng: Mapping[str, Any] | None = None
    _begun: BegunEpoch | None = None
    _saved_samples: Mapping[str, str] = MappingProxyType({})  # of the checkpoint, for the next epoch to compare
    _compare_values = True  # before the next step
    _compared_at = -1  # the last global step after which the weights of all ranks were compared
    _epoch_unsaved = _ranks_are_separate = False
    _attended = -1  # the last global step at which all was done that was due

    def __init__(
        self, context: RunContext, stopper: Stopper, saver: Saver, metrics: Any = None, *, trains: bool = True
    ) -> None:
        self._trains, self.context, self.stopper, self.saver = trains, context, stopper, saver
        self.module, self.stack, self.world, self.state = context.module, context.stack, context.world, context.state
        self.history, self.events, self.log = context.history, context.events, context.log
        module, args, world, state = self.module, context.args, self.world, self.state
        made_metrics = Metrics(metrics, module)
        self.modes = TrainingModes(module, self.stack.is_private)
        check_signatures(module, self.log, context.val_step)
        self._streams = streams = self.stack.random_streams(world)
        with isolated_rng(streams or mix(state.seed), world.device):
            records = self.stack.public_dataset_size
            self.data = TrainingData(module, args, world, state.seed, self.log, records, streams, asks=trains)
        self._saves = context.checkpointer.is_due(0, force=True)
        self._save_timer = Timer(context.checkpointer.every_n_seconds)
        self._hash_samples()
        self.validation = ValidationSchedule(args.validate_every, self.data.plan)
        self.log_interval = whole_steps("log_every", args.log_interval, self.data.plan)
        self._connect_module()
        self.hooks = self._make_hooks()
        self._prepare_model()
        self.loop = self._make_loop()
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
        self.may_be_nonfinite = nonfinite_buffers(self.stack, module)
        if isinstance(context.checkpointer, DefaultCheckpointer) and context.checkpointer.args.checkpoint:
            check_storable_buffers(module)

    def _prepare_model(self) -> None:
        context, args = self.context, self.context.args
        compiled = prepare_model(
            self.module, compiled=args.compile, channels_last=args.channels_last, private=self.stack.is_private
        )
        context.compiled = context.compiled or compiled  # an evaluation before training may have compiled it

    def _make_hooks(self) -> Hooks:
        """The hooks of the module; those and the subscribers of events get no records where a layer hides them."""
        hides_records = any(layer.hides_records for layer in self.stack.layers())
        if hides_records:
            self.events.hide_records()
        hooks = Hooks(self.module, self.stopper.request, hides_records=hides_records)
        if hooks.withheld:
            self.log.warning(
                f"{' and '.join(hooks.withheld)} of {type(self.module).__name__} will be called without outputs: a "
                "private run gives records and outputs of training to no hook. DifferentialPrivacyArguments("
                "expose_records=True) gives them, and makes the run NOT PRIVATE."
            )
        return hooks

    def _hash_samples(self) -> None:
        if (self._saves or self.world.size > 1) and not self.stack.is_private:  # private samples leave no trace
            self.data.sample_hashes = self.data.hash_samples()
            self.data.hashes_epochs = self._saves and self.world.is_main and bool(self.data.sample_hashes)

    def _connect_module(self) -> None:
        """Give the module the plan, the place where it logs, and a view of the step under way."""
        module, context = self.module, self.context
        module.plan = self.data.plan
        sink = module._log_sink = context.sink = (module._log_sink or LogSink()).connect(context.history, self.state)
        data = weakref.ref(self.data)  # the module may outlive the run; the sink has the counters of the step under way
        module._step_view = StepView(
            lambda: MicroBatchInfo() if (mine := data()) is None else mine.micro_batch(sink.state)
        )

    def _make_loop(self) -> TrainLoop:
        context, args, plan = self.context, self.context.args, self.data.plan
        ahead = plan.rest(self.state.epoch, self.state.global_step) if args.reset_optimizers_schedulers else plan
        epochs = max(1, ahead.epochs)
        self.stack.place(self.module, self.world)
        share_initial_values(self.context)
        optimizers, schedulers = self._make_optimizers(ahead.estimated_global_steps_per_epoch, epochs)
        parts = (self.module, optimizers, self.world, args.clipping, self.data.training_set, context.output_dir)
        work = Workload.from_module(*parts, fast_paths=args.fast_paths)
        agree_on_workload(self.context, self.data, work)
        check_updates(work, list(self.stack.layers()))
        with context.sink.mute(self.state):  # a layer may try the module out
            work = self.stack.prepare(work)
        keep = args.collect_train_outputs
        plan_ahead = replace(ahead, epochs=epochs)
        return TrainLoop(
            self.stack,
            work,
            self.hooks,
            schedules=make_schedules(schedulers, work.optimizers, plan_ahead, saves=self._saves, log=self.log),
            state=self.state,
            skip_nonfinite=args.nonfinite == "skip",
            measures_every_step=self.log_interval == 1,
            keep_epoch_outputs=self.hooks.epoch_outputs if keep == "auto" else bool(keep),
            bind=self.events.bound,
            inspect_loss=self._inspect_loss if self._may_misjudge_sums else None,
            reused_memory=reuses_memory(self.module, args.compile),
        )

    def _make_optimizers(self, steps_per_epoch: int, epochs: int) -> tuple[Sequence[Any], Sequence[Any]]:
        if not self._trains:
            return (), ()
        made = self.module.get_optimizers_schedulers(steps_per_epoch, epochs)
        return check_optimizers_schedulers(made, self.module, self.log, self.world.size)

    @property
    def _may_misjudge_sums(self) -> bool:
        """Whether a loss that is a sum would count for less than in a plain loop, and the module does not say."""
        split = self.data.plan.accumulation > 1 or self.world.size > 1
        return split and not self.stack.is_private and getattr(self.module, "loss_reduction", None) is None

    def _inspect_loss(self, loss: Tensor) -> None:
        """Warn about the first loss if it is a sum over samples; nothing is computed for it."""
        samples = self.data.micro_batch(self.state).samples
        if looks_summed(loss, None if samples is None else len(samples)):
            name, parts = type(self.module).__name__, self.data.plan.accumulation * self.world.size
            self.log.warning(
                f"{name}.train_step seems to return a sum over samples, and a step is split into {parts} parts, whose "
                f"losses are averaged: of a sum, the loss and its gradient are about {parts} times smaller than those "
                "of the whole batch. If the loss is a mean already, write loss_reduction = 'mean' in the module; if it "
                "is a sum, return a mean, or write loss_reduction = 'sum' to add the parts up."
            )

    def train_epoch(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        """Train what is left of the epoch under way, validate and save.

        `save` writes a checkpoint. It is called with True at the global steps that are multiples of `save_every`.

        Raises:
            Stopped: somebody asked for it; the run stands at a step boundary, or between two validation batches.
        """
        state = self.state
        self.context.busy = True
        if self._epoch_unsaved:  # what was saved there has failed
            self._save_epoch(save)
        steps = self._begin_epoch()
        reporter.start_epoch(state, self.data.plan)
        if not state.epoch_end:
            self._train_steps(steps, reporter, save, save_every)
            if self.is_over:
                reporter.progress.end_epoch()
                return
        self._end_epoch(reporter)
        self._epoch_unsaved = True
        reporter.end_epoch(state, self.data.plan)
        self._save_epoch(save)
        self.stopper.stop_if_requested()

    def _end_epoch(self, reporter: Reporter) -> None:
        """Do what is left to do at the end of the epoch, each part once, and let the next epoch be the one to train."""
        state, monitor = self.state, self.context.args.monitor
        if state.epoch_end < EpochEnd.LOSS:
            self.data.compare_streams()
            self.data.lengths.report(self.data.plan, state)
        if state.begin_epoch_end(EpochEnd.LOSS):
            reporter.end_training_epoch(state, self.loop.meter)
        if state.begin_epoch_end(EpochEnd.HOOKS):
            self._end_train_epoch()
        if state.epoch_end < EpochEnd.VALIDATION and self.validation.after_epoch(state.epoch):
            self.evaluator.validate(reporter)  # which may be broken off
        state.begin_epoch_end(EpochEnd.VALIDATION)
        if state.epoch_end < EpochEnd.SCHEDULERS:
            may_lack = self.validation.is_sparse and not self.evaluator.has_validated
            if monitor is not None and self.evaluator.has_validated:
                self.history.require_usable(monitor, "TrainerArguments.monitor")
                self.history.get_latest_metric(monitor)  # or say which ones there are
            self.loop.schedules.end_epoch(self.history, state.epoch, self.world.comm, may_lack=may_lack)
        state.begin_epoch_end(EpochEnd.SCHEDULERS)
        if state.begin_epoch_end(EpochEnd.EVENT):
            self.events.fire(Event.EPOCH_END, state.epoch)
        state.finish_epoch()

    def _save_epoch(self, save: Callable[[bool], None]) -> None:
        """Save at the end of the epoch that `state` has just finished."""
        self._save(save, self._is_best() or self.saver.pending_save)
        self._epoch_unsaved = False

    def _train_steps(
        self, steps: Iterator[StepBatches], reporter: Reporter, save: Callable[[bool], None], save_every: int | None
    ) -> None:
        state = self.state
        self.loop.on_due = lambda: self._on_due(reporter, save, save_every)
        self._set_next_due_step(reporter, save_every)
        if self._compare_values:
            agree_on_values(self.context)
            self._compare_values = False
        goes_on = state.interrupted or state.validates  # or a validation was broken off there
        self._attended = -1 if goes_on else state.global_step
        state.due_part = state.due_part if goes_on else 0
        try:
            with suppress(Stopped):
                if goes_on:
                    self._on_due(reporter, save, save_every)
                with self.step_checks.watching(islice(steps, self._steps_left())) as watched:
                    train_steps(self.loop, watched)
        except BaseException as error:
            step, attended = state.global_step, self._attended
            is_due = attended < 0 or step >= self.loop.next_due_step
            state.interrupted = state.current_step == step != attended and is_due
            if isinstance(error, Exception):
                annotate(error, failure_location(state, self.data, self.loop.failed_in, self.world.rank))
            raise
        self.stopper.stop_if_requested()
        if not state.steps_in_epoch:
            raise ModuleContractError(
                f"the loader that get_train_dataloader returned for epoch {state.epoch} gave no batch at all. Return a "
                "loader over data; an iterator that is used up has to be made anew in each call."
            )

    def _steps_left(self) -> int | None:
        """How many steps the epoch under way may still have; None for as many as there is data for."""
        cap, most = self.data.plan.max_steps_per_epoch, self.data.plan.max_steps
        left = [] if cap is None else [cap - self.state.steps_in_epoch]
        left += [] if most is None else [most - self.state.global_step]
        left += [0 if self.state.steps_in_epoch else 1] if self.state.ends_epoch else []
        return max(0, min(left)) if left else None

    def _begin_epoch(self) -> Iterator[StepBatches]:
        """Call the hooks that begin the epoch and ask for its data.

        Where the epoch goes on, they see the random state and the state that it began with, and afterwards the state is
        what it was. Hooks that were called in this process are not called again: what they have set is still there.
        """
        state, device = self.state, self.world.device
        now = self.pending_rng or capture_rng(device)
        begun = self._begun
        if begun is None or begun.epoch != state.epoch:
            saved_within, old = self.beginnings.pop_epoch()
            begun = self._begun = BegunEpoch(state.epoch, goes_on=saved_within or state.steps_in_epoch > 0)
            calls = self._begin_calls()
            with self.beginnings.replay(old, on_all=bool(calls)) if begun.goes_on else nullcontext():
                self._call_begin_hooks(begun, calls)
                steps = self._ask_for_data(begun)
            if state.steps_in_epoch and not state.epoch_end and self.loop.epoch_outputs is not None:
                self.log.warning(
                    f"resumed within epoch {state.epoch}: on_end_train_epoch gets the outputs of the steps from here "
                    "on, those before the interruption are gone."
                )
        else:
            self.modes.restore(begun.modes)
            with self.beginnings.replay(None, on_all=False) if begun.goes_on else nullcontext():
                self.beginnings.put_back(begun.before_loader)  # a call that has raised leaves no trace
                steps = self._ask_for_data(begun)
        if begun.goes_on:
            restore_rng(now, device)
            self.pending_rng = None
        begun.goes_on = True
        return steps

    def _begin_calls(self) -> list[Callable[[], Any]]:
        """The hook and the subscribers of the beginning of an epoch, as far as there are some."""
        state, hook, events = self.state, self.hooks.begin_train_epoch, self.events
        if hook is None and not any(map(events.has, (Event.EPOCH_BEGIN, Event.TRAIN_EPOCH_BEGIN))):
            return []
        calls: list[Callable[[], Any]] = [lambda: events.fire(Event.EPOCH_BEGIN, state.epoch)]
        calls += [] if hook is None else [lambda: hook(state.global_step, state.epoch)]
        return [*calls, lambda: events.fire(Event.TRAIN_EPOCH_BEGIN, state.epoch)]

    def _call_begin_hooks(self, begun: BegunEpoch, calls: list[Callable[[], Any]]) -> None:
        device = self.world.device
        if self._streams is not None:
            renew_generators(self.context, self._streams, "epoch", self.state.epoch)
        elif begun.goes_on and self.epoch_rng is not None:
            restore_rng(self.epoch_rng, device)
        else:
            self.restore_rng_once()
            self.epoch_rng = capture_rng(device)
        self.modes.restore()
        if self._saves or not calls:  # in this process, only the loader is asked for again
            begun.before_hooks = begun.before_loader = self.beginnings.take()
            begun.optimized = optimized_parameters(self.loop.work)
        try:
            call_all(calls)
        except PeerError:
            raise
        except BaseException:
            self._end_begin_hooks(begun, calls)
            raise
        self._end_begin_hooks(begun, calls)

    def _end_begin_hooks(self, begun: BegunEpoch, calls: list[Callable[[], Any]]) -> None:
        begun.modes, begun.rng = self.modes.changes(), capture_rng(self.world.device)
        if calls:
            begun.before_loader = self.beginnings.take()

    def _ask_for_data(self, begun: BegunEpoch) -> Iterator[StepBatches]:
        if begun.rng is not None:
            restore_rng(begun.rng, self.world.device)
        steps: Iterator[StepBatches] = iter(())
        if not self.state.epoch_end:
            self.data.lengths.may_change = self._length_may_change
            steps = self.data.iter_steps(self.state, self.stack.sampling)
            self.validation.plan = self.data.plan  # the epoch may be longer than the one before
            warn_of_other_samples(self._saved_samples, self.data, self.context, within=begun.goes_on)
            self._saved_samples = {}
        self.beginnings.settle(begun.before_hooks, begun.before_loader)
        return steps

    @property
    def _length_may_change(self) -> bool:
        """Whether no schedule was laid out for the number of steps that the data of the first epoch have."""
        by_epoch = not self.loop.schedules.counts_updates
        return not self.stack.is_private and (by_epoch or self.data.plan.max_steps is not None)

    def sanity_check(self, batches: int) -> None:
        """Try out the validation on the first `batches` of each loader, -1 for all, which leaves no trace.

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

    def fire_train_begin(self) -> None:
        """Call the subscribers of `TRAIN_BEGIN`."""
        with self.beginnings.train_begin(over=self.is_over):
            self.events.fire(Event.TRAIN_BEGIN)

    def begin_training(self) -> None:
        """`train()` begins.

        A fresh run lets the ranks draw different random numbers from here on. Initial weights are made before.

        Raises:
            ConfigurationError: the ranks do not begin alike.
            PrivacyError: a metric decides about a private training that is computed from records without noise.
        """
        check_monitors(self.context, self.loop.schedules)
        agree_on_start(self.context, self.data, self.loop.work, self.loop.schedules)
        self._compare_values = True
        if not self.stack.is_private:
            trained_before.note(self.module.parameters(), None)
        if self._streams is not None:
            renew_generators(self.context, self._streams, "training")
        elif self.pending_rng is None and not self._ranks_are_separate:
            separate_ranks(self.world)
        self._ranks_are_separate = True
        self.modes.begin(self.log)
        for timer in (self.validation.timer, self._save_timer):
            timer.begin(self.state.global_step)

    def leave_training(self) -> None:
        """`train()` ends."""
        self.modes.undo({} if self._begun is None else self._begun.modes)

    def _save(self, save: Callable[[bool], None], force: bool) -> None:
        """Save at a step boundary, where everything that goes into a checkpoint fits together."""
        self.context.busy = self.saver.pending_save = False
        save(force)
        self.context.busy = True

    def _end_train_epoch(self) -> None:
        hook, collector = self.hooks.end_train_epoch, self.loop.epoch_outputs
        calls: list[Callable[[], Any]] = [lambda: self.events.fire(Event.TRAIN_EPOCH_END, self.state.epoch)]
        if hook is not None and collector is not None and self.hooks.epoch_outputs and collector.is_empty:
            self.log.warning("on_end_train_epoch is left out: the outputs it takes were lost in the interruption.")
        elif hook is not None:
            outputs = [] if collector is None else self.stack.gather(collector.all_outputs_alike(self.world.comm))
            given = as_arguments(outputs) if self.hooks.epoch_outputs else ()
            calls.insert(0, lambda: hook(self.state.global_step, *given))
        if collector is not None:
            collector.reset()
        call_all(calls)

    def _on_due(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        """What is due at this step: log, validate, save, poll the display, stop; and find the next due step."""
        # The order matters for an exact resume: a checkpoint holds what was recorded and measured at this step, and a
        # run that stops here has saved what was due. Each part is marked as done before user code runs in it.
        state, step = self.state, self.state.global_step
        if is_log_point(step, self.log_interval, self.data.plan.max_steps):
            self.data.compare_streams()
            if state.begin_due(DuePart.LOG):
                reporter.measure(state, self.loop.meter, self.loop.work.optimizers)
                self.events.fire(Event.LOG, step)
            reporter.write()
        elif step % MOST_PENDING_STEPS == 0:  # at the same steps on every process
            self.loop.meter.flush()
            reporter.write()
        self.events.run_calls(step)
        if state.due_part < DuePart.VALIDATION:
            is_due = self.validation.is_due(step, state.steps_in_epoch, self.world.comm)  # may ask a function
            state.begin_due(DuePart.VALIDATION)
            state.validates = bool(is_due)
        if state.validates:
            self._validate_within(reporter)
        self._save_if_due(reporter, save, save_every)
        state.due_part, state.interrupted, self._attended = 0, False, step
        if state.steps_in_epoch >= reporter.progress.next_poll:
            reporter.poll(state)
        if self.stopper.is_due(step) or state.ends_epoch:
            raise Stopped
        self._set_next_due_step(reporter, save_every)
        self.saver.poll()  # after that: what fails later moves `next_due_step` again

    def _save_if_due(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        state = self.state
        periodic = self._save_timer.is_due(state.global_step, self.world.comm)
        periodic |= save_every is not None and state.global_step % save_every == 0
        if not (state.begin_due(DuePart.SAVE) and (periodic or self._is_best())) and not self.saver.pending_save:
            return
        reporter.write()  # a history counts as written once it is saved
        try:
            self._save(save, True)
        except BaseException:
            state.due_part = int(DuePart.VALIDATION)  # `train()`, called again, saves
            raise

    def _is_best(self) -> bool:
        """Whether a validation at this step has brought the best value yet of what the checkpointer keeps the best by.

        All processes get the answer of the main one.
        """
        wanted, step = self.context.checkpointer.keeps_best_by, self.state.global_step
        if wanted is None or self.state.validated_step != step:
            return False
        name, mode = wanted
        usable = name in self.history.usable_values_at(step)
        known = self.history.records(name) if usable else []
        sign = 1 if mode == "min" else -1
        values = [(record.step, sign * record.value) for record in known if math.isfinite(record.value)]
        here = values[-1][1] if values and values[-1][0] == step else math.inf
        best = here < min((value for at, value in values if at < step), default=math.inf)
        return bool(self.world.comm.broadcast_object(best, "comparing a validation with the best"))

    def _validate_within(self, reporter: Reporter) -> None:
        """Validate at a step boundary; one that is broken off is gone on with when the run is."""
        self.evaluator.validate(reporter)
        self.state.validates = False
        reporter.end_validation(self.state)

    def _set_next_due_step(self, reporter: Reporter, save_every: int | None) -> None:
        step = self.state.global_step
        self.loop.next_measured_step = self.next_log_step
        # the polls may be overdue, hence `max(1, ...)`; the others always come after `step`
        look = reporter.progress.next_poll - self.state.steps_in_epoch
        due = [self.next_log_step - step, MOST_PENDING_STEPS - step % MOST_PENDING_STEPS, max(1, look)]
        due.append(max(1, self.stopper.next_poll - step))
        due += [self.validation.next_step(step) - step, max(1, self._save_timer.next_step - step)]
        due += [call_step - step for call_step in self.events.call_steps]
        if save_every is not None:
            due.append(save_every - step % save_every)
        self.loop.next_due_step = step + min(due)
        if self.stopper.is_requested or self.saver.pending_save:  # looked at last: later ones call `wake` themselves
            self.loop.wake()

    @property
    def next_log_step(self) -> int:
        """The global step of the log point that comes next."""
        step, last = self.state.global_step, self.data.plan.max_steps
        due = step + self.log_interval - step % self.log_interval
        return due if last is None or last <= step else min(due, last)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained, or all steps where their number was given."""
        state, plan = self.state, self.data.plan
        if plan.max_steps is None:
            return state.epoch >= plan.epochs
        if state.epoch_end or state.validates or state.interrupted or state.global_step < plan.max_steps:
            return False
        return not state.steps_in_epoch or plan.ends_within_epoch(state.global_step, state.steps_in_epoch)

    @property
    def exhausted_reason(self) -> str | None:
        """Why no further step may be made, as a sentence; None if one may, or if none is planned."""
        sampling, planned = self.stack.sampling, self.data.plan.total_steps
        if sampling is None or (planned is not None and self.state.global_step >= planned):
            return None
        return sampling.exhausted_reason() if sampling.steps_allowed(1) == 0 else None

    def restore_rng_once(self) -> None:
        """Go on with the random state of the checkpoint, if that has not happened yet."""
        if self.pending_rng is not None:
            restore_rng(self.pending_rng, self.world.device)
            self.pending_rng = None

    def call_at_step(self, step: int, function: Callable[..., Any]) -> None:
        """See `Trainer.call_at_step`."""
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.state.global_step:
            raise ConfigurationError(
                f"call_at_step({step!r}, ...): {self.state.global_step} global steps are finished. Write a later step, "
                "a whole number."
            )
        self.events.call_at(step, function)
        self.loop.wake()  # at the next boundary the loop computes anew which step is next

    def end_epoch(self) -> None:
        """See `Trainer.end_epoch`."""
        if self.stack.is_private:
            raise ConfigurationError(
                "trainer.end_epoch() cannot shorten an epoch of a private run, whose steps are accounted for before it "
                "begins. Write max_train_steps_per_epoch in TrainerArguments."
            )
        if not self.events.is_training or self.state.epoch_end:
            raise ConfigurationError(
                "trainer.end_epoch() was called where no epoch is trained. Call it from on_train_epoch_begin until the "
                "last step of the epoch, such as in on_train_step_end."
            )
        self.state.ends_epoch = True
        self.loop.wake()

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Trainer.freeze`."""
        for parameter in self._freezable("freeze", parameters):
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Trainer.unfreeze`."""
        for parameter in self._freezable("unfreeze", parameters):
            parameter.requires_grad_(True)

    def _freezable(self, name: str, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        given = list(parameters)
        if self.stack.is_private:
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
        return given

    def extend_training(self, args: TrainerArguments) -> None:
        """Extend the run to the end that `args` give.

        Raises:
            ConfigurationError: a schedule would end before the run does. The run is then unchanged.
        """
        check_schedule_lengths(self.loop.schedules, self.data.plan, self.state, args)
        self.context.args = args
        self.data.set_plan(self.data.plan.with_end(args.epochs, args.max_steps))
        self.validation = ValidationSchedule(args.validate_every, self.data.plan)
        self.log_interval = whole_steps("log_every", args.log_interval, self.data.plan)

    def end(self, reporter: Reporter, export: Callable[[], None]) -> None:
        """End a training that no exception has ended: save, call the subscribers, and export the module.

        `export` writes the module's state. It is not called where a signal has interrupted the run.
        """
        agreed, step = self.stopper.agreed, self.state.global_step
        if agreed is not None:
            self.note_stop(agreed.is_chosen)
        self.restore_rng_once()
        reporter.write()  # a history counts as written once it is saved
        self.saver.save(force=True, unless_saved=True)
        if self._compared_at != step:
            self._refuse_diverged("No model was exported.")
        self.saver.finish()
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
        """The training ends before its planned end, except by the privacy budget.

        Whoever sees metrics of a private run may have stopped it by them, also with a signal or an exception.
        """
        planned, layers = self.data.plan.total_steps, self.stack.layers()
        shows_metrics = any(layer.private and (layer.released_metrics or layer.public_validation) for layer in layers)
        if planned is not None and (is_chosen or shows_metrics):
            self.stack.on_chosen_stop(max(0, planned - self.state.global_step))

    def take_checkpoint(
        self, get_state: Callable[[], Mapping[str, Any]], *, pinned: bool = False, after: BaseException | None = None
    ) -> Checkpoint:
        """A checkpoint of the run at a step boundary; tensors are the live ones. All processes call it together.

        After an exception, `after`, nothing is refused, and the other processes are not asked.

        Raises:
            NonFiniteError: a loss, a gradient, the weights or a state of an optimizer are inf or nan.
            PeerError: the processes do not have the same weights.
        """
        context, plan, state = self.context, self.data.plan, self.state
        if after is not None:
            return make_checkpoint(context, plan, get_state, None, None, after=after)
        self.loop.meter.flush()
        with self.loop.optimizer_states.whole():
            states = get_state()
        self.loop.optimizer_states.warn_of_lost(self.log)
        optimizers = states.get("optimizers", ())
        check_finite_weights(self.stack, self.loop.work, self.may_be_nonfinite, optimizers, state.global_step)
        self._refuse_diverged("No checkpoint was written.")
        loader_state = self.data.loader_state.get_state(within=state.steps_in_epoch > 0)
        begun = self._begun if self._begun is not None and self._begun.epoch == state.epoch else None
        begin = self.beginnings.old_states(begun, over=self.is_over)
        made = make_checkpoint(context, plan, lambda: states, self.epoch_rng, loader_state, begin, pinned=pinned)
        if not overrides_update_state(self.module):
            context.extras.warn_of_additions(self.log)
        samples = comparable_samples(self.data, within=begun is not None and not state.epoch_end)
        if samples:
            made.metadata = {**(made.metadata or {}), SAMPLES: samples}
        return made

    def _refuse_diverged(self, outcome: str) -> None:
        if self.world.size > 1:
            with evaluation_pass(self.stack, self.loop.work):  # parameters that have joined get the values of rank 0
                pass
            refuse_diverged(self.loop.work, self.state.global_step, outcome)
        self._compared_at = self.state.global_step

    def check_finite(self, advice: str) -> None:
        """Refuse weights or buffers that became inf or nan.

        Raises:
            NonFiniteError: naming the first of them; ends with `advice`.
        """
        with self.context.fail_together():
            check_finite_weights(self.stack, self.loop.work, self.may_be_nonfinite, (), self.state.global_step, advice)

    def resume_evaluation(self, checkpoint: Checkpoint) -> None:
        """Take what an evaluation uses of `checkpoint`, whose module state and counters are restored already."""
        if self.context.args.resume_mode == "full":
            restore_own_buffers(checkpoint, self.context)
            self.events.update_state(checkpoint.callback_states)

    def resume(self, checkpoint: Checkpoint, update_state: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Take the states of `checkpoint`, as far as `resume_mode` asks for them; the module has its state already.

        Raises:
            CheckpointMismatchError: they are of another optimizer, backend, data set or a shorter schedule.
        """
        context, state, plan = self.context, self.state, self.data.plan
        mode, saved = context.args.resume_mode, checkpoint.trainer_state or {}
        if mode == "weights":
            return
        if mode == "full":
            check_resumable(checkpoint, context, plan, length_may_change=self._length_may_change)
            if state.steps_in_epoch:
                self.data.lengths.expected = (checkpoint.plan or {}).get("samples_per_epoch")
            self._saved_samples = (checkpoint.metadata or {}).get(SAMPLES) or {}
            self.loop.optimizer_states.same_settings = must_have_settings(checkpoint, context)
            update_state(checkpoint.trainer_state)
        else:
            self.loop.update_state(saved, fresh_optimizers=False, log=self.log)
        restore_own_buffers(checkpoint, context)
        self.stack.update_state(checkpoint.trainer_backend_state or {})
        check_schedules(self.loop.schedules, plan, state)
        if mode != "full":
            return
        if checkpoint.history_state is not None:
            self.history.update_state(checkpoint.history_state)
        if "user" in saved:
            context.user_state.update_state(saved["user"])
        rng = rng_of_rank(checkpoint.rng_state, self.world, state)
        if rng is not None:
            if self._streams is None:  # older versions stored random states of private runs
                self.pending_rng, self.epoch_rng = rng["now"], rng["epoch"]
            self.beginnings.load(rng.get("begin"))
        restore_generators(context, (checkpoint.rng_state or {}).get("ranks", ()))
        self.data.loader_state.restore(saved.get("loaders"), self.world)
        warn_of_differences(checkpoint, context)
        self.saver.saved_at = (state.global_step, state.epoch)
        restore_module(self.module, checkpoint)  # again: get_train_dataloader was called for the plan
        restore_own_buffers(checkpoint, context)
        context.extras.restore(saved.get(EXTRAS))
        self.events.update_state(checkpoint.callback_states)
        self.events.fire(Event.LOAD_CHECKPOINT, checkpoint)
