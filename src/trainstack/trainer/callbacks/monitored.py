"""Callbacks that act on the best value of a monitored metric."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from trainstack.checkpointing.arguments import Monitor
from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.events import Callback

MonitoredValue = str | Callable[[Mapping[str, float]], float | None]


class BestValue:
    """Tracks the best value of a metric.

    Args:
        monitor: see `BestCheckpoint`.
        mode: see `BestCheckpoint`.
        min_delta: smallest improvement that counts.
        min_delta_mode: "abs", or "rel" for a `min_delta` that is a fraction of the best value.

    Attributes:
        best: the best value so far; None before the first value.
        best_step: global step of the best value; -1 before the first value.
        updated_at: last global step with a value; -1 before the first value.
        last: value at this step; None before the first value.

    Raises:
        ConfigurationError: the mode is ambiguous, `min_delta` is negative, or `min_delta_mode` is unknown.
    """

    best_step: int
    updated_at: int

    def __init__(
        self,
        monitor: MonitoredValue | None = None,
        mode: str = "auto",
        min_delta: float = 0.0,
        min_delta_mode: str = "abs",
    ) -> None:
        if not min_delta >= 0:
            raise ConfigurationError(f"min_delta={min_delta!r}: write a number, 0 or more.")
        if min_delta_mode not in ("abs", "rel"):
            raise ConfigurationError(f"min_delta_mode={min_delta_mode!r}: write 'abs' or 'rel'.")
        self._is_relative = min_delta_mode == "rel"
        if callable(monitor) and mode not in ("min", "max"):
            raise ConfigurationError("monitor is a function, which has no default mode. Write mode='min' or 'max'.")
        self._function = monitor if callable(monitor) else None
        self._mode, self._min_delta = mode, min_delta
        self._monitor = None if monitor is None else Monitor.of(str(getattr(monitor, "__name__", monitor)), mode)
        self.reset()

    def reset(self) -> None:
        """Forget the values, because another run begins."""
        self.best: float | None = None
        self.last: float | None = None
        self.best_step = self.updated_at = -1

    def of(self, trainer: AbstractTrainer) -> Monitor:
        """Return the monitored metric and its mode."""
        if self._monitor is not None:
            return self._monitor
        default = trainer.args.placed_checkpointer_args.monitored  # also by `TrainerArguments.monitor`
        return default if self._mode == "auto" else Monitor.of(default.name, self._mode)

    def check(self, trainer: AbstractTrainer, who: str) -> None:
        """Check that a private run has not computed the metric from records without noise; `who` uses the metric.

        A function gets only public values and values with noise, so it is always allowed.

        Raises:
            PrivacyError: the metric is computed from records without noise.
        """
        if self._function is None:
            trainer.history.require_usable(self.of(trainer).name, who)

    def improved(self, trainer: AbstractTrainer, results: Mapping[str, float]) -> bool | None:
        """Return whether `results` hold a new best value; None if they hold none or the step was already judged.

        The value on the main process decides. Inf and nan are never the best value. Collective.

        Raises:
            PrivacyError: a private run has computed the value from records without noise.
        """
        step, monitor = trainer.state.global_step, self.of(trainer)
        if self._function is None:
            self.check(trainer, "a callback")
            value = results.get(monitor.name)
        else:
            guard = trainer.history.guard
            value = self._function(results if guard is None else guard.usable(results))
        value = trainer.world.comm.broadcast_object(value, f"the value of {monitor.name!r}")
        if value is None or step == self.updated_at:
            return None
        self.updated_at, self.last = step, float(value)
        value = self.last
        sign = 1 if monitor.mode == "min" else -1
        delta = self._min_delta * abs(self.best or 0.0) if self._is_relative else self._min_delta
        better = self.best is None or sign * value < sign * self.best - delta
        if not (better and math.isfinite(value)):
            return False
        self.best, self.best_step = value, step
        return True

    def get_state(self) -> dict[str, Any]:
        """Return the best value and the steps."""
        return {"best": self.best, "best_step": self.best_step, "judged_at": self.updated_at}

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.best = None if state["best"] is None else float(state["best"])
        self.best_step, self.updated_at = int(state["best_step"]), int(state["judged_at"])


class MonitorCallback(Callback):
    """Base class of callbacks that act on a monitored value, after validations, or without these, after epochs.

    Attributes:
        best_value: tracks the best value.
    """

    expects_all_events = False  # a value may come with either event, so one that never occurs is not a mistake

    def __init__(self, best_value: BestValue) -> None:
        self.best_value = best_value
        self._validated = False

    def on_new_value(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Called with each new value; `improved` is True for the best value so far."""
        raise NotImplementedError

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Forget the values of another trainer's run."""
        self.best_value.reset()
        self._validated = False

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Check the metric before the first step.

        Raises:
            PrivacyError: a private run computes the metric from records without noise.
        """
        self.best_value.check(trainer, type(self).__name__)

    def on_validation_end(self, trainer: AbstractTrainer, results: Mapping[str, float]) -> None:
        """Use the results, if the validation is a part of training."""
        if trainer.is_training:
            self._validated = True
            self._update(trainer, results)

    def on_epoch_end(self, trainer: AbstractTrainer) -> None:
        """Use the values that were measured without a validation.

        Raises:
            ConfigurationError: neither a validation nor another source has measured the metric.
        """
        self._update(trainer, trainer.history.values_at(trainer.state.global_step))
        if self._validated and self.best_value.updated_at < 0:
            name = self.best_value.of(trainer).name
            raise ConfigurationError(
                f"{self._never_measured_message(trainer)} Write one of these as monitor. self.log({name!r}, value) in "
                "val_step records the mean over the samples of a validation."
            )

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        """Warn if no value was ever measured."""
        if status == "finished" and self.best_value.updated_at < 0 and trainer.is_main_process:
            RunLogger(trainer.args.log_level).warning(self._never_measured_message(trainer))

    def _update(self, trainer: AbstractTrainer, results: Mapping[str, float]) -> None:
        improved = self.best_value.improved(trainer, results)
        if improved is not None:
            self.on_new_value(trainer, improved)

    def _never_measured_message(self, trainer: AbstractTrainer) -> str:
        name = self.best_value.of(trainer).name
        return f"{type(self).__name__} monitors {name!r}, which was never recorded. {trainer.history.hint_for(name)}"

    def get_state(self) -> dict[str, Any]:
        """Return the best value and its step."""
        return self.best_value.get_state()

    def update_state(self, state: Mapping[str, Any]) -> None:
        self.best_value.update_state(state)


class BestCheckpoint(MonitorCallback):
    """Exports the weights at each best value of a metric, and loads the best weights at the end of training.

    The exported weights are those that were evaluated: the averages, if `EMA` evaluates these. `init_weights_from`
    reads the folder like any export. To continue training from the best state, keep checkpoints with `keep_best` and
    write `resume="best"`.

    Args:
        monitor: exact name of a metric, or function of all measured values that returns a number or None. None for the
            run's monitor: `args.monitor`, or that of `args.checkpointer_args` ("val/loss" by default).
        mode: "min", "max", or "auto" to derive it from the metric's name.
        path: folder of the export; None for `best` in `trainer.output_dir`. An existing export there is replaced, even
            one of another run: write another path for each run.
        load_best_at_end: whether to load the best weights after the last checkpoint and before the model is exported. A
            later call of `train()` continues from the weights trained last.
        min_delta: smallest improvement that counts.

    Raises:
        ConfigurationError: the mode is ambiguous.

    Examples:
        >>> best = ts.callbacks.BestCheckpoint("val/loss", path="best")
        >>> ts.Trainer(module, args, callbacks=[best]).train()
        >>> weights = ts.read_model("best")
    """

    writes_files = True

    def __init__(
        self,
        monitor: MonitoredValue | None = None,
        *,
        mode: str = "auto",
        path: str | os.PathLike[str] | None = None,
        load_best_at_end: bool = True,
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(BestValue(monitor, mode, min_delta))
        self._path, self._load_best_at_end = path, load_best_at_end

    def path_of(self, trainer: AbstractTrainer) -> Path:
        """Return the folder with the best weights of `trainer`."""
        return trainer.output_dir / "best" if self._path is None else Path(self._path)

    def on_new_value(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Export the weights, if the value is the best so far."""
        if improved:
            with trainer.evaluation_context():
                trainer.export(self.path_of(trainer), overwrite=True)

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        """Load the best weights, unless the run will be resumed."""
        super().on_train_end(trainer, status)
        if self._load_best_at_end and self.best_value.best is not None and status in ("finished", "stopped"):
            trainer.keep_trained_weights()
            trainer.load_export(self.path_of(trainer))


