"""`Event`, the table of events in the order in which they happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, ClassVar


class Event(Enum):
    """A point of a run: its name, what a subscriber gets after the trainer, and when it comes.

    A method `on_<value>` of a `Callback` or of the module, and a function given to `trainer.on`, subscribe to it.

    Attributes:
        gives: the names of what a subscriber is given after `trainer`.
        when: when it comes, in words.
        is_certain: whether every run that trains to its end comes by it.
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
        """One row of the table."""
        event = object.__new__(cls)
        event._value_ = name
        event.gives, event.when, event.is_certain = tuple(gives.split()), when, bool(certain)
        return event

    @property
    def method(self) -> str:
        """The name of the method that subscribes to it."""
        return f"on_{self.value}"


SPANS = {
    Event.EPOCH_END: Event.EPOCH_BEGIN,
    Event.TRAIN_EPOCH_END: Event.TRAIN_EPOCH_BEGIN,
    Event.VALIDATION_END: Event.VALIDATION_BEGIN,
}
"""Ends and their beginnings. What was interrupted in between begins once more, which filters do not count twice."""


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
"""Methods of callbacks of pytorch-accelerated and fastNLP, with the events that come in their place."""


class Callback:
    """What acts at points of a run. Define `on_<event>(self, trainer, ...)` for each `Event` it subscribes to.

    There are no empty methods to override: what is not defined costs nothing. A method may take fewer arguments than
    the event gives, from the right; what it cannot take is refused when the trainer is made.

    On many processes the methods are called on each of them. A checkpoint keeps the state of each rank where the ranks'
    states differ.

    Attributes:
        priority: callbacks and functions with a higher one come first; among equals callbacks do, in their order.
        expects_all_events: whether it is said at the end of a run that an event to which it subscribes never came.
        state_key: names the state in checkpoints; the name of the class if None. Several of one class are numbered.
        copies_state: whether `update_state` copies the tensors that it is given into its own, and keeps none of them.
            Then a resume reads each of them when it is copied, and the state takes no memory besides.
    """

    priority: int = 0
    copies_state: ClassVar[bool] = False
    expects_all_events: bool = True
    state_key: str | None = None

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; nothing if empty. Made of plain values and tensors."""
        return {}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned."""

    def redistribute_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Make the state of this rank out of those of a run with another number of ranks, for `update_state`.

        Without it a checkpoint in which the ranks' states differ is refused on another number of ranks. `states` is
        what `get_state` returned on each of them.
        """
        raise NotImplementedError

    def evaluation_context(self, trainer: Any) -> AbstractContextManager[Any] | None:
        """Entered around each evaluation: validation, test and prediction, in training or by themselves."""
        return None
