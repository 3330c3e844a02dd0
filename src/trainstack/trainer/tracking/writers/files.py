"""Writers and readers of CSV and JSON Lines files that survive crashes."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

from trainstack._files import local_path
from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.history import Record, RunHistory
from trainstack.trainer.tracking.writers.base import RunInfo, Writer


class RowFormat(Protocol):
    """How a record is written as one line."""

    header: bytes  # the first line; empty if the format has none

    def row(self, record: Record) -> str:
        """`record` as a line, its end included."""

    def is_ours(self, first: bytes) -> bool:
        """Whether a file that begins with the line `first`, perhaps torn, is of this format."""

    def record(self, row: bytes) -> Record | None:
        """The record of a row; None for a line that is none, such as the header, which is always kept."""


class RowWriter(Writer):
    """Writes one row a record, in the format of its class; nothing is ever rewritten.

    A fresh run never touches the rows of an earlier one: a file that is not empty is renamed aside first, to
    `metrics.1.csv`, `metrics.2.csv` and so on. A resumed run cuts off the rows of later steps, and a last row
    that a crash left half written, in place; a file of another format is renamed aside.
    """

    format: ClassVar[RowFormat]

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = local_path(path)
        self._file: BinaryIO | None = None

    def open(self, run: RunInfo) -> None:
        """Open the file for appending, with missing folders made.

        Raises:
            ConfigurationError: it is open already, or the path is not that of a file.
        """
        path = self.path
        if self._file is not None:
            raise ConfigurationError(f"the writer for {path} is open already; close() it first.")
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"the path {path} is not a file; give the path of a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > 0:
            if run.resume_step is None or not self._is_ours():
                path.rename(free_name(path))
            else:
                self._cut_off(run)
        self._file = path.open("ab")
        if self._file.tell() == 0 and self.format.header:
            self._file.write(self.format.header)
            self._file.flush()

    def write(self, records: Sequence[Record]) -> None:
        """Append `records` and hand them to the operating system.

        Raises:
            ConfigurationError: the writer is not open.
        """
        if self._file is None:
            raise ConfigurationError(f"the writer for {self.path} is not open; call open() first.")
        self._file.write("".join(map(self.format.row, records)).encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_ours(self) -> bool:
        with self.path.open("rb") as file:
            return self.format.is_ours(file.readline())

    def _cut_off(self, run: RunInfo) -> None:
        """Remove, in place, a torn last row and the rows that will come again."""
        cut: int | None = None
        kept: list[bytes] = []  # rows to keep that lie behind the cut: only where steps were given out of order
        left = None if run.recorded_there is None else dict(run.recorded_there)
        with self.path.open("rb+") as file:
            end = 0
            for row in file:
                if not row.endswith(b"\n") or self._will_be_written_again(row, run, left):
                    cut = end if cut is None else cut
                elif cut is not None:
                    kept.append(row)
                end += len(row)
            if cut is not None:
                file.truncate(cut)
                file.seek(cut)
                file.writelines(kept)

    def _will_be_written_again(self, row: bytes, run: RunInfo, left: dict[str, int] | None) -> bool:
        """Whether the resumed run will write `row` again; `left` counts down the rows of its first step to keep."""
        record, first = self.format.record(row), run.resume_step or 0
        if record is None or record.step != first or left is None:
            return record is not None and record.step > first
        left[record.name] = left.get(record.name, 0) - 1
        return left[record.name] < 0


def free_name(path: Path) -> Path:
    """`path`, which is taken, with the first number that is not: `metrics.csv` becomes `metrics.1.csv`."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


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
            return Record(name, float(value), int(step), int(epoch))
        except (ValueError, StopIteration, csv.Error):
            return None


class CsvWriter(RowWriter):
    """Writes `step,epoch,name,value`, one row a record, in UTF-8; `float(value)` gives the recorded bits.

    What becomes of a file that is there already, `RowWriter` says: nothing is ever rewritten.
    """

    format = CsvFormat()


class JsonLinesFormat:
    """One JSON object a line: name, value, step, epoch and the time of writing in seconds since 1970.

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
            "time": round(time.time(), 3),
        }
        return json.dumps(fields) + "\n"

    def is_ours(self, first: bytes) -> bool:
        """Whether `first` is a record, or what a crash left of one."""
        return first.startswith(b'{"name": ') or not first.endswith(b"\n")

    def record(self, row: bytes) -> Record | None:
        """The record of a row, or None."""
        try:
            fields = json.loads(row)
            return Record(str(fields["name"]), float(fields["value"]), int(fields["step"]), int(fields["epoch"]))
        except (ValueError, KeyError, TypeError):
            return None


class JsonLinesWriter(RowWriter):
    """Writes one JSON object a record, with the time of writing in seconds since 1970.

    What becomes of a file that is there already, `RowWriter` says: nothing is ever rewritten.
    """

    format = JsonLinesFormat()


_FORMATS: dict[str, RowFormat] = {".csv": CsvFormat(), ".jsonl": JsonLinesFormat()}


def read_history(path: str | PathLike[str]) -> RunHistory:
    """The records in a `metrics.csv` or `metrics.jsonl`, or in a folder that has one of them, as a history.

    A row that a crash left half written, or that somebody wrote in by hand, is passed over.

    Raises:
        ConfigurationError: there is no such file, or it is of another format.
    """
    file = _file(local_path(path))
    format = _FORMATS.get(file.suffix)
    history = RunHistory()
    with file.open("rb") as lines:
        first = lines.readline()
        if format is None or not format.is_ours(first):
            raise ConfigurationError(f"{file} was not written by the writer 'csv' or 'jsonl'; name a file that was.")
        for line in chain([first], lines):
            record = format.record(line) if line.endswith(b"\n") else None
            if record is not None:
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
