"""The line about an epoch: key=value in a log, a row of an aligned table on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

_HEADER_EVERY = 40
"""Rows: about a screen."""
_NUMBER_WIDTH = 10
"""Of a number below 100,000 with four digits after the point."""


class EpochLine(str):
    """The line itself, as logs have it, with its parts.

    Args:
        epoch: such as "3/8".
        step: global steps trained.
        values: measured values by the name of the metric, in the order of the columns.
        seconds: of wall-clock time that the epoch took.
        best: the name whose value is the best so far; None for none.
        elsewhere: the place of the values for which a table has no room.
    """

    epoch: str
    step: int
    values: Mapping[str, float]
    seconds: float
    best: str | None
    elsewhere: str

    def __new__(
        cls, *, epoch: str, step: int, values: Mapping[str, float], seconds: float, best: str | None, elsewhere: str
    ) -> EpochLine:
        """Make the text, and keep its parts."""
        shown = [f"{name}={value:.4g}" for name, value in values.items()]
        line = super().__new__(cls, " ".join([f"epoch={epoch}", f"step={step}", *shown, f"seconds={seconds:.1f}"]))
        line.epoch, line.step, line.values, line.seconds = epoch, step, values, seconds
        line.best, line.elsewhere = best, elsewhere
        return line


class _Columns(NamedTuple):
    """The columns of a table around its metrics, and the note on metrics that do not fit."""

    step: bool
    note: str

    def widths(self, line: EpochLine) -> int:
        """Of these columns, each with the blank between it and the next."""
        return _epoch_width(line) + _STEP_WIDTH * self.step + _TIME_WIDTH


_STEP_WIDTH, _TIME_WIDTH = 8, 9
_LAYOUTS = (_Columns(True, "  +{count} in {place}"), _Columns(True, " +{count}"), _Columns(False, ""))
"""The first one with room for `_FEWEST` metrics is used."""
_FEWEST = 2


class EpochTable:
    """Prints epoch lines as rows of one table with as many metrics as fit; the header has the number of the others.

    A narrow terminal gets the number of the others without the name of their file, and a very narrow one no steps.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._width = self._rows = 0

    def rows(self, line: EpochLine, width: int) -> list[str]:
        """The row of `line` in `width` columns of a terminal, below a header if the columns have changed."""
        changed = width != self._width or not self._names.keys() >= line.values.keys()
        self._names |= dict.fromkeys(line.values)
        self._width = width
        has_header = changed or self._rows % _HEADER_EVERY == 0
        self._rows = 1 if changed else self._rows + 1
        columns, names, note = self._fitting(line, width)
        header, row = [f"{'epoch':>{_epoch_width(line)}}"], [f"{line.epoch:>{_epoch_width(line)}}"]
        if columns.step:
            header, row = [*header, f"{'step':>7}"], [*row, f"{line.step:>7}"]
        header, row = [*header, *map(_header, names)], [*row, *(_cell(line, name) for name in names)]
        header, row = [*header, f"{'time':>8}{note}"], [*row, f"{line.seconds:.1f} s".rjust(8)]
        return [" ".join(cells).rstrip() for cells in ([header, row] if has_header else [row])]

    def _fitting(self, line: EpochLine, width: int) -> tuple[_Columns, list[str], str]:
        """The columns around the metrics, the metrics that fit, and the note on the others."""
        names = list(self._names)
        for columns in _LAYOUTS:
            for count in range(len(names), -1, -1):
                more = len(names) - count
                note = columns.note.format(count=more, place=line.elsewhere) if more else ""
                taken = columns.widths(line) + sum(len(_header(name)) + 1 for name in names[:count]) + len(note)
                if taken <= width:
                    break
            if count >= min(_FEWEST, len(names)):
                break
        return columns, names[:count], note


def _epoch_width(line: EpochLine) -> int:
    epochs = line.epoch.rpartition("/")[2]
    return max(5, 2 * len(epochs) + 1)


def _header(name: str) -> str:
    return f"{name:>{_NUMBER_WIDTH}} "


def _cell(line: EpochLine, name: str) -> str:
    """A value under its header, with an asterisk where it is the best so far; a blank cell where there is none."""
    width = len(_header(name)) - 1
    if name not in line.values:
        return " " * (width + 1)
    return f"{_fixed(line.values[name]):>{width}}" + ("*" if name == line.best else " ")


def _fixed(value: float) -> str:
    """`value` with the same number of digits after the point as its neighbours above and below."""
    is_plain = value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e5
    return f"{value:.4f}" if is_plain else f"{value:.3e}"
