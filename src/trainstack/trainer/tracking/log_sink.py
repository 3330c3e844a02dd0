"""`LogSink` receives the values that a module logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.ranks import global_rank
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state import RunState
from trainstack.trainer.tracking.history import RunHistory, check_name
from trainstack.trainer.tracking.provenance import Provenance

_TAKEN = "{name!r} is recorded by the trainer. Choose another name."
_OF_TRAINING = re.compile(r"train/(loss|loss_epoch|grad_norm|skipped_steps|replay_mismatches)|lr(/\d+)?")


class LogSink:
    """Records the values that a module passes to `log`, at the current step.

    A module keeps one sink, whichever trainers run it one after the other; the one made ready last is connected. A name
    belongs to the module or to the trainer: two values of one name at one step would replace each other.

    Attributes:
        history: records the values; before `connect`, one that is thrown away.
        state: gives the step and the epoch.
        provenance: of the values that are recorded now.
        write: called with images, texts and tables: the kind, the name, a function that makes the content, the step.
            None while no writer is open.
    """

    history: RunHistory
    state: RunState
    provenance: Provenance

    def __init__(self) -> None:
        self.history, self.state = RunHistory(), RunState()
        self.provenance = Provenance.PRIVATE
        self.write: Callable[[str, str, Callable[[], Any], int], None] | None = None
        self._collect: Callable[[str, Any], None] | None = None
        self._said = set[str]()
        self._names_of_module, self._names_of_trainer = set[str](), set[str]()

    def connect(self, history: RunHistory, state: RunState) -> LogSink:
        """Record in `history` from now on, at the step and epoch of `state`; returns itself."""
        self.history, self.state, self.write = history, state, None
        self._names_of_module, self._names_of_trainer, self._said = set(), set(), set()
        return self

    def claim(self, name: str) -> None:
        """The trainer records `name` itself, such as the loss of a validation.

        Raises:
            ConfigurationError: the module records it too.
        """
        self._names_of_trainer.add(name)
        if name in self._names_of_module:
            raise ConfigurationError(_TAKEN.format(name=name))

    def is_taken(self, name: str) -> bool:
        """Whether the trainer records a metric of that name itself."""
        return name in self._names_of_trainer or _OF_TRAINING.fullmatch(name) is not None

    def record(self, name: str, value: Any) -> None:
        """Record `value` under `name`; see `RunHistory.update_metric`. Within `collecting` it is collected.

        Raises:
            ConfigurationError: the trainer records a metric of that name itself.
        """
        if isinstance(name, str) and name not in self._names_of_module:
            if self.is_taken(name):
                raise ConfigurationError(_TAKEN.format(name=name))
            self._names_of_module.add(name)
        guard = self.history.guard
        if self._collect is not None and (guard is None or guard.shows(self.provenance)):
            self._collect(check_name(name), value)
            return
        when = {"step": self.state.current_step, "epoch": self.state.epoch}
        self.history.update_metric(name, value, **when, provenance=self.provenance)

    def record_media(self, kind: str, name: str, make: Callable[[], Any], provenance: Provenance | None) -> None:
        """Write the result of `make` under `name`, if writers are open and the run may show it.

        Args:
            kind: the method of `Writer`, such as "log_image".
            name: of the series.
            make: makes the content; called on the main process, if it is written.
            provenance: None for that of the values that are recorded now.

        Raises:
            ConfigurationError: the name cannot be written.
        """
        name = self.history.metric_name_prefix + check_name(name)
        guard = self.history.guard
        if guard is not None and not guard.shows(self.provenance if provenance is None else provenance):
            self._say_once(
                kind,
                f"{kind}({name!r}, ...): a private run writes nothing that is computed from training data without "
                "noise, or has an unknown origin. Log it in a validation, or give provenance=Provenance.PUBLIC if it "
                "holds nothing of the records.",
            )
        elif self.write is not None:
            self.write(kind, name, make, self.state.current_step)
        else:
            self._say_once(kind, f"{kind}({name!r}, ...): no training is running, so no writer is open for it.")

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._said and global_rank() == 0:
            RunLogger().warning(message)
        self._said.add(kind)

    @contextmanager
    def redirect(self, history: RunHistory, state: RunState) -> Iterator[RunHistory]:
        """A block in which values go to `history`; afterwards they go where they went before."""
        before = self.history, self.state, self.write, self._collect
        if history is not self.history:
            self.write = _forget
        self.history, self.state, self._collect = history, state, None
        try:
            yield history
        finally:
            self.history, self.state, self.write, self._collect = before

    @contextmanager
    def collecting(self, collect: Callable[[str, Any], None]) -> Iterator[None]:
        """A block in which `collect` gets the name and the value in place of the history, if it may be recorded."""
        before, self._collect = self._collect, collect
        try:
            yield
        finally:
            self._collect = before

    @contextmanager
    def evaluating(self, provenance: Provenance = Provenance.EVALUATION) -> Iterator[None]:
        """A block of an evaluation: logged values come from its data and released weights, or have this provenance."""
        before, self.provenance = self.provenance, provenance
        try:
            yield
        finally:
            self.provenance = before

    @contextmanager
    def mute(self, state: RunState) -> Iterator[None]:
        """A block in which values are checked and forgotten."""
        with self.redirect(RunHistory(), state):
            yield


def _forget(kind: str, name: str, make: Callable[[], Any], step: int) -> None:
    """Drop content that is logged in a block whose values are not those of the run."""
