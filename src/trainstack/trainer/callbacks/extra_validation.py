"""`ExtraValidation` validates on additional data at an interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitored import BestValue, MonitoredValue
from trainstack.trainer.evaluation.loader_pass import named_loaders
from trainstack.trainer.events import Callback


class ExtraValidation(Callback):
    """Validates on additional loaders at the end of each n-th epoch, or only after improvements of a metric.

    The validation equals that of `get_val_dataloaders`: it calls `val_step` and `on_end_val_epoch(key=name)`, and
    records the loss as `val/<name>/loss`.

    Args:
        dataloaders: loaders by name.
        every_n_epochs: interval in epochs.
        when_improved: exact name of a metric, or function of all measured values. If given, the loaders are used only
            if the best value of all epochs has changed since they were last used.
        mode: mode of `when_improved`: "min", "max", or "auto" to derive it from the metric's name.

    Raises:
        ConfigurationError: an argument is invalid.

    Examples:
        >>> extra = ts.callbacks.ExtraValidation(
        ...     {"small": DataLoader(data, batch_size=16)}, every_n_epochs=2
        ... )
        >>> trainer = ts.Trainer(module, args, callbacks=[extra])
        >>> trainer.train()
        >>> loss = trainer.history.get_latest_metric("val/small/loss")
    """

    def __init__(
        self,
        dataloaders: Mapping[str, Any],
        *,
        every_n_epochs: int = 1,
        when_improved: MonitoredValue | None = None,
        mode: str = "auto",
    ) -> None:
        if not isinstance(dataloaders, Mapping) or not dataloaders:
            raise ConfigurationError("ExtraValidation: write a dict of loaders by name, {'shifted': loader}.")
        if not isinstance(every_n_epochs, int) or isinstance(every_n_epochs, bool) or every_n_epochs < 1:
            raise ConfigurationError(f"every_n_epochs={every_n_epochs!r}: write a whole number, 1 or more.")
        self._loaders = named_loaders(dict(dataloaders), "the maker of ExtraValidation")
        self._every = every_n_epochs
        self._best_value = None if when_improved is None else BestValue(when_improved, mode)
        self._has_improved = False

    def on_ready(self) -> None:
        """Forget the values of another trainer's run."""
        self._has_improved = False
        if self._best_value is not None:
            self._best_value.reset()

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Check the metric before the first step.

        Raises:
            PrivacyError: a private run computes the metric from records without noise.
        """
        if self._best_value is not None:
            self._best_value.check(trainer, "ExtraValidation")

    def on_epoch_end(self, trainer: AbstractTrainer, epoch: int) -> None:
        """Validate, if it is due."""
        if self._best_value is not None:
            measured = trainer.history.values_at(trainer.state.global_step)
            self._has_improved |= bool(self._best_value.improved(trainer, measured))
        if (epoch + 1) % self._every == 0 and (self._best_value is None or self._has_improved):
            trainer.validate(self._loaders, log=True, keep_outputs=False)
            self._has_improved = False

    def get_state(self) -> dict[str, Any]:
        """Return the best value so far, and whether it is newer than the last validation."""
        return {} if self._best_value is None else {**self._best_value.get_state(), "has_improved": self._has_improved}

    def update_state(self, state: Mapping[str, Any]) -> None:
        if self._best_value is not None:
            self._best_value.update_state(state)
            self._has_improved = bool(state.get("has_improved"))
