"""Ending the worker processes of a loader while they can still be told to."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

_endings: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()


def end_with(owner: object, iterator: Any) -> weakref.finalize[Any, Any]:
    """Let the workers behind a loader's iterator end with `owner`, and at the latest with Python.

    torch tells them to when the iterator is deleted. Where it is deleted as part of a reference cycle, though, the
    queue through which they are told is closed before: then each is waited for in vain for 10 s. And when Python ends
    they get a single SIGTERM, which they let pass (see `Sheltered`), and are waited for for ever.

    Returns:
        ends them when called; once, however often it is called.
    """
    if iterator not in _endings:
        # torch 2.13.0. In a torch without this method the workers end when torch ends them, with the delays above.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        ending = weakref.finalize(owner, shut_down or _nothing)
        ending.atexit = False  # would come too late: what is registered here comes before torch's own
        _endings[iterator] = ending
    return _endings[iterator]


def _nothing() -> None:
    """In place of a method that torch lacks."""


@atexit.register
def _end_all() -> None:
    for ending in list(_endings.values()):
        ending()
