"""`EarlyStopping` stops a training whose monitored value no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitored import Watch, Watched, Watching


class EarlyStopping(Watching):
    """Stops the training once a monitored value has not become better for `patience` validations in a row.

    It is as if `trainer.request_stop` had been called: the last checkpoint is saved and the model exported. How long
    it has waited is saved, so an interruption changes nothing; a run that it has ended ends again when it is resumed.

    Args:
        monitor: a metric by its exact name, or a function of all that was measured; None for the monitor of
            `args.checkpointer_args` ("val/loss" by default).
        mode: "min", "max", or "auto" for what the metric's name tells.
        patience: validations without a better value; 1 or more. Without validation data epochs are counted.
        min_delta: by how much a value must be better to count.

    Attributes:
        waited: validations since the best one.

    Raises:
        ConfigurationError: an argument cannot be.
    """

    def __init__(
        self, monitor: Watched | None = None, *, mode: str = "auto", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigurationError(f"patience={patience!r}: write a whole number from 1 on.")
        super().__init__(Watch(monitor, mode, min_delta))
        self.patience, self.waited = patience, 0

    def judge(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Count, and stop if it has been too many."""
        self.waited = 0 if improved else self.waited + 1
        self.on_train_begin(trainer)

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Stop again what was stopped before."""
        if self.waited >= self.patience:
            name, best = self.watch.of(trainer).name, "none" if self.watch.best is None else f"{self.watch.best:.6g}"
            trainer.request_stop(
                f"{name} has not become better for {self.waited} validations (best: {best}, at step "
                f"{self.watch.best_step})"
            )

    def get_state(self) -> dict[str, Any]:
        """What it has seen and how long it has waited."""
        return {**super().get_state(), "waited": self.waited}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned."""
        super().update_state(state)
        self.waited = int(state["waited"])
