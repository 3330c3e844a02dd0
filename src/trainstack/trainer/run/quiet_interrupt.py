"""`quiet_interrupt`, a `KeyboardInterrupt` that a script ends by with one sentence in place of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_MARK = "_trainstack_shown"


def quiet_interrupt(text: str, *, shown: bool) -> KeyboardInterrupt:
    """A `KeyboardInterrupt` to raise. Where nothing catches it, Python prints `text` alone if `shown`, else nothing.

    It is of that very class: Python looks for no subclass when it ends the process as an interrupted one.
    """
    error = KeyboardInterrupt(text)
    setattr(error, _MARK, shown)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return error


class _Hook:
    """Stands for `sys.excepthook`, and passes on what it does not know."""

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = getattr(error, _MARK, None)
        if shown is None:
            self._before(kind, error, trace)
        elif shown:
            with suppress(OSError, ValueError, AttributeError):  # the terminal is gone
                sys.stderr.write(f"{error}\n")
                sys.stderr.flush()
