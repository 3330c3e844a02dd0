"""Several writers as one: each is told everything, whatever happens to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainstack.errors import annotate
from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import Writer


class WriterGroup(Writer):
    """Passes every call on to all `writers`, in order.

    When one raises, the others still get the call; then its error is raised, the writer's class in a note.
    When one cannot be opened, those that could are closed again.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self.writers = tuple(writers)

    def open(self, *, resume_step: int | None) -> None:
        """Open all writers, or none."""
        try:
            self._all("open", lambda writer: writer.open(resume_step=resume_step))
        except Exception as error:
            try:
                self.close()
            except Exception as second:
                annotate(error, f"closing the writers then failed as well: {second!r}")
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
        first: Exception | None = None
        for writer in self.writers:
            try:
                call(writer)
            except Exception as error:
                where = f"{type(writer).__name__}.{what}() raised this"
                annotate(error, where)
                if first is None:
                    first = error
                else:
                    annotate(first, f"after it, {type(writer).__name__}.{what}() failed too: {error!r}")
        if first is not None:
            raise first
