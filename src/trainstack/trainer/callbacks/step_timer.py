"""`StepTimer`: where the time of a step goes."""

from __future__ import annotations

from typing import Any

import torch

from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.clock import Clock
from trainstack.trainer.callbacks.monitors import record
from trainstack.trainer.events import Callback


class StepTimer(Callback):
    """Records seconds a global step at log points, means since the last one.

    `time/fetch` is spent on getting data, `time/forward`, `time/backward` and `time/update` on the device (on CUDA
    measured there, by events in the stream); `time/validation` is that of a whole validation, on the host.
    """

    expects_all_events = False  # there may be no validation

    def __init__(self) -> None:
        self._steps = 0
        self._since: dict[str, Any] = {}

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Choose the clock."""
        self._device, self._host = Clock(trainer.device), Clock(torch.device("cpu"))

    def on_fetch_data_begin(self) -> None:
        """Data is asked for."""
        self._since["fetch"] = self._host.mark()

    def on_fetch_data_end(self) -> None:
        """It is here."""
        self._host.add("fetch", self._since["fetch"])

    def on_train_batch_begin(self) -> None:
        """The forward pass begins."""
        self._since["step"] = self._device.mark()

    def on_before_backward(self) -> None:
        """The backward pass begins."""
        self._since["step"] = self._device.add("forward", self._since["step"])

    def on_after_backward(self) -> None:
        """The backward pass is over."""
        self._device.add("backward", self._since["step"])

    def on_before_optimizer_step(self) -> None:
        """The update begins."""
        self._since["update"] = self._device.mark()

    def on_after_optimizer_step(self) -> None:
        """The update is over."""
        self._device.add("update", self._since["update"])
        self._steps += 1

    def on_validation_begin(self) -> None:
        """A validation begins."""
        self._since["validation"] = self._host.mark()

    def on_validation_end(self, trainer: AbstractTrainer) -> None:
        """A validation is over; its values have been read, so the device is done."""
        record(trainer, "time/validation", self._host.mark() - self._since["validation"])

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Record."""
        for name, seconds in {**self._host.take(), **self._device.take()}.items():
            record(trainer, f"time/{name}", seconds / max(1, self._steps))
        self._steps = 0
