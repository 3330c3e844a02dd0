"""`SchedulerConfig`: a scheduler and when it steps."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from trainstack.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """A scheduler with a rhythm of its own; one that is returned bare steps after every update.

    Args:
        scheduler: the scheduler, or a function of the optimizer that makes it.
        interval: `"step"` counts global steps that moved the weights, `"epoch"` epochs, whose end comes after
            validation. None is `"epoch"` where something is monitored, else `"step"`.
        frequency: step at every so many of them.
        monitor: the metric in the history whose value `scheduler.step(value)` gets, such as `"val/loss"`. Epochs in
            which it was not recorded are not counted.

    Raises:
        ConfigurationError: a value is wrong, or two do not go together.
    """

    scheduler: Any
    _: KW_ONLY
    interval: Literal["step", "epoch"] | None = None
    frequency: int = 1
    monitor: str | None = None

    def __post_init__(self) -> None:
        if self.interval not in ("step", "epoch", None):
            raise ConfigurationError(f"interval={self.interval!r}: write 'step' or 'epoch'.")
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int) or self.frequency < 1:
            raise ConfigurationError(f"frequency={self.frequency!r}: write a whole number, 1 or more.")
        if self.monitor is not None and (not isinstance(self.monitor, str) or not self.monitor):
            raise ConfigurationError(f"monitor={self.monitor!r}: write the name of a metric, such as 'val/loss'.")
        if self.monitor is not None and self.interval == "step":
            raise ConfigurationError(
                f"interval='step' with monitor={self.monitor!r}: a monitored value is asked for at an epoch's end. "
                "Leave interval out."
            )

    @property
    def per_epoch(self) -> bool:
        """Whether epochs are counted, not updates."""
        return self.interval == "epoch" or self.monitor is not None
