"""Summaries on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import Writer
from trainstack.trainer.writers.terminal import QuietStream


class StdoutWriter(Writer):
    """Prints the summaries it is given, such as one line an epoch, and no single record.

    `stream` defaults to what `sys.stdout` is at the time of a line; it is borrowed and never closed. A stream
    that is gone (`train.py | head`) does not end the training.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, records: Sequence[Record]) -> None:
        """Nothing is printed for single records."""

    def text(self, line: str) -> None:
        """Print `line`."""
        QuietStream(self._stream if self._stream is not None else sys.stdout).line(line)
