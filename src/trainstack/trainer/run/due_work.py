"""`DueWork` logs, validates and saves at the steps at which one of these is due, and stops the loop."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainstack.trainer.context import RunContext
from trainstack.trainer.core.intervals import Timer, ValidationSchedule, is_log_point, whole_steps
from trainstack.trainer.core.state import DuePart, RunState
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.evaluation.evaluator import Evaluator
from trainstack.trainer.events import Event
from trainstack.trainer.reporting.reporter import Reporter
from trainstack.trainer.resume.saving import Saver
from trainstack.trainer.run.stopping import Stopped, Stopper
from trainstack.trainer.run.train_loop import TrainLoop

MOST_PENDING_STEPS = 1000
"""The largest number of steps whose losses wait on the device, for any distance of log points. One synchronization in
1,000 steps costs almost no time, and more pending losses would only use more memory."""


class DueWork:
    """The work between two steps of a training.

    Args:
        context: the context of the run.
        data: the training data of the run.
        stopper: tells whether the run is to stop.
        saver: polled for saves in the background.

    Attributes:
        validation: the schedule of validations.
        log_interval: global steps between two log points.
        save_timer: tells whether a save is due by time.
        loop: the training loop of the run.
        evaluator: the evaluator of the run. Like `loop`, it is made and set after this object.
        attended: the last global step whose due work is complete.
    """

    loop: TrainLoop
    evaluator: Evaluator
    state: RunState
    attended: int
    save_timer: Timer
    validation: ValidationSchedule
    log_interval: int
    _reporter: Reporter
    _save: Callable[[bool], None]
    _save_every: int | None = None

    def __init__(self, context: RunContext, data: TrainingData, stopper: Stopper, saver: Saver) -> None:
        self._context, self._data, self._stopper, self._saver = context, data, stopper, saver
        self.state, self._world, self.attended = context.state, context.world, -1
        self.save_timer = Timer(context.checkpointer.every_n_seconds)
        self.set_intervals()

    def set_intervals(self) -> None:
        """Set the intervals from the current arguments and the current plan."""
        args, plan = self._context.args, self._data.plan
        self.validation = ValidationSchedule(args.validate_every, plan)
        self.log_interval = whole_steps("log_every", args.log_interval, plan)

    def begin_epoch(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        """Use `reporter` in this epoch. `save` writes a checkpoint, with True at multiples of `save_every`."""
        self._reporter, self._save, self._save_every = reporter, save, save_every

    def attend(self) -> None:
        """Do the due work of this step: log, validate, save, poll the display, stop; and find the next due step."""
        # The order matters for an exact resume: a checkpoint has the records and the measurements of this step, and a
        # run that stops here has already written a due checkpoint. Each part is marked as done before user code runs
        # in it, so that a resume after an exception does not repeat it.
        state, step, reporter = self.state, self.state.global_step, self._reporter
        if is_log_point(step, self.log_interval, self._data.plan.max_steps):
            self._data.compare_streams()
            if state.begin_due(DuePart.LOG):
                reporter.measure(state, self.loop.meter, self.loop.work.optimizers)
                self._context.events.fire(Event.LOG, step)
            reporter.write()
        elif step % MOST_PENDING_STEPS == 0:  # at the same steps on every process
            self.loop.meter.flush()
            reporter.write()
        self._context.events.run_calls(step)
        if state.due_part < DuePart.VALIDATION:
            is_due = self.validation.is_due(step, state.steps_in_epoch, self._world.comm)  # may ask a function
            state.begin_due(DuePart.VALIDATION)
            state.validates = bool(is_due)
        if state.validates:
            self._validate_within()
        self._save_if_due()
        state.due_part, state.interrupted, self.attended = 0, False, step
        if state.steps_in_epoch >= reporter.progress.next_poll:
            reporter.poll(state)
        if self._stopper.is_due(step) or state.ends_epoch:
            raise Stopped
        self.set_next_step()
        self._saver.poll()  # after `set_next_step`: a save that fails later changes `next_due_step` again

    def _save_if_due(self) -> None:
        state = self.state
        periodic = self.save_timer.is_due(state.global_step, self._world.comm)
        periodic |= self._save_every is not None and state.global_step % self._save_every == 0
        if not (state.begin_due(DuePart.SAVE) and (periodic or self._is_best())) and not self._saver.pending_save:
            return
        self._reporter.write()  # before the save: the saved history counts as written
        try:
            self._save_now(True)
        except BaseException:
            state.due_part = int(DuePart.VALIDATION)  # so that the next call of `train()` saves
            raise

    def save_epoch(self) -> None:
        """Save at the end of the epoch that `state` has just finished."""
        self._save_now(self._is_best() or self._saver.pending_save)

    def _save_now(self, force: bool) -> None:
        """Save at a step boundary, where all parts of a checkpoint belong to the same step."""
        self._context.busy = self._saver.pending_save = False
        self._save(force)
        self._context.busy = True

    def _is_best(self) -> bool:
        """Whether a validation at this step gave the best value so far of the metric for the best checkpoint.

        All processes use the answer of the main one.
        """
        wanted, step = self._context.checkpointer.keeps_best_by, self.state.global_step
        if wanted is None or self.state.validated_step != step:
            return False
        name, mode = wanted
        usable = name in self._context.history.usable_values_at(step)
        known = self._context.history.records(name) if usable else []
        sign = 1 if mode == "min" else -1
        values = [(record.step, sign * record.value) for record in known if math.isfinite(record.value)]
        here = values[-1][1] if values and values[-1][0] == step else math.inf
        best = here < min((value for at, value in values if at < step), default=math.inf)
        return bool(self._world.comm.broadcast_object(best, "comparing a validation with the best"))

    def _validate_within(self) -> None:
        """Validate at a step boundary. The next run continues an interrupted validation."""
        self.evaluator.validate(self._reporter)
        self.state.validates = False
        self._reporter.end_validation(self.state)

    def set_next_step(self) -> None:
        """Set the next step at which the loop calls `attend`."""
        step = self.state.global_step
        self.loop.next_measured_step = self.next_log_step
        # the times of polls and saves may be in the past, hence `max(1, ...)`; the others always come after `step`
        look = self._reporter.progress.next_poll - self.state.steps_in_epoch
        due = [self.next_log_step - step, MOST_PENDING_STEPS - step % MOST_PENDING_STEPS, max(1, look)]
        due.append(max(1, self._stopper.next_poll - step))
        due += [self.validation.next_step(step) - step, max(1, self.save_timer.next_step - step)]
        due += [call_step - step for call_step in self._context.events.call_steps]
        if self._save_every is not None:
            due.append(self._save_every - step % self._save_every)
        self.loop.next_due_step = step + min(due)
        if self._stopper.is_requested or self._saver.pending_save:  # read last: later requests call `wake`
            self.loop.wake()

    @property
    def next_log_step(self) -> int:
        """The global step of the next log point."""
        step, last = self.state.global_step, self._data.plan.max_steps
        due = step + self.log_interval - step % self.log_interval
        return due if last is None or last <= step else min(due, last)
