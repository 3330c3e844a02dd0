"""`RunState`, the counters of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.shuffling import ORDER_VERSION, check_order_version


class EpochEnd(IntEnum):
    """The parts of the end of an epoch, in their order."""

    LOSS = 1
    HOOKS = 2
    VALIDATION = 3
    SCHEDULERS = 4
    EVENT = 5


class DuePart(IntEnum):
    """The parts of what may be due after a global step, in their order."""

    LOG = 1
    VALIDATION = 2
    SAVE = 3


@dataclass(slots=True)
class RunState:
    """Counters of one run.

    Attributes:
        seed: of data order and samples' random numbers; a resumed run keeps the one it began with.
        epoch: the epoch under way, or to begin next.
        last_epoch: the last epoch that is wholly finished; -1 before.
        global_step: global steps finished since the run began, those included that moved nothing.
        batches: micro-batches finished on this process since the run began.
        skipped_steps: global steps that moved nothing.
        steps_in_epoch: global steps finished in `epoch`.
        samples_in_epoch: samples consumed in `epoch` over all processes: the cursor of the data order.
        batches_in_epoch: micro-batches consumed in `epoch` on this process.
        epoch_end: the part of the end of `epoch` that came last, see `EpochEnd`.
        validates: whether a validation within `epoch` is under way.
        finished_loaders: names of the loaders that are finished of the validation under way, within or after `epoch`.
        logged_means: what the steps of these loaders have logged: the mean and the weight for each loader, by name.
        validated_step: the global step of the last validation of the training that has finished.
        due_part: the part that came last of what is due after the last global step, see `DuePart`; 0 when all is done.
        interrupted: whether an exception came before all that is due after the last global step was done.
        current_step: the step under way, or the last finished; where logged values belong.
        micro_batch: the micro-batch under way in its step, counted from 0; 0 between steps.
        borrowed: whether that micro-batch is borrowed, see `Borrowed`.
        order: how the samples of `epoch` come, in words; empty before its first, or where that is not known.
        ends_epoch: whether the rest of `epoch` is left out, see `Trainer.end_epoch`.
        order_version: how large data sets are shuffled, see `ORDER_VERSION`; a resumed run keeps that of its beginning.
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
        """The epoch under way is over; the next begins at its first sample."""
        self.last_epoch = self.epoch
        self.epoch += 1
        self.steps_in_epoch = self.samples_in_epoch = self.batches_in_epoch = 0
        self.epoch_end, self.order, self.ends_epoch = 0, "", False

    def begin_epoch_end(self, part: EpochEnd) -> bool:
        """Whether `part` of the end of the epoch is still to come. From now on it counts as done.

        Parts are marked before user code runs in them, so that none comes twice, whatever is raised.
        """
        if self.epoch_end >= part:
            return False
        self.epoch_end = int(part)
        return True

    def begin_due(self, part: DuePart) -> bool:
        """The same for `part` of what is due after the last global step."""
        if self.due_part >= part:
            return False
        self.due_part = int(part)
        return True

    def finish_validation(self) -> None:
        """The validation under way, within or after the epoch, has finished all loaders."""
        self.validated_step, self.finished_loaders, self.logged_means = self.global_step, [], {}
        if not self.validates:
            self.epoch_end = max(self.epoch_end, int(EpochEnd.VALIDATION))
        self.validates = False

    def get_state(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned; other keys are ignored.

        Raises:
            CheckpointMismatchError: this release does not know its order of the data.
        """
        if "seed" in state:  # a run of before the versions has the order of version 0
            self.order_version = check_order_version(int(state.get("order_version", 0)))
        for one in fields(self):
            if one.name in state:
                kind: Any = type(getattr(self, one.name))
                setattr(self, one.name, kind(state[one.name]))


class UserState(dict[str, Any]):
    """A dict whose items are attributes too: `trainer.user_state.best_word = "yes"`.

    It is saved with checkpoints and comes back on resume. An item with `state_dict` and `load_state_dict` is saved by
    what the one returns, and given that back by the other; it has to be there, made anew, before `train` resumes. Other
    items are values, of what a checkpoint can hold: numbers, strings, tensors, arrays, and lists, tuples, sets and
    dicts of those. Where the ranks' values differ, each rank gets its own back.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"user_state has no {name!r}; it has {sorted(self) or 'nothing yet'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(f"user_state.{name} is a method of it; write user_state[{name!r}] = ... instead.")
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        del self[name]

    def get_state(self) -> dict[str, Any]:
        """The values, and the states of the objects, by name."""
        objects = {name: item.state_dict() for name, item in self.items() if is_stateful(item)}
        return {"values": {name: item for name, item in self.items() if name not in objects}, "objects": objects}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take on what `get_state` returned; an item that it does not name stays as it is.

        Raises:
            CheckpointMismatchError: an object is missing here whose state it has.
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
