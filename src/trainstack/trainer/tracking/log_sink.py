"""`LogSink` receives the values that a module logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainstack.trainer.core.state import RunState
from trainstack.trainer.tracking.history import RunHistory


class LogSink:
    """Records the values that a module passes to `log`, at the step under way.

    A module keeps one sink, whichever trainers run it one after the other; the one made ready last is connected.

    Attributes:
        history: records the values; before `connect`, one that is thrown away.
        state: gives the step and the epoch.
    """

    def __init__(self) -> None:
        self.history, self.state = RunHistory(), RunState()

    def connect(self, history: RunHistory, state: RunState) -> LogSink:
        """Record in `history` from now on, at the step and epoch of `state`; returns itself."""
        self.history, self.state = history, state
        return self

    def record(self, name: str, value: Any) -> None:
        """Record `value` under `name`; see `RunHistory.update_metric`."""
        self.history.update_metric(name, value, step=self.state.current_step, epoch=self.state.epoch)

    @contextmanager
    def redirect(self, history: RunHistory, state: RunState) -> Iterator[RunHistory]:
        """A block in which values go to `history`; afterwards they go where they went before."""
        before = self.history, self.state
        self.connect(history, state)
        try:
            yield history
        finally:
            self.connect(*before)

    @contextmanager
    def mute(self, state: RunState) -> Iterator[None]:
        """A block in which values are checked and forgotten."""
        with self.redirect(RunHistory(), state):
            yield
