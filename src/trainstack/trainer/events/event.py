"""`Event`: the table of events in the order in which they occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, ClassVar


class Event(Enum):
    """A point of a run: its name, the values for subscribers, and when it occurs.

    A method `on_<value>` of a `Callback` or of the module subscribes to it, and so does a function passed to
    `trainer.on`.

    Attributes:
        gives: names of the arguments of a subscriber after `trainer`.
        when: description of when it occurs.
        is_certain: whether it occurs in every run that trains to its end.
    """

    INIT = ("init", "", "the trainer exists, but nothing is prepared; a callback may still replace the arguments", 1)
    LOAD_MODEL = (
        "load_model",
        "report",
        "the module has loaded weights by `init_weights_from`; a `WarmStartReport`",
        0,
    )
    READY = (
        "ready",
        "",
        "the module, its optimizers and the plan exist; states of a checkpoint are not yet restored",
        1,
    )
    LOAD_CHECKPOINT = ("load_checkpoint", "checkpoint", "the run has restored everything from a checkpoint", 0)
    SANITY_CHECK_BEGIN = ("sanity_check_begin", "", "before the trial validation of `sanity_val_steps`", 0)
    SANITY_CHECK_END = ("sanity_check_end", "results", "after it: losses and metrics by name; nothing is recorded", 0)
    TRAIN_BEGIN = ("train_begin", "", "`train()` begins, also after an interruption", 1)
    EPOCH_BEGIN = ("epoch_begin", "epoch", "an epoch begins or resumes; epochs are counted from 0", 1)
    TRAIN_EPOCH_BEGIN = ("train_epoch_begin", "epoch", "directly after `EPOCH_BEGIN`, before the loader is made", 1)
    FETCH_DATA_BEGIN = ("fetch_data_begin", "", "before a micro-batch is fetched", 1)
    FETCH_DATA_END = ("fetch_data_end", "batch", "the micro-batch is fetched, usually on the host", 1)
    TRAIN_BATCH_BEGIN = ("train_batch_begin", "batch", "before the forward pass of a micro-batch", 1)
    BEFORE_BACKWARD = ("before_backward", "outputs", "`train_step` has returned; not for a batch of weight 0", 1)
    TRAIN_BATCH_END = (
        "train_batch_end",
        "batch outputs loss",
        "after the backward pass; outputs are copies without graphs; not for a batch of weight 0",
        1,
    )
    AFTER_BACKWARD = ("after_backward", "loss", "after the backward pass of a micro-batch; the graph is freed", 1)
    BEFORE_OPTIMIZER_STEP = ("before_optimizer_step", "optimizers", "once an update; gradients are clipped", 1)
    AFTER_OPTIMIZER_STEP = (
        "after_optimizer_step",
        "optimizers",
        "the optimizers have stepped or skipped the step; schedulers and counters are up to date",
        1,
    )
    BEFORE_ZERO_GRAD = ("before_zero_grad", "optimizers", "the gradients of the step still exist", 1)
    AFTER_ZERO_GRAD = ("after_zero_grad", "optimizers", "the gradients are None", 1)
    TRAIN_STEP_END = ("train_step_end", "step", "a global step is finished and counted", 1)
    LOG = ("log", "step", "at each log point, after the loss is recorded and before anything is written", 0)
    TRAIN_EPOCH_END = ("train_epoch_end", "epoch", "after the last step of an epoch, before its validation", 1)
    VALIDATION_BEGIN = ("validation_begin", "", "before the first validation loader", 1)
    VALIDATION_BATCH_BEGIN = (
        "validation_batch_begin",
        "batch stage",
        "before a step of validation, test, prediction",
        1,
    )
    VALIDATION_BATCH_END = (
        "validation_batch_end",
        "batch outputs stage",
        "after the step, on each process for its batches, before anything is gathered",
        1,
    )
    VALIDATION_END = (
        "validation_end",
        "results",
        "after the last loader: the values measured at this step, by name",
        1,
    )
    EPOCH_END = ("epoch_end", "epoch", "after training and validation, before the checkpoint of the epoch", 1)
    SAVE_CHECKPOINT = (
        "save_checkpoint",
        "checkpoint",
        "the content of a checkpoint is complete and not yet written",
        0,
    )
    CHECKPOINT_SAVED = (
        "checkpoint_saved",
        "path",
        "the checkpoint is on disk; on the main process, at the next step boundary",
        0,
    )
    STOP_TRAINING = ("stop_training", "reason", "the training has stopped on request", 0)
    EXCEPTION = ("exception", "error", "an exception ends the training; the other processes may have ended", 0)
    TRAIN_END = ("train_end", "status", "always, once for each `train()`; before the model is exported", 1)
    SAVE_MODEL = ("save_model", "state", "before the export of the module's state, a dict that you may change", 0)

    gives: tuple[str, ...]
    when: str
    is_certain: bool

    def __new__(cls, name: str, gives: str, when: str, certain: int) -> Event:
        """Make a member from one row of the table."""
        event = object.__new__(cls)
        event._value_ = name
        event.gives, event.when, event.is_certain = tuple(gives.split()), when, bool(certain)
        return event

    @property
    def method(self) -> str:
        """The name of the method that subscribes to the event."""
        return f"on_{self.value}"


SPANS = {
    Event.EPOCH_END: Event.EPOCH_BEGIN,
    Event.TRAIN_EPOCH_END: Event.TRAIN_EPOCH_BEGIN,
    Event.VALIDATION_END: Event.VALIDATION_BEGIN,
}
"""End events and their begin events. An interrupted span begins again, which filters do not count twice."""


FOREIGN_METHODS = {
    "on_init_end": Event.INIT,
    "on_training_run_start": Event.TRAIN_BEGIN,
    "on_training_run_end": Event.TRAIN_END,
    "on_training_run_epoch_end": Event.EPOCH_END,
    "on_train_epoch_start": Event.TRAIN_EPOCH_BEGIN,
    "on_train_step_start": Event.TRAIN_BATCH_BEGIN,
    "on_eval_epoch_start": Event.VALIDATION_BEGIN,
    "on_eval_epoch_end": Event.VALIDATION_END,
    "on_evaluation_run_start": Event.VALIDATION_BEGIN,
    "on_evaluation_run_end": Event.VALIDATION_END,
    "on_stop_training_error": Event.STOP_TRAINING,
    "on_after_trainer_initialized": Event.READY,
    "on_before_optimizers_step": Event.BEFORE_OPTIMIZER_STEP,
    "on_after_optimizers_step": Event.AFTER_OPTIMIZER_STEP,
    "on_evaluate_begin": Event.VALIDATION_BEGIN,
    "on_evaluate_end": Event.VALIDATION_END,
}
"""Methods of callbacks in pytorch-accelerated and fastNLP, and the corresponding events."""


class Callback:
    """Base class of callbacks. Define `on_<event>(self, trainer, ...)` for each `Event` to subscribe to.

    There are no empty methods to override: an event without a method costs nothing. A method may take fewer arguments
    than the event has values: the last ones are omitted. Unsupported parameters raise an error when the trainer is
    made.

    With several processes the methods are called on each of them. If the states of the ranks differ, a checkpoint holds
    the state of each rank.

    Attributes:
        priority: callbacks and functions with higher priority run first; with equal priority, callbacks run first, in
            the given order.
        expects_all_events: whether to warn at the end of a run about events with a method that never occurred.
        state_key: key of the state in checkpoints; None for the name of the class. Callbacks with equal keys are
            numbered.
        copies_state: whether `update_state` copies each tensor and keeps no reference to it. Then a resume reads each
            tensor only when it is copied, so the state takes no additional memory.

    Examples:
        >>> class Steps(ts.Callback):
        ...     def on_epoch_end(self, trainer, epoch):
        ...         print(
        ...             "epoch", epoch, "ends after", trainer.state.global_step, "steps"
        ...         )
        >>> ts.Trainer(module, args, callbacks=[Steps]).train()
        epoch 0 ends after 4 steps epoch 1 ends after 8 steps
    """

    priority: int = 0
    copies_state: ClassVar[bool] = False
    expects_all_events: bool = True
    state_key: str | None = None

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, made of plain values and tensors; empty for none."""
        return {}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `get_state`."""

    def redistribute_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Compute the state of this rank from those of a run with another number of ranks, for `update_state`.

        Without this method, a checkpoint in which the states of ranks differ cannot resume on another number of ranks.

        Args:
            states: result of `get_state` of each rank.
            rank: rank of this process.
            world_size: number of processes.
        """
        raise NotImplementedError

    def evaluation_context(self, trainer: Any) -> AbstractContextManager[Any] | None:
        """Return a context for each evaluation (validation, test or prediction, also outside of training), or None."""
        return None
