"""`Writer`, the contract of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trainstack.trainer.tracking.history import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that a writer is opened for.

    Args:
        resume_step: None for a fresh run; otherwise the run continues after that global step.
        recorded_there: how many records of each metric, at `resume_step`, the checkpoint knows; what was written
            there beyond that will come again. None if that is not known.
        log_dir: where the run's logs lie; it need not exist yet.
        config: arguments, plan and backend of the run, in values that JSON has.
    """

    resume_step: int | None = None
    recorded_there: Mapping[str, int] | None = None
    log_dir: Path = Path("runs")
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

        When a fresh run begins (`run.resume_step` is None), what an earlier run wrote is kept, never overwritten. When
        a run continues, what was written for later steps is cut off where that is possible, since those steps will be
        run and written again, and nothing else is touched.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write `records`, so that they survive if the process dies right after."""

    def text(self, line: str) -> None:  # noqa: B027 - most writers have no use for summaries
        """Write a summary of one line; by default it is left out."""

    def close(self) -> None:  # noqa: B027 - a writer may have nothing to finish
        """Finish writing and let go of files; a second call, or one without `open`, does nothing."""
