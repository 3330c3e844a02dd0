"""`EpochStart` calls the hooks that begin an epoch, and asks for its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from trainstack.backends.random_streams import RandomStreams
from trainstack.errors import PeerError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.random_state import capture_rng, restore_rng
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.events import Event
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.resume.module_generators import renew_generators
from trainstack.trainer.resume.resume_changes import changes_of_data, report_changes
from trainstack.trainer.resume.run_snapshot import optimized_parameters
from trainstack.trainer.run.beginnings import Beginnings, BegunEpoch
from trainstack.trainer.run.due_work import DueWork
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.run.training_modes import TrainingModes


class EpochStart:
    """Begins epochs, and continues them after an interruption.

    Args:
        context: the context of the run.
        data: the training data of the run.
        loop: the training loop of the run.
        hooks: the hooks of the module.
        modes: the modes in which the parts of the module train.
        beginnings: keeps the states from before the hooks.
        due: gets the plan of the epoch for its validations.
        streams: the random streams of a private run; None for other runs.
        saves: whether the run saves checkpoints.

    Attributes:
        begun: the last epoch that began in this process.
        pending_rng: the random state of the checkpoint until training continues; None afterwards.
        epoch_rng: the random state at the beginning of the current epoch.
        saved_metadata: the metadata of the checkpoint until the next epoch has compared its data; None afterwards.
    """

    def __init__(
        self,
        context: RunContext,
        data: TrainingData,
        loop: TrainLoop,
        hooks: Hooks,
        modes: TrainingModes,
        beginnings: Beginnings,
        due: DueWork,
        streams: RandomStreams | None,
        *,
        saves: bool,
    ) -> None:
        self._context, self._data, self._loop, self._hooks = context, data, loop, hooks
        self._modes, self._beginnings, self._due, self._streams, self._saves = modes, beginnings, due, streams, saves
        self.begun: BegunEpoch | None = None
        self.pending_rng: Mapping[str, Any] | None = None
        self.epoch_rng: Mapping[str, Any] | None = None
        self.saved_metadata: Mapping[str, Any] | None = None

    def begin(self) -> Iterator[StepBatches]:
        """Call the hooks that begin the epoch and ask for its data.

        In a continued epoch, the hooks get the random state and the state from its beginning, and the current states
        are restored after them. Hooks that this process has called are not called again: their effects still exist.
        """
        state, device = self._context.state, self._context.world.device
        now = self.pending_rng or capture_rng(device)
        begun = self.begun
        if begun is None or begun.epoch != state.epoch:
            saved_within, old = self._beginnings.pop_epoch()
            begun = self.begun = BegunEpoch(state.epoch, goes_on=saved_within or state.steps_in_epoch > 0)
            calls = self._begin_calls()
            with self._beginnings.replay(old, on_all=bool(calls)) if begun.goes_on else nullcontext():
                self._call_begin_hooks(begun, calls)
                steps = self._ask_for_data(begun)
            if state.steps_in_epoch and not state.epoch_end and self._loop.epoch_outputs is not None:
                self._context.log.warning(
                    f"resumed within epoch {state.epoch}: on_end_train_epoch gets the outputs of the remaining steps. "
                    "The outputs before the interruption are lost."
                )
        else:
            self._modes.restore(begun.modes)
            with self._beginnings.replay(None, on_all=False) if begun.goes_on else nullcontext():
                self._beginnings.put_back(begun.before_loader)  # undoes an earlier call that raised
                steps = self._ask_for_data(begun)
        if begun.goes_on:
            restore_rng(now, device)
            self.pending_rng = None
        begun.goes_on = True
        return steps

    def _begin_calls(self) -> list[Callable[[], Any]]:
        """The hook and the subscribers of the beginning of an epoch; empty without any."""
        state, hook, events = self._context.state, self._hooks.begin_train_epoch, self._context.events
        if hook is None and not any(map(events.has, (Event.EPOCH_BEGIN, Event.TRAIN_EPOCH_BEGIN))):
            return []
        calls: list[Callable[[], Any]] = [lambda: events.fire(Event.EPOCH_BEGIN, state.epoch)]
        calls += [] if hook is None else [lambda: hook(state.global_step, state.epoch)]
        return [*calls, lambda: events.fire(Event.TRAIN_EPOCH_BEGIN, state.epoch)]

    def _call_begin_hooks(self, begun: BegunEpoch, calls: list[Callable[[], Any]]) -> None:
        device = self._context.world.device
        if self._streams is not None:
            renew_generators(self._context, self._streams, "epoch", self._context.state.epoch)
        elif begun.goes_on and self.epoch_rng is not None:
            restore_rng(self.epoch_rng, device)
        else:
            self.restore_rng_once()
            self.epoch_rng = capture_rng(device)
        self._modes.restore()
        if self._saves or not calls:  # the state before the hooks is needed in checkpoints only
            begun.before_hooks = begun.before_loader = self._beginnings.take()
            begun.optimized = optimized_parameters(self._loop.work)
        try:
            call_all(calls)
        except PeerError:
            raise
        except BaseException:
            self._end_begin_hooks(begun, calls)
            raise
        self._end_begin_hooks(begun, calls)

    def _end_begin_hooks(self, begun: BegunEpoch, calls: list[Callable[[], Any]]) -> None:
        begun.modes, begun.rng = self._modes.changes(), capture_rng(self._context.world.device)
        if calls:
            begun.before_loader = self._beginnings.take()

    def _ask_for_data(self, begun: BegunEpoch) -> Iterator[StepBatches]:
        if begun.rng is not None:
            restore_rng(begun.rng, self._context.world.device)
        steps: Iterator[StepBatches] = iter(())
        if not self._context.state.epoch_end:
            self._data.lengths.may_change = self.length_may_change
            steps = self._data.iter_steps(self._context.state, self._context.stack.sampling)
            self._due.validation.plan = self._data.plan  # the epoch may be longer than the one before
            if self.saved_metadata is not None:
                changes = changes_of_data(self.saved_metadata, self._data, self._context, within=begun.goes_on)
                report_changes(changes, self._context)
                self.saved_metadata = None
        self._beginnings.settle(begun.before_hooks, begun.before_loader)
        return steps

    @property
    def length_may_change(self) -> bool:
        """Whether no schedule depends on the number of steps in the first epoch."""
        by_epoch = not self._loop.schedules.counts_updates
        return not self._context.stack.is_private and (by_epoch or self._data.plan.max_steps is not None)

    def restore_rng_once(self) -> None:
        """Restore the random state of the checkpoint, if that has not happened yet."""
        if self.pending_rng is not None:
            restore_rng(self.pending_rng, self._context.world.device)
            self.pending_rng = None
