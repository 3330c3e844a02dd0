"""`Beginnings` lets the hooks that begin a training or an epoch change the state of a run once."""

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
    "raised while the run continues and calls the hooks again that began its training or its epoch. Optimizers whose "
    "state_dict has another form than torch's keep their current groups. If a hook adds a group, write: "
    "if len(self.opt.param_groups) < 2: self.opt.add_param_group(...)"
)


@dataclass(slots=True)
class BegunEpoch:
    """The effects of the beginning of an epoch in this process.

    Attributes:
        epoch: its number, from 0.
        goes_on: whether the loader was asked for in this epoch before, in this process or an earlier one.
        modes: the modes of the parts whose modes the hooks have changed.
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
    """The effects of the beginning of a validation within training in this process.

    Attributes:
        announced: whether the subscribers of `VALIDATION_BEGIN` have been called in this process.
        before: the state from before its loaders were asked for.
    """

    announced: bool = False
    before: OldState | None = None


class Beginnings:
    """Calls that begin a training, an epoch or a validation, and the state from before them.

    A state that was saved within an epoch contains the effects of the calls that began the epoch. A resume must repeat
    the calls: they give the loader, freeze parameters and set attributes that are in no checkpoint. Each repeated call
    therefore begins with the state from before its first time. The current state is restored after it.

    Args:
        context: the context of the run.
        loop: the training loop of the run.
    """

    def __init__(self, context: RunContext, loop: TrainLoop) -> None:
        self._context, self._loop = context, loop
        self._loaded: Mapping[str, Any] = {}
        self._old_training: Mapping[str, Any] | None = None
        self._training_rng: Mapping[str, Any] | None = None
        self._training_has_begun = False
        self._validation: BegunValidation | None = None

    def old_states(self, begun: BegunEpoch | None, *, over: bool) -> dict[str, Any]:
        """The entries of a checkpoint: the differences between the current state and those from before the calls.

        In a private run they contain no states of generators.

        Args:
            begun: the current epoch; None if it has not begun.
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
        """The values of `before` that differ from the current state. Optimizers then held `optimized` parameters."""
        old = None if before is None else before.differing(user_states(self._context))
        joined = [] if optimized is None else name_joined(self._loop.work, optimized)
        return {"values": [], "added": [], **(old or {}), "joined": joined} if joined else old

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load the result of `old_states`; None changes nothing."""
        if state is None:
            return
        self._loaded, self._old_training = state, state["training"]
        self._training_rng = None if self._context.stack.is_private else state["training_rng"]
        self._training_has_begun = not state["over"]

    def pop_epoch(self) -> tuple[bool, Mapping[str, Any] | None]:
        """Return once whether the checkpoint was saved within an epoch, also before its first step; and its state."""
        return self._pop("epoch")

    def _pop(self, name: str) -> tuple[bool, Mapping[str, Any] | None]:
        loaded, self._loaded = self._loaded, {**self._loaded, f"in_{name}": False, name: None}
        return bool(loaded.get(f"in_{name}")), loaded.get(name)

    @contextmanager
    def train_begin(self, *, over: bool) -> Iterator[None]:
        """A block that fires `TRAIN_BEGIN`. The event changes the state once for each training.

        `over` is True if nothing is left to train.
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
        """Note that the training has reached its end. Another one may follow."""
        self._training_has_begun = False

    @contextmanager
    def validation(self) -> Iterator[BegunValidation]:
        """A block that asks for the loaders of a validation and fires `VALIDATION_BEGIN`.

        Each of the two changes the state once. An interrupted block begins again with the state from before it.
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
        """Note that the current validation within the training has finished."""
        self._validation = None

    @contextmanager
    def whole_or_undone(self) -> Iterator[None]:
        """A block that restores the states if it raises, such as an interrupted pass over a loader."""
        before = self.take()
        try:
            yield
        except BaseException as error:
            try:
                self.put_back(before)
            except Exception as failure:
                annotate(error, f"also, while states were restored: {type(failure).__name__}: {failure}")
            raise

    def take(self) -> OldState | None:
        """The current state; None if a `get_state` fails, because a hook may have to create its attributes first."""
        memory = memory_of(self._context.module.parameters())
        try:
            states = user_states(self._context)
        except Exception:  # if it is a fault, the first save raises it
            return None
        return OldState(states, lambda leaf: lies_in(leaf, memory))

    def settle(self, *states: OldState | None) -> None:
        """Drop copies of parameters that have not changed."""
        held = {id(state): state for state in states if state is not None and state.has_weights}
        if held:
            now = user_states(self._context, generators=False)
            for state in held.values():
                state.drop_unchanged_weights(now)

    def put_back(self, old: OldState | None) -> None:
        """Restore the state `old`."""
        if old is not None:
            self._put_back(old.differing(user_states(self._context)))

    def _put_back(self, old: Mapping[str, Any] | None) -> None:
        if old is not None:
            put_back_user_states(self._context, with_old_values(user_states(self._context), old))

    @contextmanager
    def replay(self, old: Mapping[str, Any] | None, *, on_all: bool) -> Iterator[None]:
        """A block that repeats calls: it begins with the `old` state, and restores the current state at its end.

        Metrics that are logged in it are dropped. Without `on_all`, parameters and moments of optimizers are not
        copied: the calls are not expected to change them.
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
