"""timm's schedulers, which are told the number of updates and epochs in two calls of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_timm_scheduler(scheduler: Any) -> bool:
    """Whether `scheduler` has timm's methods: `step_update(num_updates)` and `step(epoch)`."""
    return callable(getattr(scheduler, "step_update", None)) and callable(getattr(scheduler, "step", None))


class TimmSchedulerAdapter:
    """Counts for a timm scheduler, which keeps no count itself, so that it goes on after a resume.

    Args:
        scheduler: an object with timm's methods; decides itself whether updates or epochs matter.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.updates = self.epochs = 0

    @property
    def optimizer(self) -> Any:
        """The optimizer that is scheduled."""
        return self.scheduler.optimizer

    def step_update(self) -> None:
        """An update moved the weights."""
        self.updates += 1
        self.scheduler.step_update(num_updates=self.updates)

    def end_epoch(self) -> None:
        """An epoch is over."""
        self.epochs += 1
        self.scheduler.step(self.epochs)

    def state_dict(self) -> dict[str, Any]:
        """Both counts and the scheduler's own state."""
        return {"updates": self.updates, "epochs": self.epochs, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.updates, self.epochs = state["updates"], state["epochs"]
        self.scheduler.load_state_dict(state["scheduler"])
