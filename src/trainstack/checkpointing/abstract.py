"""`AbstractCheckpointer`, the contract between a trainer and its checkpointer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEFT_OUT = "left_out"
"""The key in the metadata of checkpoints and exports: names of tensors that they leave out, each with its digest."""


@dataclass
class Checkpoint:
    """The states from which a run continues; `Checkpoint()` means that nothing was loaded.

    The states are trees of dicts, lists, tuples, numbers, strings, tensors and numpy arrays.
    A checkpoint that is being saved borrows the tensors of its owners; one that was loaded owns its
    tensors, which lie on the CPU and require no gradient.

    Attributes:
        module_interface_state: `ModuleInterface.get_state()`, by default the module's `state_dict`.
        trainer_state: counters, optimizers and schedulers.
        trainer_backend_state: one entry for each layer of the backend stack.
        rng_state: the states of the random number generators.
        history_state: the metrics recorded so far.
        callback_states: one entry for each callback that has a state.
        plan: the training plan as plain values, kept readable in the manifest. Holds no tensors.
        global_step: global steps finished, skipped ones included.
        metadata: whatever else should be readable in the manifest. Holds no tensors.
        rank_states: for each rank, what differs between the ranks; None where nothing does.
        run_id: identifies the run that wrote the checkpoint; None if unknown.
        lineage: where the run began, as plain values for the manifest; None if unknown.
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
    """Decides when, where and how states are kept. Subclass it to keep them elsewhere.

    A checkpointer may return from `save` before the state is safe, if it has its own copy. It then overrides `watch`,
    `poll`, `finish` and `abandon`, by which the trainer learns of failures and waits at the end. One that has saved
    when `save` returns needs none of them.
    """

    @abstractmethod
    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Keep `checkpoint_state`, or decide not to.

        Args:
            checkpoint_state: its tensors still belong to the training: keep copies, change nothing.
            index: which save this is, by default the epoch.
            force: keep it even if it would not be its turn.

        Returns:
            Where it is kept, or will be once it is safe; None if it is not.

        Raises:
            CheckpointError: it should have been kept and could not be, or an earlier one could not in the background.
        """

    @abstractmethod
    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return the state to continue from; an empty `Checkpoint()` means to start afresh.

        Args:
            resume: None or False leaves it to the checkpointer's own arguments; True or `"last"` asks for the
                newest checkpoint; `"auto"` for the newest if there is any; `"best"` for the one with the best
                value of a metric; a path for that one.

        Raises:
            CheckpointNotFoundError: what was asked for does not exist.
            CheckpointDamagedError: what was asked for exists and cannot be used.
        """

    def save_aside(self, checkpoint_state: Checkpoint, name: str) -> str | None:
        """Keep what was left after an exception under a `name` of its own, never as a point to go on from by default.

        Does nothing by default. Called on the main process alone.
        """
        return None

    def is_due(self, index: int, force: bool) -> bool:
        """Whether `save` would keep anything if it were called with these; spares collecting states in vain."""
        return True

    def begin_run(self, *, resumed: bool) -> None:  # noqa: B027 - most checkpointers need not know
        """Training begins: from what `load` returned if `resumed`, else afresh."""

    def watch(self, wake: Callable[[], None]) -> None:  # noqa: B027 - nothing to report by default
        """`wake` is to be called, from any thread, when a save has ended in the background, well or not."""

    def poll(self) -> None:  # noqa: B027
        """Raise what has failed in the background since it was last raised, without waiting.

        Called at the next step boundary after `wake`, on the main process alone.

        Raises:
            CheckpointError: a checkpoint that `save` was given could not be kept.
        """

    def finish(self) -> None:  # noqa: B027
        """Wait until all that was saved is safe; raises as `poll`, and gives back what was held for saving.

        Called before `train` returns or raises, an interrupt included. An interrupt while it waits ends the waiting.
        """

    def abandon(self) -> None:  # noqa: B027
        """Give up what is still being written; called when `finish` is interrupted after an exception.

        What was safe before stays so, and no half of a checkpoint may be left that `load` would take.
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
        """Export the model alone, for use rather than for resuming. Does nothing by default.

        `plan`, `global_step`, `metadata` and `lineage` are those of a `Checkpoint`, for people to read.
        """
        return None

    @property
    def last_save_s(self) -> float | None:
        """How long the last save in the background took, from the call of `save` until it was safe.

        None before the first one, and where `save` returns only when all is safe.
        """
        return None

    @property
    def every_n_steps(self) -> int | float | None:
        """Global steps between saves inside an epoch: a number, a float for a fraction of the run's, None for none."""
        return None

    @property
    def keeps_frozen(self) -> bool:
        """Whether checkpoints have the frozen parameters that still have the values that the run began with.

        Where they have not, `Checkpoint.metadata` has their names and digests. The trainer compares them on resume.
        """
        return True

    @property
    def every_n_seconds(self) -> float | None:
        """Seconds between saves inside an epoch, by the clock of rank 0; None for none."""
        return None

    @property
    def keeps_best_by(self) -> tuple[str, str] | None:
        """The metric by which the best checkpoints are kept, and "min" or "max"; None where none is kept for its value.

        The trainer then also saves after each validation that has brought a better value than all before.
        """
        return None
