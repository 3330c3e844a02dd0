"""`Schedules` steps each scheduler at its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from trainstack.backends import Communicator
from trainstack.errors import ConfigurationError, ModuleContractError, PrivacyError
from trainstack.trainer.tracking.history import RunHistory


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """A scheduler with its interval; a scheduler without a config steps after every update.

    Args:
        scheduler: the scheduler, or a function of the optimizer that makes it.
        interval: `"step"` counts global steps that changed the weights, `"epoch"` counts epochs, after validation. None
            is `"epoch"` with `monitor`, otherwise `"step"`.
        frequency: number of intervals between two steps of the scheduler.
        monitor: name of a metric in the history, such as `"val/loss"`, whose value is the argument of
            `scheduler.step(value)`. Epochs without a value do not count.

    Raises:
        ConfigurationError: a value is invalid, or two contradict each other.

    Examples:
        >>> plateau = ts.SchedulerConfig(
        ...     lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        ...         optimizer, patience=2
        ...     ),
        ...     monitor="val/loss",
        ... )
        >>> module = ts.SupervisedModule(
        ...     nn.Linear(1, 1), nn.MSELoss(), "sgd", data, data, scheduler=plateau
        ... )
        >>> ts.Trainer(module, args).train()
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
                f"interval='step' with monitor={self.monitor!r}: a monitored value is read at the end of an epoch. "
                "Remove interval."
            )

    @property
    def per_epoch(self) -> bool:
        """Whether epochs are counted instead of updates."""
        return self.interval == "epoch" or self.monitor is not None


def is_timm_scheduler(scheduler: Any) -> bool:
    """Whether `scheduler` has timm's methods: `step_update(num_updates)` and `step(epoch)`."""
    return callable(getattr(scheduler, "step_update", None)) and callable(getattr(scheduler, "step", None))


