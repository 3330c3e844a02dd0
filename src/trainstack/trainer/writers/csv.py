"""Records as rows of a CSV file."""

from __future__ import annotations

import csv

from trainstack.trainer.history import Record
from trainstack.trainer.writers.rows import RowWriter


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
