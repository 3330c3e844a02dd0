"""`Beginnings` lets what begins a training or an epoch act on the state of a run once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainstack.errors import annotate
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.modes import Modes
from trainstack.trainer.core.random_state import capture_rng, restore_rng
from trainstack.trainer.core.state_tree import OldState, copied, lies_in, memory_of, with_old_values
from trainstack.trainer.events import Event
from trainstack.trainer.resume.module_generators import without_generators
from trainstack.trainer.resume.run_snapshot import (
    RunSnapshot,
    name_joined,
    optimized_parameters,
    put_back_user_states,
    take_out,
    user_states,
)
from trainstack.trainer.run.train_loop import TrainLoop

AGAIN = (
    "raised while the run goes on and calls again what began its training or its epoch. Optimizers with a state_dict "
    "of another form than torch's have their present groups. Where a hook adds one, write: "
    "if len(self.opt.param_groups) < 2: self.opt.add_param_group(...)"
)


@dataclass(slots=True)
class BegunEpoch:
    """What the beginning of an epoch has left in this process.

    Attributes:
        epoch: which one.
        goes_on: whether the loader has been given for this epoch before, in this process or an earlier one.
        modes: of the parts whose modes the hooks have changed.
        rng: the random state after the hooks; None before.
        before_hooks, before_loader: the state at these moments.
        optimized: the parameters that the optimizers held before the hooks.
    """

    epoch: int
    goes_on: bool = False
    modes: Modes = field(default_factory=dict)
    rng: Mapping[str, Any] | None = None
    before_hooks: OldState | None = None
    before_loader: OldState | None = None
    optimized: Sequence[Tensor] | None = None


@dataclass(slots=True)
class BegunValidation:
    """What the beginning of a validation within training has left in this process.

    Attributes:
        announced: whether the subscribers of `VALIDATION_BEGIN` have been called in this process.
        before: the state from before its loaders were asked for.
    """

    announced: bool = False
    before: OldState | None = None


class Beginnings:
    """Calls that begin something, and the state from before them.

    What is restored within an epoch contains the effects of the calls that began it. They have to be made again all the
    same: they give the loader, freeze parameters and set attributes that no checkpoint has. So each such call is made
    on the state from before its first time, and afterwards the state is what it was before the call.

    Args:
        context: of the run.
        loop: of the run.
    """

    def __init__(self, context: RunContext, loop: TrainLoop) -> None:
        self._context, self._loop = context, loop
        self._loaded: Mapping[str, Any] = {}
        self._old_training: Mapping[str, Any] | None = None
        self._training_rng: Mapping[str, Any] | None = None
        self._training_has_begun = False
        self._validation: BegunValidation | None = None

    def old_states(self, begun: BegunEpoch | None, *, over: bool) -> dict[str, Any]:
        """What a checkpoint keeps: the differences of the state now to those from before the calls.

        Those of a private run hold no states of generators.

        Args:
            begun: the epoch under way; None if it has not begun.
            over: whether the training ends here.
        """
        old = {
            "training": self._old_training,
            "epoch": None if begun is None else self._differing(begun.before_hooks, begun.optimized),
            "validation": None if self._validation is None else self._differing(self._validation.before),
        }
        if self._context.stack.is_private:
            old = {name: without_generators(one) for name, one in old.items()}
        return {
            **old,
            "over": over,
            "training_rng": self._training_rng,
            "in_epoch": begun is not None,
            "in_validation": self._validation is not None,
        }

    def _differing(
        self, before: OldState | None, optimized: Sequence[Tensor] | None = None
    ) -> Mapping[str, Any] | None:
        """What the state now has to get back of that from `before`, when optimizers held the `optimized` parameters."""
        old = None if before is None else before.differing(user_states(self._context))
        joined = [] if optimized is None else name_joined(self._loop.work, optimized)
        return {"values": [], "added": [], **(old or {}), "joined": joined} if joined else old

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take back what `old_states` returned; None for nothing."""
        if state is None:
            return
        self._loaded, self._old_training = state, state["training"]
        self._training_rng = None if self._context.stack.is_private else state["training_rng"]
        self._training_has_begun = not state["over"]

    def pop_epoch(self) -> tuple[bool, Mapping[str, Any] | None]:
        """Whether the checkpoint lies within an epoch, be it before its first step, and the old state; once."""
        return self._pop("epoch")

    def _pop(self, name: str) -> tuple[bool, Mapping[str, Any] | None]:
        loaded, self._loaded = self._loaded, {**self._loaded, f"in_{name}": False, name: None}
        return bool(loaded.get(f"in_{name}")), loaded.get(name)

    @contextmanager
    def train_begin(self, *, over: bool) -> Iterator[None]:
        """A block that fires `TRAIN_BEGIN`; its effect counts once for a training.

        `over` says that there is nothing to train.
        """
        context = self._context
        device = context.world.device
        if not context.events.has(Event.TRAIN_BEGIN):
            self._training_has_begun |= not over
            yield
            return
        again, now = self._training_has_begun or over, capture_rng(device)
        if again and self._training_rng is not None:
            restore_rng(self._training_rng, device)
        elif not again and not context.stack.is_private:
            self._training_rng = now
        try:
            if again:
                with self.replay(self._old_training, on_all=context.events.has_foreign(Event.TRAIN_BEGIN)):
                    yield
            else:
                before, optimized = self.take(), optimized_parameters(self._loop.work)
                try:
                    yield
                finally:
                    self._old_training = copied(self._differing(before, optimized))
        finally:
            self._training_has_begun |= not over
            if again:
                restore_rng(now, device)

    def end_training(self) -> None:
        """The training has reached its end; another one may follow."""
        self._training_has_begun = False

    @contextmanager
    def validation(self) -> Iterator[BegunValidation]:
        """A block that asks for the loaders of a validation and fires `VALIDATION_BEGIN`; each acts once on the state.

        One that was broken off begins again on the state from before it.
        """
        begun = self._validation
        if begun is not None:
            with self.replay(None, on_all=self._is_all_changed(begun)):
                self.put_back(begun.before)
                yield begun
            return
        begun, (goes_on, old) = BegunValidation(), self._pop("validation")
        with self.replay(old, on_all=self._is_all_changed(begun)) if goes_on else nullcontext():
            begun.before = self.take()
            try:
                yield begun
            except BaseException:
                if goes_on or begun.announced:
                    self._validation = begun
                else:  # the loaders could not be made
                    self.put_back(begun.before)
                raise
        self._validation = begun
        self.settle(begun.before)

    def _is_all_changed(self, begun: BegunValidation) -> bool:
        return not begun.announced and self._context.events.has_foreign(Event.VALIDATION_BEGIN)

    def end_validation(self) -> None:
        """The validation of the training that was under way has finished."""
        self._validation = None

    @contextmanager
    def whole_or_undone(self) -> Iterator[None]:
        """A block that leaves no trace in states if it raises, as the pass over a loader that is broken off."""
        before = self.take()
        try:
            yield
        except BaseException as error:
            try:
                self.put_back(before)
            except Exception as failure:
                annotate(error, f"also, while states were put back: {type(failure).__name__}: {failure}")
            raise

    def take(self) -> OldState | None:
        """The state of now; None where a `get_state` fails, since a hook may have yet to make what it returns."""
        memory = memory_of(self._context.module.parameters())
        try:
            states = user_states(self._context)
        except Exception:  # if it is a fault, the first save raises it
            return None
        return OldState(states, lambda leaf: lies_in(leaf, memory))

    def settle(self, *states: OldState | None) -> None:
        """Drop parameters that have not changed since they were taken."""
        held = {id(state): state for state in states if state is not None and state.has_weights}
        if held:
            now = user_states(self._context, generators=False)
            for state in held.values():
                state.drop_unchanged_weights(now)

    def put_back(self, old: OldState | None) -> None:
        """Make the state what it was when `old` was taken."""
        if old is not None:
            self._put_back(old.differing(user_states(self._context)))

    def _put_back(self, old: Mapping[str, Any] | None) -> None:
        if old is not None:
            put_back_user_states(self._context, with_old_values(user_states(self._context), old))

    @contextmanager
    def replay(self, old: Mapping[str, Any] | None, *, on_all: bool) -> Iterator[None]:
        """A block that makes calls once more: it begins on the `old` state, and the state of now follows it.

        What is recorded in it is forgotten. Without `on_all` the calls are not expected to change parameters and
        moments of optimizers, which spares copies of them.
        """
        context, loop = self._context, self._loop
        kept = RunSnapshot(
            context,
            loop.work,
            loop.schedules,
            shared=() if on_all else context.module.parameters(),
            on_host=True,
            keeps_moments=on_all,
        )
        try:
            with context.sink.mute(context.state):
                self._put_back(old)
                take_out(loop.work, (old or {}).get("joined", ()))
                yield
        except ValueError as error:
            annotate(error, AGAIN)
            raise
        finally:
            kept.restore()
