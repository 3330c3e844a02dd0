"""The list of cases. Each is a function that runs one test of a trainer and returns the result."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.conformance import cases
from tools.conformance.adapter import Adapter, Verdict

ORDER = ("accumulation", "resume", "validation", "evaluation", "failures", "checkpoints", "schedules", "randomness")


@dataclass(frozen=True)
class Case:
    """One row of the table; `run(adapter, name, folder)` returns its cell."""

    id: str
    title: str
    demand: str
    run: Callable[[Adapter, str, Path], Verdict]


_FOUND: list[Case] = []


def case(title: str) -> Callable[[Callable[[Adapter, str, Path], Verdict]], Callable[[Adapter, str, Path], Verdict]]:
    """Add a function to the list; its docstring is the requirement."""

    def add(run: Callable[[Adapter, str, Path], Verdict]) -> Callable[[Adapter, str, Path], Verdict]:
        _FOUND.append(Case(run.__name__, title, " ".join((run.__doc__ or "").split()), run))
        return run

    return add


def all_cases() -> list[Case]:
    """Every case of every file in `cases/`, in the order of the table."""
    names = {module.name for module in pkgutil.iter_modules(cases.__path__)}
    for name in (*ORDER, *sorted(names - set(ORDER))):
        importlib.import_module(f"tools.conformance.cases.{name}")
    return list(_FOUND)


def passed() -> Verdict:
    """The cell of a trainer that meets the requirement."""
    return Verdict("pass")


def wrong(seen: str) -> Verdict:
    """The cell of a trainer that does not meet it."""
    return Verdict("wrong", " ".join(seen.split()))


def describe(error: BaseException) -> str:
    """An error in one line, without the folders of this machine."""
    text = re.sub(r"/\S*/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
