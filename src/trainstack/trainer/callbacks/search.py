"""`OptunaPruning` reports to a search for hyperparameters."""

from __future__ import annotations

from typing import Any

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitored import BestValue, MonitorCallback, MonitoredValue


class OptunaPruning(MonitorCallback):
    """Reports a monitored value to an Optuna trial, and ends the training where the trial is to be pruned.

    The main process reports, and all processes get its decision. A pruned run saves its last checkpoint and exports the
    model, as after `trainer.request_stop`. Then `train()` raises `optuna.TrialPruned` on all processes.

    Args:
        trial: the trial of the objective function; processes other than the main one may give None.
        monitor: a metric by its exact name, or a function of all that was measured; None for the monitor of the run,
            as in `BestCheckpoint`.
        mode: "min", "max", or "auto" for what the metric's name tells.
        step: what the values are reported at: `"epoch"`, which is 0 in the first, or `"global_step"`. Optuna keeps the
            first value of a step, so write the latter to validate several times an epoch.

    Raises:
        ConfigurationError: the mode cannot be told, or `step` is something else; when training begins: the study
            optimizes in the other direction.
        MissingExtraError: optuna is not installed.
    """

    def __init__(
        self, trial: Any, monitor: MonitoredValue | None = None, *, mode: str = "auto", step: str = "epoch"
    ) -> None:
        if step not in ("epoch", "global_step"):
            raise ConfigurationError(f"step={step!r}: write 'epoch' or 'global_step'.")
        try:
            from optuna import TrialPruned
        except ImportError as error:
            raise MissingExtraError("callbacks.OptunaPruning", "optuna", "optuna") from error
        super().__init__(BestValue(monitor, mode))
        # in a tuple: plain settings have to be the same on all processes, and only the main one needs a trial
        self._trial, self._step, self._pruned = (trial,), step, TrialPruned

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Refuse a study that optimizes in the other direction, before the first step.

        Raises:
            ConfigurationError: it does, or the main process has no trial.
        """
        super().on_train_begin(trainer)
        if not trainer.is_main_process:
            return
        (trial,) = self._trial
        if trial is None:
            raise ConfigurationError("OptunaPruning(None) on the main process, which reports. Give it the trial.")
        direction = getattr(getattr(trial, "study", None), "direction", None)
        watched = self.best_value.of(trainer)
        wanted = {"min": "MINIMIZE", "max": "MAXIMIZE"}[watched.mode]
        if direction is not None and direction.name not in (wanted, "NOT_SET"):
            raise ConfigurationError(
                f"the study has the direction {direction.name.lower()!r}, and low values of {watched.name!r} are "
                f"{'good' if watched.mode == 'min' else 'bad'}. Write create_study(direction={wanted.lower()!r}), or "
                "another mode= of OptunaPruning."
            )

    def on_new_value(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Report the value, and ask whether the trial is to be pruned."""
        step = trainer.state.epoch if self._step == "epoch" else trainer.state.global_step
        (trial,), prune, failure = self._trial, False, None
        if trainer.is_main_process:
            try:
                trial.report(self.best_value.last, step)
                prune = bool(trial.should_prune())
            except Exception as error:  # the storage of the study may be out of reach
                failure = error
        if trainer.world.comm.broadcast_outcome(failure, prune, "reporting to the Optuna trial"):
            reason = f"Optuna has pruned the trial at {self._step} {step}"
            trainer.request_stop(reason, then_raise=self._pruned(reason))
