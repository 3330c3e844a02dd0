"""Callbacks that measure step times and throughput."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitors import record
from trainstack.trainer.events import Callback
from trainstack.trainer.tracking.provenance import Provenance


class Clock:
    """Sums durations by name; on CUDA measured by events in the stream, elsewhere by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """Return a mark that is reached when all work submitted so far is done."""
        if not self._on_device:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, name: str, since: Any) -> Any:
        """Add the time from `since` to now to `name`; return the mark of now."""
        now = self.mark()
        if self._on_device:
            self._pending.append((name, since, now))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - since
        return now

    def pop(self) -> dict[str, float]:
        """Return the seconds by name since the last call. Waits for the device."""
        for name, since, until in self._pending:
            until.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + since.elapsed_time(until) / 1000  # milliseconds
        taken, self._seconds, self._pending = self._seconds, {}, []
        return taken


class StepTimer(Callback):
    """Records mean seconds a global step at log points.

    `time/fetch` is the time to get data, on the host. `time/forward`, `time/backward` and `time/update` are measured by
    events in the stream on CUDA, elsewhere on the host. `time/validation` is the time of a whole validation, on the
    host.

    Examples:
        >>> trainer = ts.Trainer(
        ...     module, replace(args, log_every=4), callbacks=[ts.callbacks.StepTimer()]
        ... )
        >>> trainer.train()
        >>> seconds = trainer.history.get_latest_metric("time/forward")
    """

    expects_all_events = False  # a run may have no validation

    def __init__(self) -> None:
        self._steps = 0
        self._since: dict[str, Any] = {}

    def on_ready(self, trainer: AbstractTrainer) -> None:
        self._device, self._host = Clock(trainer.device), Clock(torch.device("cpu"))

    def on_fetch_data_begin(self) -> None:
        self._since["fetch"] = self._host.mark()

    def on_fetch_data_end(self) -> None:
        self._host.add("fetch", self._since["fetch"])

    def on_train_batch_begin(self) -> None:
        self._since["step"] = self._device.mark()

    def on_before_backward(self) -> None:
        self._since["step"] = self._device.add("forward", self._since["step"])

    def on_after_backward(self) -> None:
        self._device.add("backward", self._since["step"])

    def on_before_optimizer_step(self) -> None:
        self._since["update"] = self._device.mark()

    def on_after_optimizer_step(self) -> None:
        self._device.add("update", self._since["update"])
        self._steps += 1

    def on_validation_begin(self) -> None:
        self._since["validation"] = self._host.mark()

    def on_validation_end(self, trainer: AbstractTrainer) -> None:
        """Record the time of a validation. Its values have been read, so the device has finished."""
        record(trainer, "time/validation", self._host.mark() - self._since["validation"], Provenance.MACHINE)

    def on_log(self, trainer: AbstractTrainer) -> None:
        for name, seconds in {**self._host.pop(), **self._device.pop()}.items():
            record(trainer, f"time/{name}", seconds / max(1, self._steps), Provenance.MACHINE)
        self._steps = 0


class ThroughputMonitor(Callback):
    """Records `throughput/samples_per_s` at log points: samples of all processes since the last log point of the epoch.

    The time of validations and checkpoints between epochs does not count.

    Args:
        tokens: function that returns the number of tokens in a micro-batch without reading the device, such as
            `lambda batch: batch["input_ids"].numel()`; records `throughput/tokens_per_s`.
        flops_per_sample: floating-point operations of forward and backward pass for one sample, for a dense transformer
            about 6 x parameters x tokens a sample. With `peak_flops` it records `throughput/mfu`, the model FLOPs
            utilization (Chowdhery et al. 2022, PaLM, appendix B).
        peak_flops: peak floating-point operations a second of one device in the dtype of the run, from its data sheet.

    Raises:
        ConfigurationError: one of the FLOPs is missing or not above 0.

    Examples:
        >>> monitor = ts.callbacks.ThroughputMonitor(
        ...     tokens=lambda batch: batch[0].numel()
        ... )
        >>> ts.Trainer(module, args, callbacks=[monitor]).train()
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if (flops_per_sample is None) != (peak_flops is None):
            raise ConfigurationError("write flops_per_sample and peak_flops, or neither.")
        for name, number in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            if number is not None and not number > 0:
                raise ConfigurationError(f"{name}={number!r}: write a number above 0.")
        self._flops, self._peak, self._count_tokens = flops_per_sample, peak_flops, tokens
        self._since, self._samples, self._tokens = 0.0, 0, 0
        if tokens is not None:
            self.on_train_batch_begin = self._add_tokens

    def on_train_epoch_begin(self, trainer: AbstractTrainer) -> None:
        self._since, self._samples, self._tokens = perf_counter(), trainer.state.samples_in_epoch, 0

    def _add_tokens(self, trainer: AbstractTrainer, batch: Any) -> None:
        if self._count_tokens is not None:
            self._tokens += self._count_tokens(batch)

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Record the throughput. Waits for the device, as reading other values at a log point does."""
        if trainer.device.type != "cpu":
            torch.accelerator.synchronize(trainer.device)
        seconds = max(perf_counter() - self._since, 1e-9)  # never 0 s, which a clock of low resolution may give
        rate = (trainer.state.samples_in_epoch - self._samples) / seconds
        record(trainer, "throughput/samples_per_s", rate, Provenance.MACHINE)
        if self._count_tokens is not None:
            tokens = trainer.world.comm.sum([float(self._tokens)], "ThroughputMonitor")[0]
            record(trainer, "throughput/tokens_per_s", tokens / seconds, Provenance.PRIVATE)
        if self._flops is not None and self._peak is not None:
            record(
                trainer, "throughput/mfu", rate * self._flops / (self._peak * trainer.world.size), Provenance.MACHINE
            )
        self.on_train_epoch_begin(trainer)
