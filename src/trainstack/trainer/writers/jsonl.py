"""Records as JSON lines."""

from __future__ import annotations

import json
import math
import time

from trainstack.trainer.history import Record
from trainstack.trainer.writers.rows import RowWriter


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