class EarlyStopping(MonitorCallback):
    """Stops training if a monitored value has not improved for `patience` consecutive validations.

    It calls `trainer.request_stop`: the last checkpoint is saved and the model exported. Checkpoints hold the count, so
    an interruption changes nothing. A run that was stopped stops again when it is resumed.

    Args:
        monitor: exact name of a metric, or function of all measured values that returns a number or None. None for the
            run's monitor: `args.monitor`, or that of `args.checkpointer_args` ("val/loss" by default).
        mode: "min", "max", or "auto" to derive it from the metric's name.
        patience: validations without an improvement, 1 or more; without validation data, epochs.
        min_delta: smallest improvement that counts.
        min_delta_mode: `"abs"`, or `"rel"` for a `min_delta` that is a fraction of the best value.
        stopping_threshold: stop as soon as the value is as good as this or better.
        divergence_threshold: stop as soon as the value is worse than this.
        check_finite: whether to stop as soon as the value is inf or nan; with False it counts as no better value.

    Attributes:
        patience: validations without an improvement.
        waited: validations since the best value.

    Raises:
        ConfigurationError: an argument is invalid.

    Examples:
        >>> stopping = ts.callbacks.EarlyStopping(
        ...     "val/loss", patience=2, min_delta=1e-3
        ... )
        >>> ts.Trainer(module, args, callbacks=[stopping]).train()
    """

    patience: int
    waited: int

    def __init__(
        self,
        monitor: MonitoredValue | None = None,
        *,
        mode: str = "auto",
        patience: int = 3,
        min_delta: float = 0.0,
        min_delta_mode: Literal["abs", "rel"] = "abs",
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = True,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            raise ConfigurationError(
                f"EarlyStopping has no argument {', '.join(map(repr, unknown))}. The arguments are monitor, mode, "
                "patience, min_delta, min_delta_mode, stopping_threshold, divergence_threshold and check_finite. The "
                "log always has the reason of a stop."
            )
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigurationError(f"patience={patience!r}: write a whole number, 1 or more.")
        super().__init__(BestValue(monitor, mode, min_delta, min_delta_mode))
        self.patience, self.waited, self._check_finite = patience, 0, check_finite
        self._good_enough, self._too_bad = stopping_threshold, divergence_threshold
        self._diverged_to: str | None = None

    def on_new_value(self, trainer: AbstractTrainer, improved: bool) -> None:
        """Update the count, and stop if it reaches `patience` or the value passes a threshold or is not finite."""
        self.waited = 0 if improved else self.waited + 1
        value = self.best_value.last
        if self._check_finite and value is not None and not math.isfinite(value):
            self._diverged_to = f"{value} at step {self.best_value.updated_at}"
        sign = 1 if self.best_value.of(trainer).mode == "min" else -1
        for threshold, what, side in ((self._good_enough, "good enough", 1), (self._too_bad, "too bad", -1)):
            if value is None or threshold is None:
                continue
            beyond = side * sign * (threshold - value)
            if beyond > 0 or (beyond == 0 and side > 0):
                at = f"{value:.6g} at step {self.best_value.updated_at}"
                self._diverged_to = f"{at}, which is {what} (threshold {threshold:g})"
        self._stop_if_due(trainer)

    def on_ready(self, trainer: AbstractTrainer) -> None:
        super().on_ready(trainer)
        self.waited, self._diverged_to = 0, None

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Stop again, if a resumed run was already stopped."""
        super().on_train_begin(trainer)
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: AbstractTrainer) -> None:
        if self._diverged_to is not None:
            trainer.request_stop(f"{self.best_value.of(trainer).name} became {self._diverged_to}")
        elif self.waited >= self.patience:
            best = "none" if self.best_value.best is None else f"{self.best_value.best:.6g}"
            trainer.request_stop(
                f"{self.best_value.of(trainer).name} has not improved for {self.waited} validations "
                f"(best: {best}, at step {self.best_value.best_step})"
            )

    def get_state(self) -> dict[str, Any]:
        """Return the best value, the count and the reason of a stop."""
        return {**super().get_state(), "waited": self.waited, "diverged_to": self._diverged_to}

    def update_state(self, state: Mapping[str, Any]) -> None:
        super().update_state(state)
        self.waited, self._diverged_to = int(state["waited"]), state.get("diverged_to")
