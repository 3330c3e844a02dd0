"""Records as TensorBoard scalars."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo, Writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardWriter(Writer):
    """Writes scalars (float32, as TensorBoard keeps them) to event files; nothing is ever deleted.

    They lie in `directory`. A fresh run into a directory that has event files goes to a folder of its own in
    there, `run-1`, `run-2` and so on, so that two runs do not become one curve. A resumed run continues the
    newest of them, and TensorBoard is told to leave out the points of later steps.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Remember the directory; nothing is made yet. Raises MissingExtraError without tensorboard."""
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError("the tensorboard writer", "tensorboard", "tensorboard")
        self.directory = Path(directory)
        self._writer: SummaryWriter | None = None

    def open(self, run: RunInfo) -> None:
        """Start an event file. Raises ConfigurationError when it is open already."""
        if self._writer is not None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is open; close() it.")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("the tensorboard writer", "tensorboard", "tensorboard") from error
        # TensorBoard drops the points from purge_step on.
        purge_step = None if run.resume_step is None else run.resume_step + 1
        directory = _run_directory(self.directory, fresh=run.resume_step is None)
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge_step)

    def write(self, records: Sequence[Record]) -> None:
        """Add `records` and flush. Raises ConfigurationError when the writer is not open."""
        if self._writer is None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is not open; call open().")
        for record in records:
            self._writer.add_scalar(record.name, record.value, global_step=record.step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and end the writer's thread."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _run_directory(directory: Path, *, fresh: bool) -> Path:
    """Where the run's events go: `directory` for the first run in it, `run-<n>` for later ones."""
    if not any(directory.glob("events.out.tfevents.*")):
        return directory
    numbers = (folder.name[4:] for folder in directory.glob("run-*") if folder.is_dir())
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    if fresh:
        return directory / f"run-{newest + 1}"
    return directory / f"run-{newest}" if newest else directory
