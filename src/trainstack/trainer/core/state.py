"""`RunState`: the counters of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.shuffling import ORDER_VERSION, check_order_version


class EpochEnd(IntEnum):
    """The parts of the end of an epoch, in order."""

    LOSS = 1
    HOOKS = 2
    VALIDATION = 3
    SCHEDULERS = 4
    EVENT = 5


class DuePart(IntEnum):
    """The actions that may be due after a global step, in order."""

    LOG = 1
    VALIDATION = 2
    SAVE = 3


@dataclass(slots=True)
class RunState:
    """Counters of one run.

    Attributes:
        seed: seed of the data order and of the samples' random numbers; a resumed run keeps its first seed.
        epoch: the current epoch, or the next one to begin.
        last_epoch: the last completely finished epoch; -1 before the first.
        global_step: global steps since the start of the run, including steps that changed no weights.
        batches: micro-batches on this process since the start of the run.
        skipped_steps: global steps that changed no weights.
        steps_in_epoch: global steps in `epoch`.
        samples_in_epoch: samples used in `epoch` over all processes: the position in the data order.
        batches_in_epoch: micro-batches used in `epoch` on this process.
        epoch_end: the last part of the end of `epoch` that has begun, see `EpochEnd`.
        validates: whether a validation within `epoch` is running.
        finished_loaders: names of the loaders that the running validation, within or after `epoch`, has finished.
        logged_means: values logged by the steps of these loaders: mean and weight for each loader, by name.
        validated_step: global step of the last finished validation in training.
        due_part: the last action due after the last global step that has begun, see `DuePart`; 0 when all are done.
        interrupted: whether an exception was raised before all actions due after the last global step were done.
        current_step: the current step, or the last finished one; logged values belong to it.
        micro_batch: the current micro-batch of the step, counted from 0; 0 between steps.
        borrowed: whether this micro-batch is borrowed, see `Borrowed`.
        order: description of the order of samples in `epoch`; empty before the first epoch or if unknown.
        ends_epoch: whether the rest of `epoch` is skipped, see `Trainer.end_epoch`.
        order_version: version of the shuffle of large datasets, see `ORDER_VERSION`; a resumed run keeps its version.
    """

    seed: int = 0
    epoch: int = 0
    last_epoch: int = -1
    global_step: int = 0
    batches: int = 0
    skipped_steps: int = 0
    steps_in_epoch: int = 0
    samples_in_epoch: int = 0
    batches_in_epoch: int = 0
    epoch_end: int = 0
    validates: bool = False
    finished_loaders: list[str] = field(default_factory=list)
    logged_means: dict[str, list[list[float]]] = field(default_factory=dict)
    validated_step: int = 0
    due_part: int = 0
    interrupted: bool = False
    current_step: int = 0
    micro_batch: int = 0
    borrowed: bool = False
    order: str = ""
    ends_epoch: bool = False
    order_version: int = ORDER_VERSION

    def finish_epoch(self) -> None:
        """Finish the current epoch; the next one begins at its first sample."""
        self.last_epoch = self.epoch
        self.epoch += 1
        self.steps_in_epoch = self.samples_in_epoch = self.batches_in_epoch = 0
        self.epoch_end, self.order, self.ends_epoch = 0, "", False

    def begin_epoch_end(self, part: EpochEnd) -> bool:
        """Return whether `part` of the end of the epoch has not begun yet, and mark it as begun.

        A part is marked before user code runs in it, so that it never runs twice, even after an error.
        """
        if self.epoch_end >= part:
            return False
        self.epoch_end = int(part)
        return True

    def begin_due(self, part: DuePart) -> bool:
        """Return whether `part`, an action due after the last global step, has not begun yet, and mark it as begun."""
        if self.due_part >= part:
            return False
        self.due_part = int(part)
        return True

    def finish_validation(self) -> None:
        """Record that the running validation, within or after the epoch, has finished all loaders."""
        self.validated_step, self.finished_loaders, self.logged_means = self.global_step, [], {}
        if not self.validates:
            self.epoch_end = max(self.epoch_end, int(EpochEnd.VALIDATION))
        self.validates = False

    def get_state(self) -> dict[str, Any]:
        """Return all counters."""
        return asdict(self)

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Set the counters from `get_state`; unknown keys are ignored.

        Raises:
            CheckpointMismatchError: this release does not support the version of the data order.
        """
        if "seed" in state:  # a checkpoint without a version is older than the versions: version 0
            self.order_version = check_order_version(int(state.get("order_version", 0)))
        for one in fields(self):
            if one.name in state:
                kind: Any = type(getattr(self, one.name))
                setattr(self, one.name, kind(state[one.name]))


class UserState(dict[str, Any]):
    """A dict whose items are also attributes: `trainer.user_state.best_word = "yes"`.

    Checkpoints store it, and a resumed run restores it. For an item with `state_dict` and `load_state_dict`, the
    checkpoint stores the result of `state_dict`; create the object again before `train` resumes. Other items are
    values of types that a checkpoint can hold: numbers, strings, tensors, arrays, and lists, tuples, sets and dicts of
    these. If the values differ between ranks, each rank gets its own values back.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"user_state has no {name!r}; it has {sorted(self) or 'nothing yet'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(
                f"user_state.{name} is a method of user_state; write user_state[{name!r}] = ... instead."
            )
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]

    def get_state(self) -> dict[str, Any]:
        """Return the values, and the states of the objects, by name."""
        objects = {name: item.state_dict() for name, item in self.items() if is_stateful(item)}
        return {"values": {name: item for name, item in self.items() if name not in objects}, "objects": objects}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the items from `get_state`; other items are not changed.

        Raises:
            CheckpointMismatchError: the state contains an object that does not exist here.
        """
        objects = state["objects"]
        missing = sorted(name for name in objects if not is_stateful(self.get(name)))
        if missing:
            raise CheckpointMismatchError(
                f"the checkpoint has the state of {', '.join(f'user_state.{name}' for name in missing)}, and there is "
                f"no such object with load_state_dict. Write trainer.user_state.{missing[0]} = ... before train()."
            )
        self.update(state["values"])
        for name, saved in objects.items():
            self[name].load_state_dict(saved)


def is_stateful(item: Any) -> bool:
    """Whether `item` has `state_dict` and `load_state_dict`."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
