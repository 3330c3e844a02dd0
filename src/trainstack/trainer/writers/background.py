"""A slow writer in a thread of its own, so that training never waits for a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo, Writer

MOST_WAITING = 1000
"""Calls that may wait for a slow writer."""

PATIENCE_S = 30.0
"""Seconds without any progress after which a slow writer is given up."""


class BackgroundWriter(Writer):
    """Hands the calls of `writer` to a thread, in order; `open` alone is called here and now.

    An error of `writer` is raised by the next call. Where more calls wait than `most_waiting`, or when it closes,
    the caller waits for as long as the thread gets on; `patience_s` seconds at a standstill are an error.
    The thread is a daemon: a network that never answers keeps no process from ending.
    """

    def __init__(self, writer: Writer, *, most_waiting: int = MOST_WAITING, patience_s: float = PATIENCE_S) -> None:
        self.writer = writer
        self._patience_s = patience_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._done = 0

    def open(self, run: RunInfo) -> None:
        """Open the writer, and raise what it raises."""
        self.writer.open(run)
        self._thread = threading.Thread(
            target=self._work, name=f"trainstack: {type(self.writer).__name__}", daemon=True
        )
        self._thread.start()

    def write(self, records: Sequence[Record]) -> None:
        """Leave `records` to the thread."""
        self._leave(lambda: self.writer.write(records))

    def text(self, line: str) -> None:
        """Leave `line` to the thread."""
        self._leave(lambda: self.writer.text(line))

    def close(self) -> None:
        """Wait until everything is written and the writer is closed."""
        thread = self._thread
        if thread is None:
            return
        self._put(None)
        self._thread = None
        done = -1
        while thread.is_alive() and done != self._done:
            done = self._done
            thread.join(self._patience_s)
        if thread.is_alive():
            raise self._standstill()
        self._raise_failure()

    def _leave(self, call: Callable[[], None]) -> None:
        self._raise_failure()
        if self._thread is not None:
            self._put(call)

    def _put(self, call: Callable[[], None] | None) -> None:
        done = -1
        while done != self._done:
            done = self._done
            try:
                self._waiting.put(call, timeout=self._patience_s)
                return
            except queue.Full:
                continue
        self._thread = None
        raise self._standstill()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            if self._failure is None:
                self._try(call)
            self._done += 1
        self._try(self.writer.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _standstill(self) -> TimeoutError:
        return TimeoutError(f"it has not moved for {self._patience_s:g} s; {self._waiting.qsize()} calls are waiting")
