"""Time as the device spends it, measured without making the host wait."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Adds up durations by name: on CUDA between two marks in the stream, elsewhere by the host's clock.

    Args:
        device: that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """The moment at which all that was asked for so far is done."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, name: str, since: Any) -> Any:
        """The time from `since` to now belongs to `name`; returns the mark of now."""
        now = self.mark()
        if self._on_device:
            self._pending.append((name, since, now))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - since
        return now

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the device."""
        for name, since, until in self._pending:
            until.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + since.elapsed_time(until) / 1000
        taken, self._seconds, self._pending = self._seconds, {}, []
        return taken


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
