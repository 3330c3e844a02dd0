"""`AbstractCheckpointer`, the contract between a trainer and its checkpointer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEFT_OUT = "left_out"
"""The key in the metadata of checkpoints and exports: the names of the tensors that they omit, each with its digest."""


@dataclass
class Checkpoint:
    """The states from which a run continues. `Checkpoint()` means that nothing was loaded.

    The states are trees of dicts, lists, tuples, numbers, strings, tensors and numpy arrays. During a save a checkpoint
    shares the tensors of their owners. A loaded one owns its tensors, which are on the CPU and require no gradient.

    Attributes:
        module_interface_state: `ModuleInterface.get_state()`, by default the module's `state_dict`.
        trainer_state: counters, optimizers and schedulers.
        trainer_backend_state: one entry for each layer of the backend stack.
        rng_state: the states of the random number generators.
        history_state: the metrics recorded so far.
        callback_states: one entry for each callback that has a state.
        plan: the training plan as plain values, readable in the manifest. Contains no tensors.
        global_step: finished global steps, including skipped ones.
        metadata: further values that should be readable in the manifest. Contains no tensors.
        rank_states: for each rank, the states that differ between the ranks; None if there are none.
        run_id: identifies the run that wrote the checkpoint; None if unknown.
        lineage: the origin of the run, as plain values for the manifest; None if unknown.
    """

    module_interface_state: dict[str, Any] | None = None
    trainer_state: dict[str, Any] | None = None
    trainer_backend_state: dict[str, Any] | None = None
    rng_state: dict[str, Any] | None = None
    history_state: dict[str, Any] | None = None
    callback_states: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    global_step: int | None = None
    metadata: dict[str, Any] | None = None
    rank_states: list[dict[str, Any]] | None = None
    run_id: str | None = None
    lineage: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is no module, trainer or backend state to restore."""
        states = (self.module_interface_state, self.trainer_state, self.trainer_backend_state)
        return all(state is None for state in states)


class AbstractCheckpointer(ABC):
    """Decides when, where and how states are stored. Subclass it to store them elsewhere.

    A checkpointer with its own copy of the state may return from `save` before the state is safe. It then overrides
    `watch`, `poll`, `finish` and `abandon`, by which the trainer gets failures and waits at the end. If the state is
    safe when `save` returns, none of them is needed.
    """

    @abstractmethod
    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Store `checkpoint_state`, or decide not to.

        Args:
            checkpoint_state: its tensors still belong to the training: copy them, and change nothing.
            index: the number of the save, by default the epoch.
            force: store it even if no save is due.

        Returns:
            Where it is stored, or will be once it is safe; None if it is not stored.

        Raises:
            CheckpointError: it could not be stored, or an earlier one could not be stored in the background.
        """

    @abstractmethod
    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return the state to continue from. An empty `Checkpoint()` means a new start.

        Args:
            resume: None or False uses the checkpointer's arguments. True or `"last"` requests the newest checkpoint;
                `"auto"` the newest if there is one; `"best"` the one with the best value of a metric; a path that one.

        Raises:
            CheckpointNotFoundError: the requested checkpoint does not exist.
            CheckpointDamagedError: the requested checkpoint exists and cannot be used.
        """

    def save_aside(self, checkpoint_state: Checkpoint, name: str) -> str | None:
        """Store the state after an exception under a separate `name`, which a run never resumes from by default.

        Does nothing by default. Called on the main process only.
        """
        return None

    def is_due(self, index: int, force: bool) -> bool:
        """Whether `save` would store anything if called with these arguments. If not, no states are collected."""
        return True

    def begin_run(self, *, resumed: bool) -> None:  # noqa: B027 - most checkpointers need not know
        """Called when training begins: from the result of `load` if `resumed`, otherwise from the beginning."""

    def watch(self, wake: Callable[[], None]) -> None:  # noqa: B027 - nothing to report by default
        """Register `wake`, to be called from any thread when a background save has ended, also after a failure."""

    def poll(self) -> None:  # noqa: B027
        """Raise the error of a failed background save, once, without waiting.

        Called at the next step boundary after `wake`, on the main process only.

        Raises:
            CheckpointError: a checkpoint could not be stored.
        """

    def finish(self) -> None:  # noqa: B027
        """Wait until all saved states are safe, and release memory for saving. Raises as `poll` does.

        Called before `train` returns or raises, also after an interrupt. An interrupt during the wait ends the wait.
        """

    def abandon(self) -> None:  # noqa: B027
        """Abandon the current write. Called when `finish` is interrupted after an exception.

        Stored states remain safe, and no partial checkpoint may remain that `load` would accept.
        """

    def save_model(
        self,
        model_state: dict[str, Any],
        index: int,
        *,
        plan: dict[str, Any] | None = None,
        global_step: int | None = None,
        metadata: dict[str, Any] | None = None,
        lineage: dict[str, Any] | None = None,
    ) -> str | None:
        """Export the model only, for use and not for resuming. Does nothing by default.

        `plan`, `global_step`, `metadata` and `lineage` have the meaning of `Checkpoint`, and are for readers of the
        manifest.
        """
        return None

    @property
    def last_save_s(self) -> float | None:
        """Seconds from the last call of `save` until its state was safe in the background.

        None before the first such save, and if states are always safe when `save` returns.
        """
        return None

    @property
    def every_n_steps(self) -> int | float | None:
        """Global steps between saves inside an epoch; a float is a fraction of all steps; None for no such saves."""
        return None

    @property
    def keeps_frozen(self) -> bool:
        """Whether checkpoints contain frozen parameters that still have their initial values.

        If not, `Checkpoint.metadata` has their names and digests, which the trainer compares on resume.
        """
        return True

    @property
    def every_n_seconds(self) -> float | None:
        """Seconds between saves inside an epoch, by the clock of rank 0; None for no such saves."""
        return None

    @property
    def keeps_best_by(self) -> tuple[str, str] | None:
        """The metric that selects the best checkpoints, and "min" or "max"; None if no checkpoint is kept for its
        value.

        The trainer then also saves after each validation with a better value than all before.
        """
        return None
