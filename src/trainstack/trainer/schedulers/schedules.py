"""`Schedules`: the schedulers of a run, each in its rhythm; the loop pays for no rhythm that is not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainstack.backends import Communicator
from trainstack.errors import ConfigurationError
from trainstack.trainer.history import RunHistory
from trainstack.trainer.schedulers.config import SchedulerConfig
from trainstack.trainer.schedulers.timm import TimmSchedulerAdapter


class Schedules:
    """Steps schedulers when they are due.

    Args:
        configs: made schedulers, bare or with a rhythm.

    Attributes:
        schedulers: the schedulers themselves, whose states a checkpoint keeps.
        on_step: to be called after each global step that moved the weights.
    """

    def __init__(self, configs: Sequence[Any] = ()) -> None:
        self._scheduled = [
            _Scheduled(config if isinstance(config, SchedulerConfig) else SchedulerConfig(config)) for config in configs
        ]
        self.schedulers = tuple(scheduled.scheduler for scheduled in self._scheduled)
        self.on_step: tuple[Callable[[], Any], ...] = tuple(
            call for scheduled in self._scheduled if (call := scheduled.step_call) is not None
        )

    def end_epoch(self, history: RunHistory, epoch: int, comm: Communicator) -> None:
        """Step what counts epochs; `history` has this epoch's values. All processes call it together.

        Raises:
            ConfigurationError: a monitored metric was never recorded.
        """
        for scheduled in self._scheduled:
            scheduled.end_epoch(history, epoch, comm)

    def get_counts(self) -> list[int]:
        """How many updates or epochs each scheduler has waited since it stepped."""
        return [scheduled.waited for scheduled in self._scheduled]

    def update_counts(self, counts: Sequence[int]) -> None:
        """Take back what `get_counts` returned."""
        for scheduled, count in zip(self._scheduled, counts, strict=True):
            scheduled.waited = count


class _Scheduled:
    """One scheduler in its rhythm."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.scheduler, self.waited = config, config.scheduler, 0

    @property
    def step_call(self) -> Callable[[], Any] | None:
        """What the loop calls after each update; None if updates are not counted."""
        if isinstance(self.scheduler, TimmSchedulerAdapter):
            return self.scheduler.step_update
        if self.config.per_epoch:
            return None
        return self._count if self.config.frequency > 1 else self.scheduler.step

    def end_epoch(self, history: RunHistory, epoch: int, comm: Communicator) -> None:
        if isinstance(self.scheduler, TimmSchedulerAdapter):
            self.scheduler.end_epoch()
        elif self.config.monitor is not None:
            value = _agreed(history, self.config.monitor, epoch, comm)
            if value is not None:
                self._count(value)
        elif self.config.per_epoch:
            self._count()

    def _count(self, *value: float) -> None:
        self.waited += 1
        if self.waited >= self.config.frequency:
            self.waited = 0
            self.scheduler.step(*value)


def _agreed(history: RunHistory, name: str, epoch: int, comm: Communicator) -> float | None:
    """The newest value of `name` if it is of `epoch`, as the main process has it; None if it is older.

    Raises:
        ConfigurationError: it was never recorded.
    """
    value, failure = None, None
    if comm.rank == 0:
        try:
            record = history.latest_record(name)
            value = record.value if record.epoch == epoch else None
        except ConfigurationError as error:
            failure = ConfigurationError(f"a scheduler monitors {name!r}: {error}")
    comm.agree(failure, "reading a monitored metric")
    shared: float | None = comm.share(value)
    return shared
