"""`ThroughputMonitor`: samples and tokens a second, and how much of the device's arithmetic that is."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.clock import wait_for
from trainstack.trainer.callbacks.monitors import record
from trainstack.trainer.events import Callback


class ThroughputMonitor(Callback):
    """Records `throughput/samples_per_s` at log points, over all processes, since the last one of the same epoch.

    Validation and saving between epochs are not counted.

    Args:
        tokens: how many tokens a micro-batch has, a number of the host, such as
            `lambda batch: batch["input_ids"].numel()`; records `throughput/tokens_per_s`.
        flops_per_sample: floating-point operations of forward and backward for a sample (of a dense transformer about
            6 x parameters x tokens a sample); with `peak_flops` records `throughput/mfu`, the model FLOPs utilisation
            (Chowdhery et al. 2022, PaLM, appendix B).
        peak_flops: of one device a second, in the dtype that is used, as its data sheet says.

    Raises:
        ConfigurationError: one of the FLOPs is missing or cannot be.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if (flops_per_sample is None) != (peak_flops is None):
            raise ConfigurationError("give flops_per_sample and peak_flops, or neither.")
        for name, number in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if number is not None and not number > 0:
                raise ConfigurationError(f"{name}={number!r}: write a number above 0.")
        self._flops, self._peak, self._count_tokens = flops_per_sample, peak_flops, tokens
        self._since, self._samples, self._tokens = 0.0, 0, 0
        if tokens is not None:
            self.on_train_batch_begin = self._add_tokens

    def on_train_epoch_begin(self, trainer: AbstractTrainer) -> None:
        """Start the clock."""
        self._restart(trainer)

    def _add_tokens(self, trainer: AbstractTrainer, batch: Any) -> None:
        if self._count_tokens is not None:
            self._tokens += self._count_tokens(batch)

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Record; the device is waited for, as for all that is read at a log point."""
        wait_for(trainer.device)
        seconds = max(perf_counter() - self._since, 1e-9)
        rate = (trainer.state.samples_in_epoch - self._samples) / seconds
        record(trainer, "throughput/samples_per_s", rate)
        if self._count_tokens is not None:
            record(trainer, "throughput/tokens_per_s", sum(trainer.world.comm.gather(self._tokens)) / seconds)
        if self._flops is not None and self._peak is not None:
            record(trainer, "throughput/mfu", rate * self._flops / (self._peak * trainer.world.size))
        self._restart(trainer)

    def _restart(self, trainer: AbstractTrainer) -> None:
        self._since, self._samples, self._tokens = perf_counter(), trainer.state.samples_in_epoch, 0
