"""What the writers for tracking services have in common."""

from __future__ import annotations

import importlib.util
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from trainstack.checkpointing import smallfile
from trainstack.errors import MissingExtraError, annotate
from trainstack.trainer.history import Record
from trainstack.trainer.logs import RunLogger
from trainstack.trainer.writers.base import RunInfo, Writer


class Tracker(Writer):
    """Sends records to a run of a tracking service, and continues that run on resume.

    What identifies the run is kept in `log_dir/<extra>-run.json`; without that file, or where it cannot be
    understood, a resumed training begins a new run. A service cannot take points back: those of steps that a crash has
    made the training run again come twice.
    """

    slow = True
    package: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self) -> None:
        """Raises MissingExtraError without the package; it is imported when the run begins."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb leaves behind, is no package
            raise MissingExtraError(f"the writer {self.extra!r}", self.package, self.extra)

    def open(self, run: RunInfo) -> None:
        """Begin a run, or go on with the one that the resumed training belongs to."""
        file = run.log_dir / f"{self.extra}-run.json"
        known = _read(file) if run.resume_step is not None else None
        try:
            told = self.start(run, known)
        except Exception as error:
            if known is not None:
                annotate(error, f"this would have gone on with run {known!r}; delete {file} to begin a new one")
            raise
        run.log_dir.mkdir(parents=True, exist_ok=True)
        smallfile.replace(file, f"{json.dumps({'run': told})}\n".encode())

    @abstractmethod
    def start(self, run: RunInfo, known: str | None) -> str:
        """Begin a run, or continue the run `known`; returns by what it will be known."""


def by_step(records: Sequence[Record]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Step, epoch and values by name, in order; a metric recorded twice at a step has its last value there."""
    for (step, epoch), group in groupby(records, key=lambda record: (record.step, record.epoch)):
        yield step, epoch, {record.name: record.value for record in group}


def _read(file: Path) -> str | None:
    try:
        run = json.loads(file.read_bytes())["run"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        run = None
    if not isinstance(run, str):
        RunLogger().warning(f"{file} does not say which run to go on with: a new run begins there.")
        return None
    return run
