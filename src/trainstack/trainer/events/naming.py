"""Making callbacks, and what they are called: stable keys, and methods whose name is a slip."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

from trainstack.errors import ConfigurationError
from trainstack.trainer.events.callback import Callback
from trainstack.trainer.events.event import Event
from trainstack.trainer.logs import RunLogger

Value = TypeVar("Value")


def made(callbacks: Iterable[Any] | None) -> list[Callback]:
    """Callbacks as objects, each a different one.

    Raises:
        ConfigurationError: something is neither a `Callback` nor a class of them, or is given twice.
    """
    if isinstance(callbacks, Callback | type) or not isinstance(callbacks, Iterable | None):
        raise ConfigurationError(f"callbacks={callbacks!r}: write a list, callbacks=[...].")
    objects = [c() if isinstance(c, type) and issubclass(c, Callback) else c for c in callbacks or ()]
    for position, callback in enumerate(objects):
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks[{position}] is a {type(callback).__name__}. Give an object of a class derived from "
                "Callback; a function subscribes by trainer.on(Event.X)(function)."
            )
        if any(callback is other for other in objects[:position]):
            raise ConfigurationError(f"callbacks[{position}] is in the list already. Make another one.")
    return objects


def numbered(pairs: Iterable[tuple[str, Value]], taken: Iterable[str | None] = ()) -> dict[str, Value]:
    """`pairs` as a dict; the second of one name gets "-2" behind it, and so on."""
    named: dict[str, Value] = {}
    used = set(taken)
    for name, value in pairs:
        key, number = name, 1
        while key in used:
            number += 1
            key = f"{name}-{number}"
        used.add(key)
        named[key] = value
    return named


def point_at_slips(callback: Callback, log: RunLogger) -> None:
    """Warn of methods that are called like an event, but for a slip."""
    known = [event.method for event in Event]
    for name in dir(type(callback)):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) if name.startswith("on_") else []
        if close and name not in known:
            log.warning(
                f"{type(callback).__name__}.{name} is called like no event and never called by the trainer. "
                f"Did you mean {close[0]!r}?"
            )
