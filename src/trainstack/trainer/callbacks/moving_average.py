"""`MovingAverage`: a smoother curve of what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitors import record
from trainstack.trainer.events import Callback


class MovingAverage(Callback):
    """Records exponential moving averages of metrics, as `<name>_ema`, over the whole run.

    Each value moves the average by `1 - decay` of the way. What that makes of the first values is corrected for: the
    average is that of the values seen, the newest with weight 1, the one before with `decay`, and so on. Averages are
    recorded at log points, and after epochs for what is measured there.

    Args:
        *names: of metrics; "train/loss" if none is given. One that never comes is never averaged.
        decay: from 0 on and below 1.

    Raises:
        ConfigurationError: an argument cannot be.
    """

    expects_all_events = False

    def __init__(self, *names: str, decay: float = 0.9) -> None:
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigurationError(f"MovingAverage{names!r}: write names of metrics, such as 'train/loss'.")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigurationError(f"decay={decay!r}: write a number from 0 on and below 1, such as 0.9.")
        self._decay = float(decay)
        self._sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in names or ("train/loss",)}
        self._seen = dict.fromkeys(self._sums, 0)

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Take in what is new."""
        known = trainer.history.get_metric_names()
        for name, sums in self._sums.items():
            new = trainer.history.records(name, self._seen[name]) if name in known else []
            for value in new:
                sums[0] = self._decay * sums[0] + value.value
                sums[1] = self._decay * sums[1] + 1.0
            if new:
                self._seen[name] += len(new)
                record(trainer, f"{name}_ema", sums[0] / sums[1])

    def on_epoch_end(self, trainer: AbstractTrainer) -> None:
        """Take in what validations and epochs have measured."""
        self.on_log(trainer)

    def get_state(self) -> dict[str, Any]:
        """The sums, and how many values are in them."""
        return {"sums": {name: list(sums) for name, sums in self._sums.items()}, "seen": dict(self._seen)}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned, as far as it is about the same metrics."""
        for name in self._sums:
            if name in state["sums"]:
                self._sums[name], self._seen[name] = list(state["sums"][name]), int(state["seen"][name])
