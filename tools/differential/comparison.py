"""`run_case` runs a case on both sides and compares the results."""

from __future__ import annotations

import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.differential.case import Case
from tools.differential.datasets import collate_map
from tools.differential.library import LibraryRun
from tools.differential.plain import PlainLoop
from tools.differential.task import Task
from tools.differential.trace import bits_of
from trainstack.errors import ModuleContractError


@dataclass
class Outcome:
    """The result of a side.

    Attributes:
        state: weights, buffers, optimizers, schedulers and random numbers by name.
        calls: the calls of user code, in order.
        log: the logged values by name.
        error, traceback: the exception that ended the run; None without one.
    """

    state: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    log: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    traceback: str = ""


Side = Callable[[Case, Task], Any]


def outcome(case: Case, make: Side, rank: int = 0) -> Outcome:
    """Run a side on a new task. All begin with the same random numbers, except ranks of a case with `unlike_start`."""
    seed = case.number + (1000 * rank if case.unlike_start else 0)
    torch.manual_seed(seed), np.random.seed(seed % 2**32), random.seed(seed)
    found = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about schedulers that step first, after a skipped step
        task = Task(case, rank)
        try:
            with collate_map(case, task.trace):
                side = make(case, task)
                side.run()
            found.state = task.state(side.schedulers) | {f"counter {name}": n for name, n in side.counters.items()}
            found.log = side.log.columns if isinstance(side, PlainLoop) else side.history
        except Exception as error:
            found.error, found.traceback = error, traceback.format_exc()
    found.calls = task.trace.entries
    return found


def run_case(case: Case) -> list[str]:
    """Run `case` on both sides; returns the differences."""
    with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
        library = outcome(case, lambda case, task: LibraryRun(case, task, Path(folder)))
    plain = outcome(case, PlainLoop)
    if plain.error is not None:
        return [f"the plain loop failed:\n{plain.traceback}"]
    if library.error is not None:
        return [] if may_refuse(case, library.error) else [f"the library failed:\n{library.traceback}"]
    return [*_calls(case, plain, library), *_logs(case, plain, library), *_states(plain, library)]


def may_refuse(case: Case, error: Exception) -> bool:
    """Whether `error`, about a mistake of user code, is a valid result of the case."""
    if not isinstance(error, ModuleContractError):
        return False
    writes = {"write outputs", "log, then write"} & case.deeds or case.loss_memory == "kept by the user"
    written = bool(writes or case.val_memory) and "in place" in str(error)
    deeds = {"add a parameter outside the module", "remove a layer from the module alone"}
    outside = bool(deeds & case.deeds) and "parameters that the module does not have" in str(error)
    return written or outside


def _states(plain: Outcome, library: Outcome) -> list[str]:
    return _unlike("", plain.state, library.state)


def _logs(case: Case, plain: Outcome, library: Outcome) -> list[str]:
    logs = (
        {name: bits_of(c) for name, c in side.log.items() if _column(name) not in case.uncompared}
        for side in (plain, library)
    )
    return _unlike("log ", *logs)


def _column(name: str) -> str:
    return "lr" if name.startswith("lr/") else name


def _unlike(prefix: str, plain: Mapping[str, Any], library: Mapping[str, Any]) -> list[str]:
    found = []
    for name in sorted({*plain, *library}):
        mine, theirs = plain.get(name, "nothing"), library.get(name, "nothing")
        if mine != theirs:
            found.append(f"{prefix}{name}: plain {_shortened(mine)}, library {_shortened(theirs)}")
    return found


def _calls(case: Case, plain: Outcome, library: Outcome) -> list[str]:
    """The first different call."""
    if case.raises is not None:
        return _calls_after_raising(case, plain, library)
    mine, theirs = ([_compared(case, call) for call in side.calls] for side in (plain, library))
    if case.workers:  # calls of a worker are not visible here
        mine, theirs = ([call for call in calls if call[0] != "data"] for calls in (mine, theirs))
    if "order of loading" not in case.uncompared:
        return _first_unlike("call", mine, theirs)
    found = []
    for kind, chosen in (("call of data", True), ("call", False)):
        found += _first_unlike(kind, *([c for c in calls if (c[0] == "data") is chosen] for calls in (mine, theirs)))
    return found


def _compared(case: Case, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call, without values that are not compared."""
    if call[1] != "validation_end":
        return call
    return (*call[:2], {name: value for name, value in call[2].items() if _column(name) not in case.uncompared})


def _calls_after_raising(case: Case, plain: Outcome, library: Outcome) -> list[str]:
    """The arguments of the hooks of a step or an epoch, for any number of calls."""
    assert case.raises is not None
    last: list[dict[Any, Any]] = [{}, {}]
    for calls, kept in zip((plain.calls, library.calls), last, strict=True):
        for kind, name, *given in calls:
            if kind == "reached" and name.startswith("on_end_train_") and name != case.raises[0]:
                kept[f"{name} at step {given[0]}"] = given[1:]
    return _unlike("", *last)


def _first_unlike(kind: str, plain: list[Any], library: list[Any]) -> list[str]:
    for position in range(max(len(plain), len(library))):
        pair = [calls[position] if position < len(calls) else None for calls in (plain, library)]
        if pair[0] != pair[1]:
            before = "; ".join(f"{call[0]} {call[1]}" for call in plain[max(0, position - 3) : position])
            mine, theirs = map(_shortened, pair)
            return [f"{kind} {position} (after {before or 'none'}): plain {mine}, library {theirs}"]
    return []


def _shortened(value: Any, most: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
