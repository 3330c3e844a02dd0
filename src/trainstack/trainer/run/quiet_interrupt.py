"""`quiet_interrupt` makes a `KeyboardInterrupt` that ends a script with one sentence instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_MARK = "_trainstack_shown"


def quiet_interrupt(text: str, *, shown: bool) -> KeyboardInterrupt:
    """A `KeyboardInterrupt` to raise. If nothing catches it, Python prints only `text` if `shown`, else nothing.

    Its class is exactly `KeyboardInterrupt`, because Python ends the process by SIGINT for no subclass.
    """
    error = KeyboardInterrupt(text)
    setattr(error, _MARK, shown)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return error


class _Hook:
    """Replaces `sys.excepthook`. It passes other exceptions to the previous hook."""

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
