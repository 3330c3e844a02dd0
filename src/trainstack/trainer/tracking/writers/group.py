"""`WriterGroup` calls several writers, isolated from each other's errors."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from trainstack.errors import annotate
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import RunInfo, Writer

MOST_WAITING = 1000  # calls that may wait for a slow writer
PATIENCE_S = 30.0  # seconds without any progress after which a slow writer is given up


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
            with suppress(queue.Full):
                return self._waiting.put(call, timeout=self._patience_s)
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


class WriterGroup(Writer):
    """Passes every call on to all `writers`, in order; slow ones get theirs in a thread each.

    One that raises once it is open is closed and left out from then on, after `say` was given a sentence about it.
    In a process that was forked after `open`, such as a loader's worker, nothing is written. `check` is called before
    each call of the writers; what it raises, because the run is another process's by now, is raised here.
    """

    def __init__(
        self, writers: Sequence[Writer], say: Callable[[str], None], check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self.writers = [BackgroundWriter(writer) if writer.slow else writer for writer in writers]
        self._say = say
        self._process = os.getpid()

    def open(self, run: RunInfo) -> None:
        """Open all writers; when one cannot be opened, the others are closed again and its error is raised."""
        self._process = os.getpid()
        for position, writer in enumerate(self.writers):
            try:
                writer.open(run)
            except Exception as error:
                annotate(error, f"{_name(writer)}.open() raised this")
                del self.writers[position:]
                self.close()
                raise

    def write(self, records: Sequence[Record]) -> None:
        """Give `records` to all writers, if there are any."""
        if records:
            self._check()
            self._all("write", lambda writer: writer.write(records))

    def sync(self) -> None:
        """Let all writers force what they have written to the disk."""
        self._all("sync", lambda writer: writer.sync())

    def text(self, line: str) -> None:
        """Give `line` to all writers."""
        self._check()
        self._all("text", lambda writer: writer.text(line))

    def close(self) -> None:
        """Close all writers, also those behind one that fails."""
        self._all("close", lambda writer: writer.close())

    def _all(self, what: str, call: Callable[[Writer], None]) -> None:
        if os.getpid() != self._process:
            return
        for writer in tuple(self.writers):
            try:
                call(writer)
            except Exception as error:
                self.writers.remove(writer)
                self._say(
                    f"{_name(writer)}.{what}() failed: {type(error).__name__}: {error}. This writer gets nothing more; "
                    "training goes on, and trainer.history has every value."
                )
                with suppress(Exception):
                    writer.close()


def _name(writer: Writer) -> str:
    return type(writer.writer if isinstance(writer, BackgroundWriter) else writer).__name__
