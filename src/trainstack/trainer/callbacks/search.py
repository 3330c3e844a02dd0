"""`OptunaPruning` reports to an Optuna search for hyperparameters."""

from __future__ import annotations

from typing import Any

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitored import BestValue, MonitorCallback, MonitoredValue


class OptunaPruning(MonitorCallback):
    """Reports a monitored value to an Optuna trial, and stops training if the trial should be pruned.

    The main process reports, and all processes use its decision. A pruned run saves its last checkpoint and exports the
    model, as after `trainer.request_stop`. Then `train()` raises `optuna.TrialPruned` on all processes.

    Args:
        trial: trial of the objective function; processes other than the main one may pass None.
        monitor: exact name of a metric, or function of all measured values; None for the monitor of the run, as in
            `BestCheckpoint`.
        mode: "min", "max", or "auto" to derive it from the metric's name.
        step: step of the reported values: `"epoch"`, counted from 0, or `"global_step"`. Optuna keeps only the first
            value of a step, so write "global_step" for several validations an epoch.

    Raises:
        ConfigurationError: the mode is ambiguous, or `step` has another value; or, when training starts: the study
            optimizes in the other direction.
        MissingExtraError: optuna is not installed.

    Examples:
        >>> import optuna
        >>> def objective(trial):
        ...     lr = trial.suggest_float("lr", 1e-3, 1, log=True)
        ...     module = ts.SupervisedModule(
        ...         nn.Linear(1, 1),
        ...         nn.MSELoss(),
        ...         "sgd",
        ...         data,
        ...         data,
        ...         optimizer_kwargs={"lr": lr},
        ...     )
        ...     trainer = ts.Trainer(
        ...         module,
        ...         args,
        ...         callbacks=[ts.callbacks.OptunaPruning(trial, "val/loss")],
        ...     )
        ...     trainer.train()
        ...     return trainer.history.get_latest_metric("val/loss")
        >>> study = optuna.create_study(direction="minimize")
        >>> study.optimize(objective, n_trials=2)
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
        # A tuple hides the trial from the comparison of plain settings between ranks: only the main process needs one.
        self._trial, self._step, self._pruned = (trial,), step, TrialPruned

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Check the direction of the study before the first step.

        Raises:
            ConfigurationError: the study optimizes in the other direction, or the main process has no trial.
        """
        super().on_train_begin(trainer)
        if not trainer.is_main_process:
            return
        (trial,) = self._trial
        if trial is None:
            raise ConfigurationError("OptunaPruning(None) on the main process, which reports. Pass the trial there.")
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
        """Report the value, and stop if the trial should be pruned."""
        step = trainer.state.epoch if self._step == "epoch" else trainer.state.global_step
        (trial,), prune, failure = self._trial, False, None
        if trainer.is_main_process:
            try:
                trial.report(self.best_value.last, step)
                prune = bool(trial.should_prune())
            except Exception as error:  # for example, the storage of the study is unreachable
                failure = error
        if trainer.world.comm.broadcast_outcome(failure, prune, "reporting to the Optuna trial"):
            reason = f"Optuna has pruned the trial at {self._step} {step}"
            trainer.request_stop(reason, then_raise=self._pruned(reason))
