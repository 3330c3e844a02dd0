"""What signals do while a run trains: they ask it to stop, and do nothing themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from trainstack.errors import Preempted
from trainstack.trainer.logs import RunLogger
from trainstack.trainer.stopping import Request, Stopper

_SAME_PRESS_S = 1.0
"""A terminal and a launcher may both pass one Ctrl-C on, so what follows within this time is the same one."""

_HANDLED = ("SIGTERM", "SIGUSR1", "SIGINT")  # Windows has no SIGUSR1
_AGAIN = b"\nCtrl-C: the run stops at the end of this step. Ctrl-C again stops it at once.\n"


@contextmanager
def signals_ask(stopper: Stopper, *, wanted: bool, says: bool) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and Ctrl-C ask `stopper` inside; a second Ctrl-C raises KeyboardInterrupt at once.

    A signal that the program ignores, or handles in a way of its own, is left alone. Outside of the main thread, where
    Python lets nobody handle signals, nothing is done.

    Args:
        stopper: asked.
        wanted: False does nothing.
        says: whether to tell who pressed Ctrl-C that it was noticed.
    """
    replaced: dict[int, Any] = {}
    handler = _Handler(stopper, says)
    if wanted and threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _HANDLED if hasattr(signal, name)):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                replaced[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in replaced.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)


def end_by_signal(heeded: Request | None, late: Request | None, last_words: str, log: RunLogger | None) -> None:
    """End `train()` if a signal has stopped it; a signal that came too late goes to whoever handles it now.

    Args:
        heeded: what the run was stopped for, if it was.
        late: what else was asked for, when there was nothing left to stop.
        last_words: where the run was stopped, and what to do.
        log: told as well; None on processes that must not say anything.

    Raises:
        KeyboardInterrupt: for Ctrl-C.
        Preempted: for another signal.
    """
    if heeded is not None and heeded.signal is not None:
        text = f"stopped by {heeded.reason} {last_words}."
        if log is not None:
            log.warning(text)
        raise KeyboardInterrupt(text) if heeded.signal == signal.SIGINT else Preempted(text, heeded.signal)
    if late is not None and late.signal is not None:
        signal.raise_signal(late.signal)


class _Handler:
    """Runs between two instructions of whatever the main thread does, so it sets flags and writes past all buffers."""

    def __init__(self, stopper: Stopper, says: bool) -> None:
        self._stopper, self._says = stopper, says
        self._pressed: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._pressed is not None and now - self._pressed > _SAME_PRESS_S:
                raise KeyboardInterrupt
            if self._pressed is None and self._says:
                with suppress(OSError):
                    os.write(2, _AGAIN)
            self._pressed = now if self._pressed is None else self._pressed
        self._stopper.ask("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, number)
