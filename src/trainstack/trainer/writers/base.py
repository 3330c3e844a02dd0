"""The contract of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from trainstack.trainer.history import Record


class Writer(ABC):
    """Takes the records of a run to one place, such as a file.

    The trainer calls `open` once, `write` at log points with what is new, `text` with a summary now and then,
    and `close` at the end, also after an error. None of them is called in every step.
    """

    @abstractmethod
    def open(self, *, resume_step: int | None) -> None:
        """Get ready to write.

        With `resume_step=None` a fresh run begins; what an earlier run wrote is kept, never overwritten. With
        a number the run continues after that global step: what was written for later steps is cut off, since
        those steps will be run and written again, and nothing else is touched.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write `records`, so that they survive if the process dies right after."""

    def text(self, line: str) -> None:  # noqa: B027 - most writers have no use for summaries
        """Write a summary of one line; by default it is left out."""

    @abstractmethod
    def close(self) -> None:
        """Finish writing and let go of files; a second call, or one without `open`, does nothing."""
