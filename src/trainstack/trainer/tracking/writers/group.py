"""`WriterGroup` calls several writers, isolated from each other's errors."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainstack.errors import annotate
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo, Writer

MOST_WAITING = 1000  # calls that may wait for a slow writer
PATIENCE_S = 30.0  # seconds without any progress after which a slow writer is given up
UPLOAD_PATIENCE_S = 3600.0  # the same, once it uploads files, which is one call however large they are


class BackgroundWriter(Writer):
    """Hands the calls of `writer` to a thread, in order; `open` alone is called here and now.

    An error of `writer` is raised by the next call. Where more calls wait than `most_waiting`, or when it closes, the
    caller waits for as long as the thread gets on; `patience_s` seconds at a standstill are an error. The thread is a
    daemon: a network that never answers keeps no process from ending.
    """

    def __init__(self, writer: Writer, *, most_waiting: int = MOST_WAITING, patience_s: float = PATIENCE_S) -> None:
        self.writer = writer
        self._patience_s = patience_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._done = 0

    def open(self, run: RunInfo) -> None:
        """Open the writer, and raise its error."""
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

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Leave the image to the thread."""
        self._leave(lambda: self.writer.log_image(name, image, step))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Leave the text to the thread."""
        self._leave(lambda: self.writer.log_text(name, text, step))

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Leave the table to the thread."""
        self._leave(lambda: self.writer.log_table(name, table, step))

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Leave the upload to the thread, and be patient with it from now on."""
        self._patience_s = max(self._patience_s, UPLOAD_PATIENCE_S)
        self._leave(lambda: self.writer.log_artifact(name, path, kind))

    def end(self, status: str, reason: str | None) -> None:
        """Leave the status to the thread."""
        self._leave(lambda: self.writer.end(status, reason))

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
        if self._failure is not None:  # it lacks records, so its run has not finished well
            reason = f"logging failed: {type(self._failure).__name__}: {self._failure}"
            self._try(lambda: self.writer.end("failed", reason))
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
    each call of the writers; its error, if the run belongs to another process by now, is raised here.
    """

    writers: list[BackgroundWriter | Writer]

    def __init__(
        self, writers: Sequence[Writer], say: Callable[[str], None], check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self.writers = [BackgroundWriter(writer) if writer.slow else writer for writer in writers]
        self._say = say
        self._process = os.getpid()
        self._without_taker = {
            kind for kind in _MEDIA if all(getattr(type(writer), kind) is getattr(Writer, kind) for writer in writers)
        }

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
        """Let all writers force their records to the disk."""
        self._all("sync", lambda writer: writer.sync())

    def text(self, line: str) -> None:
        """Give `line` to all writers."""
        self._check()
        self._all("text", lambda writer: writer.text(line))

    def log_media(self, kind: str, name: str, *content: Any) -> None:
        """Call the method `kind` of all writers, such as "log_image"; say once that no writer has it."""
        self._check()
        if kind in self._without_taker:
            self._without_taker.remove(kind)
            self._say(
                f"{kind}({name!r}, ...): no writer of this run takes {_MEDIA[kind]}, so it is not written. Add one to "
                "writers, such as 'tensorboard' or 'mlflow'; docs/writers.md lists the content that each writer takes."
            )
        self._all(kind, lambda writer: getattr(writer, kind)(name, *content))

    def log_checkpoint(self, find: Callable[[str], Path | None], export: Path | None) -> None:
        """Give each writer with `artifacts` the checkpoint that it asks for, as `find` returns it, and the export."""
        self._check()

        def give(writer: Writer) -> None:
            wanted = _inner(writer).artifacts
            if wanted == "none":
                return
            checkpoint = find(wanted)
            if checkpoint is not None:
                writer.log_artifact("checkpoint", checkpoint, "checkpoint")
            if export is not None:
                writer.log_artifact("model", export, "model")

        self._all("log_artifact", give)

    def end(self, status: str, reason: str | None) -> None:
        """Tell all writers how the run has ended."""
        self._all("end", lambda writer: writer.end(status, reason))

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
                    "training continues, and trainer.history has every value."
                )
                with suppress(Exception):
                    writer.close()


_MEDIA = {"log_image": "images", "log_text": "texts", "log_table": "tables", "log_artifact": "files"}


def _inner(writer: Writer) -> Writer:
    return writer.writer if isinstance(writer, BackgroundWriter) else writer


def _name(writer: Writer) -> str:
    return type(_inner(writer)).__name__
