"""Writers and readers of CSV and JSON Lines files that survive crashes."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from trainstack._files import (
    create_file,
    library_error,
    local_path,
    make_directories,
    open_for_reading,
    open_for_update,
    sync_directory,
    temporary_path,
)
from trainstack.checkpointing.filesystem import sync_file
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.tracking.history import Record, RunHistory
from trainstack.trainer.tracking.writers.base import RunInfo, Writer


class RowFormat(Protocol):
    """The format of a record as one line."""

    header: bytes  # the first line; empty if the format has none

    def row(self, record: Record) -> str:
        """`record` as a line, its end included."""

    def is_ours(self, first: bytes) -> bool:
        """Whether a file that begins with the line `first`, perhaps torn, is of this format."""

    def record(self, row: bytes) -> Record | None:
        """The record of a row; None for a line that is none, such as the header, which is always kept."""


class RowWriter(Writer):
    """Writes one row a record, in the format of its class.

    The history in a checkpoint is the truth, and the file is a view of it. When a run is resumed, the file is cut off
    after the rows of the checkpoint. Where one of these is missing or damaged, the file is written again, which the log
    says. A file outside the folder of the run may be another run's: a fresh run renames it first, to `metrics.1.csv`,
    `metrics.2.csv` and so on; so does a resumed run with a file of another format.
    """

    path: Path
    format: ClassVar[RowFormat]

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = local_path(path).absolute()
        self._file: BinaryIO | None = None

    def open(self, run: RunInfo) -> None:
        """Open the file for appending, with missing folders made.

        Raises:
            ConfigurationError: it is open already, or the path is not that of a file.
            CheckpointError: the system refused.
        """
        path = self.path
        if self._file is not None:
            raise ConfigurationError(f"the writer for {path} is open already; close() it first.")
        if path.exists() and not path.is_file():
            raise ConfigurationError(
                f"{path} is not a regular file, so no metrics can be written there. Remove or rename it, or write "
                "another output_dir, or another path where you have made the writer."
            )
        with library_error(path):
            make_directories(path.parent)
            is_foreign = run.resume_step is None and not self._is_inside(run)
            if path.exists() and path.stat().st_size > 0 and (is_foreign or not self._is_ours()):
                path.rename(free_name(path))
            self._file = self._restored(run)

    def write(self, records: Sequence[Record]) -> None:
        """Append `records` and hand them to the operating system.

        Raises:
            ConfigurationError: the writer is not open.
        """
        if self._file is None:
            raise ConfigurationError(f"the writer for {self.path} is not open; call open() first.")
        self._file.write("".join(map(self.format.row, records)).encode())
        self._file.flush()

    def sync(self) -> None:
        """Force the rows to the disk."""
        if self._file is not None:
            sync_file(self._file)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_inside(self, run: RunInfo) -> bool:
        """Whether the file is in the folder of the run, where no other run writes."""
        return self.path.is_relative_to(run.log_dir.absolute())

    def _is_ours(self) -> bool:
        with open_for_reading(self.path) as file:
            return self.format.is_ours(file.readline(_LONGEST_ROW))

    def _restored(self, run: RunInfo) -> BinaryIO:
        """The file, open at its end, with exactly the rows of the run's records."""
        lost = not self.path.exists()
        if not lost:
            file = open_for_update(self.path)
            size = self._matching_size(file, run)
            if size is not None:
                file.truncate(size)
                file.seek(size)
                return file
            file.close()
            if size is None and not self._is_inside(run):  # these may be the rows of another run
                self.path.rename(free_name(self.path))
        self._write_anew(run)
        if run.resume_step is not None:
            RunLogger().warning(
                f"{self.path} {'was gone' if lost else 'lacked rows, or had damaged ones'}: it was rewritten from "
                "the history in the checkpoint."
            )
        file = open_for_update(self.path)
        file.seek(0, os.SEEK_END)
        return file

    def _matching_size(self, file: BinaryIO, run: RunInfo) -> int | None:
        """The number of bytes at the beginning of `file` with the records of the run; None if one differs."""
        size = 0
        for piece in self._pieces(run):
            if file.read(len(piece)) != piece:
                return None
            size += len(piece)
        return size

    def _write_anew(self, run: RunInfo) -> None:
        made = temporary_path(self.path)
        with create_file(made) as file:
            file.writelines(self._pieces(run))
            sync_file(file)
        made.replace(self.path)
        sync_directory(self.path.parent)

    def _pieces(self, run: RunInfo) -> Iterator[bytes]:
        """The bytes of the file, some thousand rows at a time."""
        yield self.format.header
        records = iter(run.records())
        while rows := "".join(map(self.format.row, islice(records, _ROWS_A_PIECE))):
            yield rows.encode()


_ROWS_A_PIECE = 4096
_LONGEST_ROW = 1 << 20
"""Bytes of the longest row that is read; a file without ends of lines would else take all memory."""


