"""Records as TensorBoard scalars."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo, Writer


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
        self._file: _EventFile | None = None

    def open(self, run: RunInfo) -> None:
        """Start an event file. Raises ConfigurationError when it is open already."""
        if self._file is not None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is open; close() it.")
        directory = _run_directory(self.directory, fresh=run.resume_step is None)
        self._file = _EventFile(directory, run.resume_step)

    def write(self, records: Sequence[Record]) -> None:
        """Add `records` and flush. Raises ConfigurationError when the writer is not open."""
        if self._file is None:
            raise ConfigurationError(f"the tensorboard writer for {self.directory} is not open; call open().")
        self._file.add(records)

    def close(self) -> None:
        """End the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class _EventFile:
    """A new file of TensorBoard's events in `directory`, written at once, without the thread of a `SummaryWriter`.

    To wait for that thread at each log point took longer than to write the few points, and much longer on a busy
    machine. With a `resume_step`, TensorBoard is told to drop the points of later steps that earlier files have.
    """

    def __init__(self, directory: Path, resume_step: int | None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingExtraError("the tensorboard writer", "tensorboard", "tensorboard") from error
        self._events, self._summaries = event_pb2, summary_pb2
        directory.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{os.getpid()}"
        self._writer = RecordWriter((directory / name).open("xb"))
        begin = {} if resume_step is None else {"step": resume_step + 1}
        self._put(file_version="brain.Event:2", **begin)
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._put(session_log=start, **begin)
        self._writer.flush()

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            value = self._summaries.Summary.Value(tag=record.name, simple_value=record.value)
            self._put(summary=self._summaries.Summary(value=[value]), step=record.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _put(self, **event: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **event).SerializeToString())


def _run_directory(directory: Path, *, fresh: bool) -> Path:
    """Where the run's events go: `directory` for the first run in it, `run-<n>` for later ones."""
    if not any(directory.glob("events.out.tfevents.*")):
        return directory
    numbers = (folder.name[4:] for folder in directory.glob("run-*") if folder.is_dir())
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    if fresh:
        return directory / f"run-{newest + 1}"
    return directory / f"run-{newest}" if newest else directory
