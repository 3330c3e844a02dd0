"""`Writer`, the contract of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trainstack.trainer.tracking.history import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that a writer is opened for.

    Args:
        resume_step: None for a fresh run; otherwise the run continues after that global step.
        records: gives the records that the run has made before, in order of arrival: what the writer was given up to
            `resume_step`. None for a fresh run.
        log_dir: where the run's logs lie; it need not exist yet.
        config: arguments, plan and backend of the run, in values that JSON has.
    """

    resume_step: int | None = None
    records: Callable[[], Iterable[Record]] = tuple
    log_dir: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)


class Writer(ABC):
    """Takes the records of a run to one place, such as a file. Only `write` has to be defined.

    The trainer calls `open` once, `write` at log points with what is new, `text` with a summary now and then,
    and `close` at the end, also after an error; all on the main process, and never from a loader's worker. What
    `open` raises ends the run before it begins. What the others raise is said once, and the writer is left out from
    then on: training goes on without it.

    Attributes:
        slow: True for a writer that talks over a network: after `open` a thread calls it.
    """

    slow: ClassVar[bool] = False

    def open(self, run: RunInfo) -> None:  # noqa: B027 - a writer may have nothing to prepare
        """Get ready to write.

        When a fresh run begins (`run.resume_step` is None), what another run wrote is kept, never overwritten. When a
        run continues, afterwards exactly `run.records()` is there: what was written for later steps is cut off, since
        those steps will be run and written again, and what is missing is written again.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write `records`, so that they survive if the process dies right after."""

    def sync(self) -> None:  # noqa: B027 - a service keeps what it was sent
        """Force what was written to the disk. Called before a checkpoint is written."""

    def text(self, line: str) -> None:  # noqa: B027 - most writers have no use for summaries
        """Write a summary of one line; by default it is left out."""

    def close(self) -> None:  # noqa: B027 - a writer may have nothing to finish
        """Finish writing and let go of files; a second call, or one without `open`, does nothing."""
