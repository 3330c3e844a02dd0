"""What the trainer asks of a checkpointer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from trainstack.checkpointing.checkpoint import Checkpoint


class AbstractCheckpointer(ABC):
    """Decides when, where and how states are kept. Subclass it to keep them elsewhere."""

    @abstractmethod
    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Keep `checkpoint_state`, or decide not to.

        Args:
            checkpoint_state: its tensors still belong to the training: keep copies, change nothing.
            index: which save this is, by default the epoch.
            force: keep it even if it would not be its turn.

        Returns:
            Where it was kept, or None if it was not.

        Raises:
            CheckpointError: it should have been kept and could not be.
        """

    @abstractmethod
    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return the state to continue from; an empty `Checkpoint()` means to start afresh.

        Args:
            resume: None or False leaves it to the checkpointer's own arguments; True asks for the
                newest checkpoint; `"auto"` for the newest if there is any; a path for that one.

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

    def save_model(self, model_state: dict[str, Any], index: int) -> str | None:
        """Export the model alone, for use rather than for resuming. Does nothing by default."""
        return None

    @property
    def every_n_steps(self) -> int | None:
        """How many global steps lie between saves inside an epoch, or None for none."""
        return None
