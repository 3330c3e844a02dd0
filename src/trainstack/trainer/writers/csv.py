"""Records as rows of a CSV file that survives crashes and is continued in place."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from trainstack.errors import ConfigurationError
from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import Writer

_HEADER = b"step,epoch,name,value\n"


class CsvWriter(Writer):
    """Writes `step,epoch,name,value`, one row a record, in UTF-8; `float(value)` gives the recorded bits.

    A fresh run never touches the rows of an earlier one: a file that is not empty is renamed aside first, to
    `metrics.1.csv`, `metrics.2.csv` and so on. A resumed run cuts off the rows of later steps, and a last row
    that a crash left half written, in place; a file that is not ours (another header) is renamed aside.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def open(self, *, resume_step: int | None) -> None:
        """Open the file for appending, with missing folders made.

        Raises:
            ConfigurationError: it is open already, or the path is not that of a file.
        """
        if self._file is not None:
            raise ConfigurationError(f"the CSV writer for {self.path} is open already; close() it first.")
        if self.path.exists() and not self.path.is_file():
            raise ConfigurationError(f"the CSV path {self.path} is not a file; give the path of a file.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > 0:
            if resume_step is None or not _has_our_header(self.path):
                self.path.rename(_free_name(self.path))
            else:
                _cut_off(self.path, resume_step)
        self._file = self.path.open("ab")
        if self._file.tell() == 0:
            self._file.write(_HEADER)
            self._file.flush()

    def write(self, records: Sequence[Record]) -> None:
        """Append `records` and hand them to the operating system.

        Raises:
            ConfigurationError: the writer is not open.
        """
        if self._file is None:
            raise ConfigurationError(f"the CSV writer for {self.path} is not open; call open() first.")
        self._file.write("".join(map(_row, records)).encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _row(record: Record) -> str:
    name = record.name
    if "," in name or '"' in name:
        name = '"' + name.replace('"', '""') + '"'
    return f"{record.step},{record.epoch},{name},{float(record.value)!r}\n"


def _has_our_header(path: Path) -> bool:
    """Whether the file begins with our header, which a crash may have left half written."""
    with path.open("rb") as file:
        first = file.readline()
    torn = not first.endswith(b"\n") and _HEADER.startswith(first)
    return torn or first.replace(b"\r\n", b"\n") == _HEADER


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _cut_off(path: Path, resume_step: int) -> None:
    """Remove, in place, the rows of steps after `resume_step` and a torn last row."""
    cut: int | None = None
    kept: list[bytes] = []  # rows to keep that lie behind the cut: only where steps were given out of order
    with path.open("rb+") as file:
        end = 0
        for row in file:
            if not row.endswith(b"\n") or _step(row) > resume_step:
                cut = end if cut is None else cut
            elif cut is not None:
                kept.append(row)
            end += len(row)
        if cut is not None:
            file.truncate(cut)
            file.seek(cut)
            file.writelines(kept)


def _step(row: bytes) -> int:
    """The step of a row; a row that is none, such as the header, counts as before all steps and is kept."""
    try:
        return int(row.split(b",", 1)[0])
    except ValueError:
        return -1