class TimmSchedulerAdapter:
    """Counts updates and epochs for a timm scheduler, which has no counters, so that a resumed run continues them.

    Args:
        scheduler: object with timm's methods; it decides whether updates or epochs count.
    """

    updates: int
    epochs: int

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.updates = self.epochs = 0

    @property
    def optimizer(self) -> Any:
        """The optimizer of the scheduler."""
        return self.scheduler.optimizer

    def step_update(self) -> None:
        """Count an update that changed the weights, and step the scheduler."""
        self.updates += 1
        self.scheduler.step_update(num_updates=self.updates)

    def end_epoch(self) -> None:
        """Count a finished epoch, and step the scheduler."""
        self.epochs += 1
        self.scheduler.step(self.epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return both counters and the scheduler's own state."""
        return {"updates": self.updates, "epochs": self.epochs, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.updates, self.epochs = state["updates"], state["epochs"]
        self.scheduler.load_state_dict(state["scheduler"])


class Schedules:
    """Steps schedulers when they are due.

    Args:
        configs: schedulers, with or without a `SchedulerConfig`.

    Attributes:
        schedulers: the schedulers without configs; checkpoints hold their states.
        around_step: returns the context manager in which a scheduler steps; the loop sets it.
    """

    schedulers: tuple[Any, ...]

    def __init__(self, configs: Sequence[Any] = ()) -> None:
        self._scheduled = [
            _Scheduled(config if isinstance(config, SchedulerConfig) else SchedulerConfig(config)) for config in configs
        ]
        self.schedulers = tuple(scheduled.scheduler for scheduled in self._scheduled)
        self._on_step = [(one, call) for one in self._scheduled if (call := one.step_call) is not None]
        self._updates = self._epochs = 0
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def counts_updates(self) -> bool:
        """Whether a scheduler steps after updates, so that its length is a number of updates."""
        return bool(self._on_step)

    def describe(self, optimizer: Any) -> list[str]:
        """The schedulers of `optimizer`, each with its interval, such as "StepLR after each epoch"."""
        return [one.describe() for one in self._scheduled if getattr(one.scheduler, "optimizer", None) is optimizer]

    def step(self) -> None:
        """Step the schedulers that count updates. Called after each global step that changed the weights.

        Raises:
            ModuleContractError: a scheduler cannot step, such as `OneCycleLR` past its end.
        """
        if not self._on_step:
            return
        self._updates += 1
        for scheduled, call in self._on_step:
            self._step(scheduled, call)

    def end_epoch(self, history: RunHistory, epoch: int, comm: Communicator, *, may_lack: bool = False) -> None:
        """Step the schedulers that count epochs; `history` has this epoch's values. Collective.

        Raises:
            ConfigurationError: a monitored metric was never recorded, and `may_lack` is False.
            ModuleContractError: a scheduler cannot step.
        """
        for scheduled in self._scheduled:
            call, monitor = scheduled.epoch_call, scheduled.config.monitor
            if call is None or scheduled.ended_epoch == epoch:  # stepped before another scheduler raised an error
                continue
            if monitor is None:
                self._step(scheduled, call)
            elif (value := _broadcast_value(history, monitor, epoch, comm, may_lack)) is not None:
                self._step(scheduled, call, value)
            scheduled.ended_epoch = epoch
        self._epochs += 1

    def check_monitors(self, history: RunHistory) -> None:
        """Check that monitored metrics may be used in a private run.

        Raises:
            PrivacyError: a metric is computed from records without noise.
        """
        for scheduled in self._scheduled:
            if scheduled.config.monitor is not None:
                history.require_usable(scheduled.config.monitor, type(scheduled.scheduler).__name__)

    def counts_after(self, updates: int | None, epochs: int | None) -> list[int | None]:
        """Return the count of each torch scheduler after `updates` or `epochs` more; None if unknown."""
        return [scheduled.count_after(updates, epochs) for scheduled in self._scheduled]

    def steps_by_hand(self) -> int:
        """Return how many times other code has stepped torch's schedulers."""
        return sum(max(0, one.steps_by_hand(self._updates, self._epochs)) for one in self._scheduled)

    def get_counts(self) -> list[int]:
        """Return for each scheduler the number of updates or epochs since it stepped."""
        return [scheduled.waited for scheduled in self._scheduled]

    def update_counts(self, counts: Sequence[int]) -> None:
        """Restore the counts from `get_counts`."""
        self._updates = self._epochs = 0
        for scheduled, count in zip(self._scheduled, counts, strict=True):
            scheduled.waited = count
            scheduled.begin_counting()

    def _step(self, scheduled: _Scheduled, call: Callable[..., Any], *value: float) -> None:
        try:
            with self.around_step():
                call(*value)
        except ValueError as error:  # from OneCycleLR past its end
            owner = getattr(call, "__self__", call)
            kind = type(getattr(owner, "scheduler", owner)).__name__
            by_hand = scheduled.steps_by_hand(self._updates, self._epochs)
            cure = ": make it for self.plan.total_steps steps."
            if by_hand > 0:
                cure = f", and other code has called its step() {by_hand} times. Remove these calls."
            raise ModuleContractError(
                f"{kind}.step() failed: {error}. It steps once after each global step that changed the weights, unless "
                f"a SchedulerConfig says otherwise{cure}"
            ) from error


def torch_count(scheduler: Any) -> int | None:
    """Return the number of steps that a torch scheduler has counted; None for other schedulers."""
    while isinstance(scheduler, ChainedScheduler):  # only its parts have counters
        scheduler = scheduler._schedulers[0]  # torch 2.13.0: no public access to the parts
    return scheduler.last_epoch if isinstance(scheduler, LRScheduler) else None


class _Scheduled:
    """One scheduler with its interval and its counters."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.scheduler, self.waited = config, config.scheduler, 0
        self.ended_epoch: int | None = None
        self.begin_counting()

    def describe(self) -> str:
        """Its class and its interval."""
        unit, every = "epoch" if self.config.per_epoch else "step", self.config.frequency
        return f"{type(self.scheduler).__name__} after each {unit if every == 1 else f'{every} {unit}s'}"

    def begin_counting(self) -> None:
        """Start to count the calls of `step`."""
        self._counted_from = torch_count(self.scheduler), self.waited

    def steps_by_hand(self, updates: int, epochs: int) -> int:
        """Return the steps by other code while `updates` and `epochs` were counted; 0 if unknown."""
        (first, waited), count = self._counted_from, torch_count(self.scheduler)
        if first is None or count is None or self.config.monitor is not None:
            return 0
        return count - first - (waited + (epochs if self.config.per_epoch else updates)) // self.config.frequency

    @property
    def step_call(self) -> Callable[[], Any] | None:
        """The function that the loop calls after each update; None if updates are not counted."""
        if isinstance(self.scheduler, TimmSchedulerAdapter):
            return self.scheduler.step_update
        if self.config.per_epoch:
            return None
        return self._count if self.config.frequency > 1 else self.scheduler.step

    @property
    def epoch_call(self) -> Callable[..., Any] | None:
        """The function for the end of an epoch, with the monitored value as argument if any; None if unused."""
        if isinstance(self.scheduler, TimmSchedulerAdapter):
            return self.scheduler.end_epoch
        return self._count if self.config.per_epoch else None

    def count_after(self, updates: int | None, epochs: int | None) -> int | None:
        """Return the count of a torch scheduler after `updates` or `epochs` more; None if unknown."""
        more = epochs if self.config.per_epoch else updates
        count = torch_count(self.scheduler)
        if more is None or count is None:
            return None
        return count + (self.waited + max(0, more)) // self.config.frequency

    def _count(self, *value: float) -> None:
        self.waited += 1
        if self.waited >= self.config.frequency:
            self.waited = 0
            self.scheduler.step(*value)


def _broadcast_value(history: RunHistory, name: str, epoch: int, comm: Communicator, may_lack: bool) -> float | None:
    """Return the newest value of `name` on the main process if it is of `epoch`; None if it is older. Collective.

    Raises:
        ConfigurationError: it was never recorded.
        PrivacyError: a private run has computed it from records without noise.
    """
    value, failure = None, None
    if comm.rank == 0:
        try:
            history.require_usable(name, "a scheduler")
            record = history.latest_record(name)
            value = record.value if record.epoch == epoch else None
        except ConfigurationError as error:
            failure = None if may_lack else ConfigurationError(f"a scheduler monitors {name!r}: {error}")
            failure = error if isinstance(error, PrivacyError) else failure
    shared: float | None = comm.broadcast_outcome(failure, value, "reading a monitored metric")
    return shared
