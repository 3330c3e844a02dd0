"""The writers to standard output and to Python's logging."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TextIO

from trainstack.trainer.tracking.epoch_lines import EpochLine, EpochTable
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import Writer


class QuietStream:
    """Wraps a text stream so that writing never raises: a run must outlive the terminal it was started from.

    `gone` becomes true at the first failure (a broken pipe, a closed stream, a full disk), and nothing is written from
    then on. Characters that the stream's encoding lacks are written as escapes. The stream is borrowed: it is never
    closed here.
    """

    gone: bool

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.gone = stream is None

    @property
    def encoding(self) -> str:
        """The encoding of the stream beneath."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal that is still there."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """The descriptor beneath. Raises OSError where there is none."""
        if self._stream is None:
            raise OSError("there is no stream beneath")
        return self._stream.fileno()

    @property
    def columns(self) -> int:
        """The width of the terminal; 80 where it does not say, or where there is none."""
        try:
            return os.get_terminal_size(self.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def write(self, text: str) -> int:
        """Write `text`, or nothing if the stream is gone; returns the length of `text`."""
        self._attempt(self._write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it is still there."""
        self._attempt(lambda stream: stream.flush())

    def line(self, text: str) -> None:
        """Write `text` as one line and flush."""
        self.write(text + "\n")
        self.flush()

    def _attempt(self, call: Callable[..., None], *args: str) -> None:
        if self._stream is not None and not self.gone:
            try:
                call(self._stream, *args)
            except (OSError, ValueError):
                self.gone = True

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))


_POLLS_PER_SECOND = 40  # four for each paint of the bar, which is painted at most ten times a second
# A poll costs about half a microsecond. A longer stride would save nothing, and the display would react later when
# steps suddenly become slow.
_LONGEST_STRIDE = 128
_SHARE_OF_TIME = 0.01
_LONGEST_PAUSE_S = 1.0
_LEAST_PAUSES = 10.0  # times the time of a paint: on a terminal that takes a second for each, a tenth of the time
_PAINTS_REMEMBERED = 5  # one paint in which the process lost the processor does not stop the bar for seconds


class Pace:
    """Names the step of the next poll (`next_poll`) and says at a poll whether painting is due.

    Two paints lie at least `interval` seconds apart, and so far that painting takes at most 1 % of the time, by the
    median of the last five paints; but not more than a second, or ten times the time of a paint if that is longer.
    `clock` returns seconds. `due_at_once` makes the first poll paint; otherwise it waits for `interval`.
    """

    next_poll: int

    def __init__(self, interval: float, *, due_at_once: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.next_poll = 0
        self._interval = interval
        self._due = clock() + (0.0 if due_at_once else interval)
        self._costs: deque[float] = deque(maxlen=_PAINTS_REMEMBERED)
        self.start(0)

    def start(self, done: int) -> None:
        """A new count of steps begins, at `done`; when to paint next is not changed by it."""
        self._stride = 1
        self._last_done = done
        self._last_time = self.clock()
        self.next_poll = done + 1

    def poll(self, done: int) -> bool:
        """Set `next_poll` to the step that is due in a 40th of a second; return whether to paint now."""
        now = self.clock()
        elapsed = now - self._last_time
        steps = done - self._last_done
        wanted = steps / (elapsed * _POLLS_PER_SECOND) if elapsed > 0 else _LONGEST_STRIDE
        self._stride = max(1, min(int(wanted), 2 * self._stride, _LONGEST_STRIDE))
        self._last_time = now
        self._last_done = done
        self.next_poll = done + self._stride
        return now >= self._due

    def is_due(self) -> bool:
        """Whether to paint now, asked outside the count of steps."""
        return self.clock() >= self._due

    @contextmanager
    def painting(self) -> Iterator[None]:
        """Measure the time of the paint inside, and delay the next paint accordingly."""
        start = self.clock()
        try:
            yield
        finally:
            end = self.clock()
            self._costs.append(end - start)
            cost = median(self._costs)
            pause = min(cost / _SHARE_OF_TIME, max(_LONGEST_PAUSE_S, cost * _LEAST_PAUSES))
            self._due = end + max(self._interval, pause)
            self._last_time = end


class StdoutWriter(Writer):
    """Prints the summaries it is given, such as one line an epoch, and no single record.

    The line of an epoch is a row of a table on a terminal, and `key=value` pairs elsewhere.

    `stream` defaults to the `sys.stdout` at the time of a line; it is borrowed and never closed. A stream that is gone
    (`train.py | head`) does not end the training.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._table = EpochTable()

    def write(self, records: Sequence[Record]) -> None:
        """Nothing is printed for single records."""

    def text(self, line: str) -> None:
        """Print `line`."""
        stream = QuietStream(self._stream if self._stream is not None else sys.stdout)
        if isinstance(line, EpochLine) and stream.isatty():
            line = "\n".join(self._table.rows(line, stream.columns))
        stream.line(line)


class LoggingWriter(Writer):
    """Passes metrics and summaries at the level INFO to the logger "trainstack.metrics", for handlers of the program.

    The log record of metrics has them as attributes, which formatters for JSON write as fields: `metrics`, values by
    name, `step` and `epoch`. A summary, such as the plan or the line of an epoch, is a message without them.
    """

    _logger = logging.getLogger("trainstack.metrics")

    def write(self, records: Sequence[Record]) -> None:
        """Log one message for the records of each step."""
        values = dict[tuple[int, int], dict[str, float]]()
        for record in records:
            values.setdefault((record.step, record.epoch), {})[record.name] = record.value
        for (step, epoch), metrics in values.items():
            text = " ".join([f"step={step}", *(f"{name}={value:.4g}" for name, value in metrics.items())])
            self._logger.info("%s", text, extra={"metrics": metrics, "step": step, "epoch": epoch})

    def text(self, line: str) -> None:
        """Log `line`."""
        self._logger.info("%s", line)
