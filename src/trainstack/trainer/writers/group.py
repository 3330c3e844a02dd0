"""Several writers as one: each is told everything, and what happens to one is no matter to the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from trainstack.errors import annotate
from trainstack.trainer.history import Record
from trainstack.trainer.writers.background import BackgroundWriter
from trainstack.trainer.writers.base import RunInfo, Writer


class WriterGroup(Writer):
    """Passes every call on to all `writers`, in order; slow ones get theirs in a thread each.

    One that raises once it is open is closed and left out from then on, after `say` was given a sentence about it.
    In a process that was forked after `open`, such as a loader's worker, nothing is written.
    """

    def __init__(self, writers: Sequence[Writer], say: Callable[[str], None]) -> None:
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
        """Give `records` to all writers; without records nobody is bothered."""
        if records:
            self._all("write", lambda writer: writer.write(records))

    def text(self, line: str) -> None:
        """Give `line` to all writers."""
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
