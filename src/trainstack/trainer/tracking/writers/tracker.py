"""`Tracker`, the base of the writers for tracking services."""

from __future__ import annotations

import importlib.util
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from trainstack._files import library_error, make_directories, read_small
from trainstack.checkpointing.filesystem import atomic_write
from trainstack.errors import ConfigurationError, MissingExtraError, annotate
from trainstack.trainer.core.logs import RunLogger, flatten
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import RunInfo, Writer

Artifacts = Literal["last", "best", "none"]


class Tracker(Writer):
    """Sends records to a run of a tracking service, and continues that run on resume.

    A run that is open already in this process, such as that of a sweep, is used and not finished. The id of the run is
    kept in `log_dir/<extra>-run.json`; without that file, or where it cannot be understood, a resumed training begins a
    new run. A service cannot take points back: those of steps that a crash has made the training run again come twice.

    Args:
        own_run: make a run even if one is open already.
        artifacts: the checkpoint that is uploaded at the end with the exported model: "last", "best" or "none". A
            run that is interrupted by a signal uploads nothing.
    """

    slow = True
    package: ClassVar[str]
    extra: ClassVar[str]
    artifacts: Artifacts
    _run: Any = None
    _is_borrowed = False

    def __init__(self, *, own_run: bool = False, artifacts: Artifacts = "none") -> None:
        """Raises MissingExtraError without the package; it is imported when the run begins."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb leaves behind, is not a package
            raise MissingExtraError(f"the writer {self.extra!r}", self.package, self.extra)
        if artifacts not in get_args(Artifacts):
            raise ConfigurationError(f"artifacts={artifacts!r}: write 'last', 'best' or 'none'.")
        self._own_run, self.artifacts = own_run, artifacts
        self._status: tuple[str, str | None] = ("finished", None)

    def open(self, run: RunInfo) -> None:
        """Begin a run, use one that is open, or continue the one that the resumed training belongs to.

        Raises:
            ConfigurationError: the training belongs to another run than the one that is open.
        """
        file = run.log_dir / f"{self.extra}-run.json"
        known = _read(file) if run.resume_step is not None else None
        found = None if self._own_run else self.find_open()
        self._is_borrowed, self._status = found is not None, ("finished", None)
        try:
            run_name = self.start(run, known) if found is None else self.adopt(found, run)
        except Exception as error:
            if known is not None:
                annotate(error, f"this would have continued run {known!r}; delete {file} to begin a new one")
            raise
        if found is not None and known not in (None, run_name):
            raise ConfigurationError(
                f"the training that is resumed was logged to the {self.extra} run {known!r}, and the run {run_name!r} "
                f"is open. Finish the open run to continue {known!r}, write own_run=True, or delete {file} to use "
                "the open run."
            )
        if run_name:
            with library_error(file):
                make_directories(run.log_dir)
                atomic_write(file, f"{json.dumps({'run': run_name})}\n".encode())

    def find_open(self) -> Any:
        """A run that the user's code has opened in this process; None if there is none."""
        return None

    @abstractmethod
    def start(self, run: RunInfo, known: str | None) -> str:
        """Begin a run, or continue the run `known`; returns its name for a resume, "" if nothing can be continued."""

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Use the open run `found`; returns its name for a resume."""
        raise NotImplementedError

    def end(self, status: str, reason: str | None) -> None:
        """Keep the status, for `close`."""
        self._status = status, reason

    def close(self) -> None:
        """Finish the run with its status: pending records are sent. A run that was open before stays open."""
        run, self._run = self._run, None
        if run is not None and not self._is_borrowed:
            self.finish(run, *self._status)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Finish `run`; see `Writer.end`."""
        run.finish()

    @property
    def has_failed(self) -> bool:
        """Whether the run ends by a signal or an exception."""
        return self._status[0] in ("interrupted", "failed")


def by_step(records: Sequence[Record]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Step, epoch and values by name, in order; a metric recorded twice at a step has its last value there."""
    for (step, epoch), group in groupby(records, key=lambda record: (record.step, record.epoch)):
        yield step, epoch, {record.name: record.value for record in group}


def parameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """All values of `config` by dotted names; lists and None as JSON."""
    plain = (bool, int, float, str)
    return {name: value if isinstance(value, plain) else json.dumps(value) for name, value in flatten(config)}


def _read(file: Path) -> str | None:
    try:
        run = json.loads(read_small(file))["run"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        run = None
    if not isinstance(run, str):
        RunLogger().warning(f"{file} does not say which run to continue: a new run begins there.")
        return None
    return run