def free_name(path: Path) -> Path:
    """`path`, which is taken, with the first number that is not: `metrics.csv` becomes `metrics.1.csv`."""
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")):
        number += 1
    return candidate


def _record(name: str, value: Any, step: Any, epoch: Any) -> Record:
    """The record of the fields of a row.

    Raises:
        ValueError, TypeError, OverflowError: a field is none, or no run counts so far.
    """
    record = Record(name, float(value), int(step), int(epoch))
    if max(abs(record.step), abs(record.epoch)) >= 1 << 63:
        raise ValueError("a step or an epoch does not fit into 64 bits")
    return record


class CsvFormat:
    """`step,epoch,name,value` in UTF-8; a name with a comma or a quote is quoted."""

    header = b"step,epoch,name,value\n"

    def row(self, record: Record) -> str:
        """`record` as a line."""
        name = record.name
        if "," in name or '"' in name:
            name = '"' + name.replace('"', '""') + '"'
        return f"{record.step},{record.epoch},{name},{float(record.value)!r}\n"

    def is_ours(self, first: bytes) -> bool:
        """Whether `first` is our header, which a crash may have left half written."""
        torn = not first.endswith(b"\n") and self.header.startswith(first)
        return torn or first.replace(b"\r\n", b"\n") == self.header

    def record(self, row: bytes) -> Record | None:
        """The record of a row, or None."""
        try:
            step, epoch, name, value = next(csv.reader([row.decode().rstrip("\r\n")]))
            return _record(name, value, step, epoch)
        except (ValueError, StopIteration, csv.Error):
            return None


class CsvWriter(RowWriter):
    """Writes `step,epoch,name,value`, one row a record, in UTF-8; `float(value)` gives the recorded bits.

    See `RowWriter` for a file that exists already.
    """

    format: ClassVar[RowFormat] = CsvFormat()


class JsonLinesFormat:
    """One JSON object a line: name, value, step and epoch.

    JSON has no word for inf and nan: they are written as strings, which Python's `float` takes.
    """

    header = b""

    def row(self, record: Record) -> str:
        """`record` as a line."""
        value = float(record.value)
        fields = {
            "name": record.name,
            "value": value if math.isfinite(value) else repr(value),
            "step": record.step,
            "epoch": record.epoch,
        }
        return json.dumps(fields) + "\n"

    def is_ours(self, first: bytes) -> bool:
        """Whether `first` is a record, or the part of one that a crash left."""
        return first.startswith(b'{"name": ') or not first.endswith(b"\n")

    def record(self, row: bytes) -> Record | None:
        """The record of a row, or None."""
        try:
            fields = json.loads(row)
            return _record(str(fields["name"]), fields["value"], fields["step"], fields["epoch"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None


class JsonLinesWriter(RowWriter):
    """Writes one JSON object a record.

    See `RowWriter` for a file that exists already.
    """

    format: ClassVar[RowFormat] = JsonLinesFormat()


_FORMATS: dict[str, RowFormat] = {".csv": CsvFormat(), ".jsonl": JsonLinesFormat()}


def read_history(path: str | PathLike[str]) -> RunHistory:
    """The records in a `metrics.csv` or `metrics.jsonl`, or in a folder that has one of them, as a history.

    A row that a crash left half written, or that was inserted by hand, is skipped.

    Args:
        path: the file, or the folder.

    Raises:
        ConfigurationError: there is no such file, or it is of another format.

    Examples:
        >>> trainer = ts.Trainer(module, replace(args, writers=["csv"]))
        >>> trainer.train()
        >>> history = ts.read_history(trainer.output_dir)
        >>> losses = history.get_metric_values("val/loss")
    """
    file = _file(local_path(path))
    format = _FORMATS.get(file.suffix)
    history = RunHistory()
    with open_for_reading(file) as lines:
        first = lines.readline(_LONGEST_ROW)
        if format is None or not format.is_ours(first):
            raise ConfigurationError(f"{file} was not written by the writer 'csv' or 'jsonl'; name a file that was.")
        for line in chain([first], iter(partial(lines.readline, _LONGEST_ROW), b"")):
            if len(line) == _LONGEST_ROW:
                raise ConfigurationError(f"{file} has a row of {_LONGEST_ROW:,} bytes or more; name another file.")
            record = format.record(line) if line.endswith(b"\n") else None
            if record is not None:
                with suppress(ConfigurationError):  # a name that no run would have recorded
                    history.update_metric(record.name, record.value, step=record.step, epoch=record.epoch)
    history.flush()
    return history


def _file(path: Path) -> Path:
    if path.is_dir():
        for file in (path / f"metrics{suffix}" for suffix in _FORMATS):
            if file.is_file():
                return file
        raise ConfigurationError(f"the folder {path} has neither metrics.csv nor metrics.jsonl in it.")
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}; name a metrics.csv or metrics.jsonl, or its folder.")
    return path
