"""`RayReport` reports metrics and checkpoints to Ray Train or Ray Tune, and finds the checkpoint to resume from.

Checked with Ray 2.60.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainstack.checkpointing import CheckpointInfo
from trainstack.checkpointing.directory import read_entry
from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback


class RayReport(Callback):
    """Reports metrics and checkpoints to Ray Train or Ray Tune.

    The metrics are those of the current step, with `epoch` (from 0) and `global_step`. All workers report together, as
    Ray Train requires. Outside of Ray this callback does nothing.

    Args:
        checkpoint: content of the report in addition to the metrics. `True`: an export of the evaluated weights, which
            `init_weights_from` reads, after each validation and after each epoch without one. `False`: nothing, at the
            same times. `"run"`: each checkpoint of the run once it is written, with the metrics of its step. A worker
            that Ray restarts resumes from it, see `resume`.

    Raises:
        ConfigurationError: `checkpoint` has another value.
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, *, checkpoint: bool | Literal["run"] = True) -> None:
        if checkpoint not in (True, False, "run"):
            raise ConfigurationError(f"RayReport(checkpoint={checkpoint!r}): write True, False or 'run'.")
        _require_ray()
        self._checkpoint, self._reported_at = checkpoint, -1
        self._due: dict[str, Any] | None = None  # metrics of the newest checkpoint, until it is reported
        self._written: Path | None = None  # path of this checkpoint once it is written; on the main process

    @staticmethod
    def resume() -> str:
        """Return a value for `TrainerArguments(resume=...)`: Ray's newest checkpoint of this trial or run, or "auto".

        Use it with `checkpoint="run"` if `output_dir` is not on storage that all nodes share. It copies the checkpoint
        to a temporary folder of the node, unless it is on a local file system.

        Raises:
            MissingExtraError: Ray is not installed.
        """
        _require_ray()
        from ray import train, tune

        checkpoint = tune.get_checkpoint() if _is_in_tune() else train.get_checkpoint() if _is_in_train() else None
        if checkpoint is None:
            return "auto"
        path = Path(checkpoint.path)
        if checkpoint.filesystem.type_name == "local" and path.is_dir():
            return str(path)
        # All workers must use the same folder; `to_directory` without a path would choose a random name in each.
        source = f"{checkpoint.filesystem.type_name}:{checkpoint.path}"
        folder = Path(tempfile.gettempdir()) / f"trainstack-ray-{uuid.uuid5(uuid.NAMESPACE_URL, source).hex}"
        return str(checkpoint.to_directory(folder / path.name))

    def on_validation_end(self, trainer: AbstractTrainer, results: Mapping[str, float]) -> None:
        """Report the results, if the validation is part of training."""
        if trainer.is_training and self._checkpoint != "run":
            self._report_weights(trainer)

    def on_epoch_end(self, trainer: AbstractTrainer) -> None:
        """Report an epoch without a validation at its end."""
        if self._reported_at != trainer.state.global_step and self._checkpoint != "run":
            self._report_weights(trainer)

    def on_save_checkpoint(self, trainer: AbstractTrainer) -> None:
        """Keep the metrics of the step for the report of this checkpoint."""
        if self._checkpoint == "run" and trainer.is_training:
            self._due, self._written = _metrics(trainer), None

    def on_checkpoint_saved(self, trainer: AbstractTrainer, path: Path) -> None:
        """Store the path of the newest checkpoint, on the main process.

        With `async_save` an older checkpoint may be finished while the newest is being written. It is not reported,
        because it may be deleted at any time.
        """
        found = read_entry(path)
        if self._due is not None:
            is_older = isinstance(found, CheckpointInfo) and found.global_step != self._due["global_step"]
            self._written = None if is_older else path

    def on_train_step_end(self, trainer: AbstractTrainer) -> None:
        """Report a checkpoint that was written since the last step."""
        self._report_checkpoint(trainer)

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        """Report the last checkpoint, unless training has failed: then other workers may have ended."""
        if status != "failed":
            self._report_checkpoint(trainer)

    def _report_weights(self, trainer: AbstractTrainer) -> None:
        if not _is_in_tune() and not _is_in_train():
            return
        self._reported_at = trainer.state.global_step
        with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
            path = Path(folder) / "model"
            if self._checkpoint:
                with trainer.evaluation_context():
                    trainer.export(path)
            _report(trainer, _metrics(trainer), str(path) if self._checkpoint else None)

    def _report_checkpoint(self, trainer: AbstractTrainer) -> None:
        if self._due is None or (not _is_in_tune() and not _is_in_train()):
            return
        # With `async_save` the checkpoint is written on the main process only, in the background.
        written = None if self._written is None else str(self._written)
        path = trainer.world.comm.broadcast_outcome(None, written, "reporting a checkpoint to Ray")
        if path is not None:
            metrics, self._due = self._due, None
            _report(trainer, metrics, path)


def _metrics(trainer: AbstractTrainer) -> dict[str, Any]:
    state = trainer.state
    metrics: dict[str, Any] = dict(trainer.history.usable_values_at(state.global_step))
    is_between = state.steps_in_epoch == 0 and state.last_epoch >= 0
    return metrics | {"epoch": state.last_epoch if is_between else state.epoch, "global_step": state.global_step}


def _report(trainer: AbstractTrainer, metrics: dict[str, Any], path: str | None) -> None:
    from ray import train, tune

    module: Any = tune if _is_in_tune() else train
    given = None if path is None or not trainer.is_main_process else module.Checkpoint.from_directory(path)
    module.report(metrics, checkpoint=given)


def _require_ray() -> None:
    try:
        import ray.train  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("callbacks.RayReport", "ray", "ray") from error


def _is_in_tune() -> bool:
    from ray import tune

    try:
        return tune.get_context().get_trial_id() is not None
    except Exception:  # the error outside of a trial differs between versions of Ray
        return False


def _is_in_train() -> bool:
    from ray import train

    try:
        return train.get_context().get_world_rank() is not None
    except Exception:
        return False
