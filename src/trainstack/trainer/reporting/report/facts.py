"""`run.json`, the facts of a run besides its metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstack._files import atomic_write
from trainstack.errors import ConfigurationError

FILE_NAME = "run.json"
REPORT_NAME = "report.html"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One call of `Trainer.train`.

    Attributes:
        began: seconds since 1970.
        first_step: global steps that were made before it.
        status: "finished", "stopped", "interrupted", "failed", or "running" until it has ended; so also for a process
            that was killed.
        reason: why it did not finish, if that is known.
        seconds: how long it took.
        last_step: global steps that were made when it ended.
        samples: at log points (global step, seconds since `began`, GiB of the host, GiB of the device or None), where
            memory is the most that was in use so far.
    """

    began: float
    first_step: int = 0
    status: str = "running"
    reason: str | None = None
    seconds: float | None = None
    last_step: int | None = None
    samples: tuple[tuple[int, float, float | None, float | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run in values that JSON has.

    Attributes:
        name: of the module's class.
        backend, device: what it runs on.
        private: whether the stack has a privacy layer: then the training loss is not shown.
        monitor: the metric that tells how good the weights are.
        arguments: `TrainerArguments.to_dict()`.
        plan: rows of (what, value).
        stack: the text of `explain`.
        model: rows of (submodule, class, parameters, those of them that are trained).
        environment: rows of (what, version or name).
        checkpoints: the folder of checkpoints; None if the run has none.
        sessions: from the first to the newest.
        privacy: the privacy statement in words, once one was made.
    """

    name: str
    backend: str = ""
    device: str = ""
    private: bool = False
    monitor: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plan: tuple[tuple[str, str], ...] = ()
    stack: str = ""
    model: tuple[tuple[str, str, int, int], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    checkpoints: str | None = None
    sessions: tuple[Session, ...] = ()
    privacy: str | None = None

    def write(self, directory: Path) -> None:
        """Write `run.json` in `directory`, whole or not at all."""
        values = {"format": FORMAT, **dataclasses.asdict(self)}
        replace_file(directory / FILE_NAME, json.dumps(values, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> RunFacts:
        """What `write` wrote.

        Raises:
            FileNotFoundError: there is no `run.json` in `directory`.
            ConfigurationError: it is something else.
        """
        file = directory / FILE_NAME
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            sessions = tuple(
                Session(**{**s, "samples": tuple(map(tuple, s["samples"]))}) for s in values.pop("sessions")
            )
            values |= {name: tuple(map(tuple, values[name])) for name in ("plan", "model", "environment")}
            return cls(**values, sessions=sessions)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{file} is not what a run has written: {error}. Delete it.") from error


def replace_file(path: Path, text: str) -> None:
    """Write `path` in UTF-8, such that a reader sees the old text or the new one."""
    atomic_write(path, text.encode("utf-8", "backslashreplace"))
