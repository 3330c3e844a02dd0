"""`Callback`: an object that subscribes to events by its methods."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any


class Callback:
    """What acts at points of a run. Define `on_<event>(self, trainer, ...)` for each `Event` it subscribes to.

    There are no empty methods to override: what is not defined costs nothing. A method may take fewer arguments than
    the event gives, from the right; what it cannot take is refused when the trainer is made.

    On many processes the methods are called on each of them. Their state must then be the same everywhere, since
    checkpoints keep that of the main process.

    Attributes:
        priority: callbacks and functions with a higher one come first; among equals callbacks do, in their order.
        expects_all_events: whether it is said at the end of a run that an event to which it subscribes never came.
        state_key: names the state in checkpoints; the name of the class if None. Several of one class are numbered.
    """

    priority: int = 0
    expects_all_events: bool = True
    state_key: str | None = None

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; nothing if empty. Made of plain values and tensors."""
        return {}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned."""

    def evaluation_context(self, trainer: Any) -> AbstractContextManager[Any] | None:
        """Entered around each evaluation: validation, test and prediction, in training or by themselves."""
        return None
