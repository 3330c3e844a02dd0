"""A file of rows that is only ever appended to, survives crashes and is continued in place."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

from trainstack.errors import ConfigurationError
from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo, Writer


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
        self.path = Path(path)
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
                if not row.endswith(b"\n") or self._comes_again(row, run, left):
                    cut = end if cut is None else cut
                elif cut is not None:
                    kept.append(row)
                end += len(row)
            if cut is not None:
                file.truncate(cut)
                file.seek(cut)
                file.writelines(kept)

    def _comes_again(self, row: bytes, run: RunInfo, left: dict[str, int] | None) -> bool:
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
