"""`run.json`, the facts of a run except its metrics."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainstack._files import atomic_write, make_directories, read_small
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
        reason: the reason why it did not finish, if it is known.
        seconds: its duration.
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
        backend, device: of the run.
        private: whether the training loss is not shown, because the run is private and adds no noise to it.
        monitor: the metric that tells how good the weights are.
        arguments: `TrainerArguments.to_dict()`.
        plan: rows of (label, value).
        stack: the text of `explain`.
        model: rows of (submodule, class, parameters, those of them that are trained).
        environment: rows of (label, version or name).
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
        """Read the result of `write`.

        Raises:
            FileNotFoundError: there is no `run.json` in `directory`.
            ConfigurationError: it is something else.
        """
        file = directory / FILE_NAME
        try:
            values: dict[str, Any] = json.loads(read_small(file, _MOST_BYTES))
            if values.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            sessions = tuple(_session(entry) for entry in values.pop("sessions"))
            values |= {name: tuple(map(tuple, values[name])) for name in ("plan", "model", "environment")}
            return _checked(cls(**values, sessions=sessions))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            why = " ".join(str(getattr(error, "strerror", None) or error).split())[:_LONGEST_REASON]
            raise ConfigurationError(f"{file} is not the file of a run: {why}. Delete it.") from error


_MOST_BYTES = 1 << 28
"""A session has about 100 kB in it."""

_LONGEST_REASON = 200
_MOST_STEPS = 1 << 63
_LAST_TIME = 253_370_764_800.0
"""Seconds from 1970 to the year 9999, in any time zone."""


def _session(entry: Mapping[str, Any]) -> Session:
    made = Session(**{**entry, "samples": tuple(map(tuple, entry["samples"]))})
    numbers = [made.began, 0.0 if made.seconds is None else made.seconds]
    steps = [made.first_step, 0 if made.last_step is None else made.last_step]
    for step, seconds, *memory in made.samples:
        steps.append(step)
        numbers += [seconds, *(0.0 if one is None else one for one in memory)]
        if len(memory) != 2:  # of the host and of the device
            raise ValueError("a sample has not four values")
    if not all(type(step) is int and 0 <= step < _MOST_STEPS for step in steps):
        raise ValueError("a step is not a count")
    if not all(type(one) in (int, float) and abs(one) < _LAST_TIME for one in numbers):  # not nan either
        raise ValueError("a time or a size is not a valid number")
    if not isinstance(made.status, str) or not isinstance(made.reason, str | None):
        raise ValueError("a status or a reason is not a text")
    return made


_DEEPEST = 40


def _is_deep(values: Any) -> bool:
    """Whether values are nested so deeply that functions that follow them would fail."""
    level, depth = [values], 0
    while level and depth <= _DEEPEST:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level, depth = [value for one in inner for value in one], depth + 1
    return bool(level)


def _checked(facts: RunFacts) -> RunFacts:
    """`facts`, if all values are of the types that the page expects.

    Raises:
        ValueError: something is not.
    """
    texts = [facts.name, facts.backend, facts.device, facts.monitor, facts.stack, facts.checkpoints or ""]
    texts += [facts.privacy or "", *(text for row in (*facts.plan, *facts.environment) for text in row)]
    if not all(isinstance(text, str) for text in texts) or not isinstance(facts.private, bool):
        raise ValueError("a fact is not a text")
    if (
        not isinstance(facts.arguments, dict)
        or _is_deep(facts.arguments)
        or any(len(row) != 2 for row in (*facts.plan, *facts.environment))
    ):
        raise ValueError("the arguments, the plan or the environment have another form")
    for row in facts.model:
        if len(row) != 4 or [type(cell) for cell in row] != [str, str, int, int] or max(row[2:]) >= _MOST_STEPS:
            raise ValueError("a part of the model has another form")
    if "\0" in (facts.checkpoints or ""):
        raise ValueError("the folder of checkpoints cannot be one")
    return facts


def record_interruption(directory: Path, name: str, reason: str) -> None:
    """Add a session that a signal ended before its first step, so that the newest session says how the job ended.

    Args:
        directory: of the logs.
        name: of the module's class, where the run has left nothing yet.
        reason: of its end.

    Raises:
        ConfigurationError: `run.json` is there and was not written by a run.
    """
    try:
        facts = RunFacts.read(directory)
    except FileNotFoundError:
        facts = RunFacts(name=name)
        make_directories(directory)
    step = (facts.sessions[-1].last_step if facts.sessions else None) or 0
    ended = Session(
        began=time.time(), first_step=step, status="interrupted", reason=reason, seconds=0.0, last_step=step
    )
    replace(facts, sessions=(*facts.sessions, ended)).write(directory)


def replace_file(path: Path, text: str) -> None:
    """Write `path` in UTF-8, such that a reader sees the old text or the new one."""
    atomic_write(path, text.encode("utf-8", "backslashreplace"))
