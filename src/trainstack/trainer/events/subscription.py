"""One subscriber of one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainstack.errors import StopTraining, annotate
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events.arity import fitted
from trainstack.trainer.events.event import Event
from trainstack.trainer.events.filters import Filter


class Subscription:
    """A function that is called when an event comes.

    Args:
        event: what it subscribes to.
        function: takes the trainer, and what the event gives.
        label: how to call it in messages.
        counts: lets it run at some occurrences only.
        priority: higher ones come first.
        key: under which a checkpoint keeps the counters.

    Attributes:
        came: whether the event has come since it subscribed.
        is_expected: whether it is worth a word if the event never comes.

    Raises:
        ConfigurationError: the function needs more than the event gives.
    """

    def __init__(
        self,
        event: Event,
        function: Callable[..., Any],
        label: str,
        counts: Filter | None = None,
        priority: int = 0,
        key: str | None = None,
    ) -> None:
        self.event, self.label, self.filter, self.priority, self.key = event, label, counts, priority, key
        self.came, self.is_expected = False, True
        self._function = fitted(function, ("trainer", *event.gives), f"Event.{event.name}")

    def call(self, trainer: AbstractTrainer, *given: Any) -> None:
        """The event has come."""
        self.came = True
        try:
            if self.filter is None or self.filter.passes(trainer):
                self._function(trainer, *given)
        except StopTraining as stop:
            trainer.request_stop(stop.reason or f"{self.label} raised StopTraining")
        except Exception as error:
            annotate(error, f"raised in {self.label}, at Event.{self.event.name}")
            raise

    @property
    def why_never(self) -> str | None:
        """Why it has never run, if it has not."""
        if self.filter is not None:
            return self.filter.why_never() if not self.filter.num_executed else None
        return None if self.came else "the event never came"
