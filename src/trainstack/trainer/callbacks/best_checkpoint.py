"""`BestCheckpoint` keeps the weights with the best monitored value."""

from __future__ import annotations

import os
from pathlib import Path

from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitored import Watch, Watched, Watching


class BestCheckpoint(Watching):
    """Exports the weights whenever a monitored value is the best so far, and puts them into the module at the end.

    What is exported are the weights that were evaluated: the averaged ones, where `EMA` evaluates those. The folder is
    an export like any other: `init_weights_from` reads it. To go on training from the best state, keep checkpoints
    with `keep_best` and write `resume="best"`.

    Args:
        monitor: a metric by its exact name, or a function of all that was measured; None for the monitor of
            `args.checkpointer_args` ("val/loss" by default).
        mode: "min", "max", or "auto" for what the metric's name tells.
        path: of the folder; `best` in `args.output_dir` if None.
        load_best_at_end: after the last checkpoint is saved and before the model is exported. If `train()` goes on
            later, it does so from the weights trained last.
        min_delta: by how much a value must be better to count.

    Raises:
        ConfigurationError: the mode cannot be told.
    """

    def __init__(
        self,
        monitor: Watched | None = None,
        *,
        mode: str = "auto",
        path: str | os.PathLike[str] | None = None,
        load_best_at_end: bool = True,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(Watch(monitor, mode, min_delta))
        self._path, self._load_best_at_end = path, load_best_at_end

    def path_of(self, trainer: AbstractTrainer) -> Path:
        """The folder with the best weights of `trainer`."""
        return Path(trainer.args.output_dir) / "best" if self._path is None else Path(self._path)

    def judge(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Export what is better than all before."""
        if improved:
            with trainer.evaluation_context():
                trainer.export(self.path_of(trainer))

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        """Load the best weights, unless the run is to go on."""
        super().on_train_end(trainer, status)
        if self._load_best_at_end and self.watch.best is not None and status in ("finished", "stopped"):
            trainer.keep_trained_weights()
            trainer.load_export(self.path_of(trainer))
