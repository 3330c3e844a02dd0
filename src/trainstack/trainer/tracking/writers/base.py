"""`Writer`, the contract of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that a writer is opened for.

    Args:
        resume_step: None for a fresh run; otherwise the run continues after that global step.
        records: gives the records that the run has made before, in order of arrival: those that the writer got up to
            `resume_step`. None for a fresh run.
        log_dir: the folder of the run's logs; it need not exist yet.
        config: arguments, plan and backend of the run, and the `hyperparameters` of the module, in values that JSON
            has.
    """

    resume_step: int | None = None
    records: Callable[[], Iterable[Record]] = tuple
    log_dir: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)


class Writer(ABC):
    """Takes the records of a run to one place, such as a file. Only `write` has to be defined.

    The trainer calls `open` once, `write` at log points with new records, `text` with a summary now and then,
    and `end` and `close` at the end, also after an error; all on the main process, and never from a loader's worker.
    An error of `open` ends the run before it begins. An error of another method is logged once, and training
    continues without the writer.

    `log_image`, `log_text`, `log_table` and `log_artifact` are called by the methods of the same names of the trainer
    and the module. A writer defines those that it can write.

    Attributes:
        slow: True for a writer that talks over a network: after `open` a thread calls it.
        artifacts: the checkpoint that `log_artifact` gets at the end of a run that was not interrupted, apart from the
            export of the model.
    """

    slow: ClassVar[bool] = False
    artifacts: Literal["last", "best", "none"] = "none"

    def open(self, run: RunInfo) -> None:  # noqa: B027 - a writer may have nothing to prepare
        """Get ready to write.

        When a fresh run begins (`run.resume_step` is None), files of another run are kept, never overwritten. When a
        run continues, afterwards exactly `run.records()` is there: records of later steps are cut off, because
        those steps will be run and written again, and missing records are written again.
        """

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Write `records`, so that they survive if the process dies right after."""

    def sync(self) -> None:  # noqa: B027 - a service keeps received records
        """Force the written records to the disk. Called before a checkpoint is written."""

    def text(self, line: str) -> None:  # noqa: B027 - most writers have no use for summaries
        """Write a summary of one line; by default it is left out."""

    def log_image(self, name: str, image: Pixels, step: int) -> None:  # noqa: B027 - a file of rows has no place
        """Write an image, also one made of a figure: uint8 of the shape (height, width, 3), RGB."""

    def log_text(self, name: str, text: str, step: int) -> None:  # noqa: B027
        """Write a text of any length."""

    def log_table(self, name: str, table: Table, step: int) -> None:  # noqa: B027
        """Write a table."""

    def log_artifact(self, name: str, path: Path, kind: str) -> None:  # noqa: B027
        """Upload the file or folder `path`; `kind` is "checkpoint", "model" or "file"."""

    def end(self, status: str, reason: str | None) -> None:  # noqa: B027 - a file needs no status
        """Keep how the run has ended, for `close`.

        Args:
            status: "finished"; "stopped", by `request_stop`; "interrupted", by a signal, to be resumed; or "failed".
            reason: the reason why it has not finished, if it is known.
        """

    def close(self) -> None:  # noqa: B027 - a writer may have nothing to finish
        """Finish writing and let go of files; a second call, or one without `open`, does nothing."""
