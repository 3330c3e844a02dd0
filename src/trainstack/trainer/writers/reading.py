"""Reading back what a run has written."""

from __future__ import annotations

from itertools import chain
from os import PathLike
from pathlib import Path

from trainstack.errors import ConfigurationError
from trainstack.trainer.history import RunHistory
from trainstack.trainer.writers.csv import CsvFormat
from trainstack.trainer.writers.jsonl import JsonLinesFormat
from trainstack.trainer.writers.rows import RowFormat

_FORMATS: dict[str, RowFormat] = {".csv": CsvFormat(), ".jsonl": JsonLinesFormat()}


def read_history(path: str | PathLike[str]) -> RunHistory:
    """The records in a `metrics.csv` or `metrics.jsonl`, or in a folder that has one of them, as a history.

    A row that a crash left half written, or that somebody wrote in by hand, is passed over.

    Raises:
        ConfigurationError: there is no such file, or it is of another format.
    """
    file = _file(Path(path))
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
        found = [path / f"metrics{suffix}" for suffix in _FORMATS if (path / f"metrics{suffix}").is_file()]
        if not found:
            raise ConfigurationError(f"the folder {path} has neither metrics.csv nor metrics.jsonl in it.")
        return found[0]
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}; name a metrics.csv or metrics.jsonl, or its folder.")
    return path
