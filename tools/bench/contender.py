"""`Contender` is one way to run a task; `find_contenders` returns all of them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tools.bench.task import Task

Run = Callable[[], Sequence[Tensor]]
"""Runs a task once and returns the values that must agree: the final weights, or the collected outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run a task.

    Attributes:
        name: its name in the table.
        rank: its position in the table.
        against: the name of the hand-written loop with the same arithmetic. Ratios are relative to it, and the results
            must have the same bits. In workloads without this loop it is `raw`.
        prepare: makes model and data from a task and an empty folder; this is not timed. The time of the returned
            function is measured.
        kinds: the kinds of tasks that it can run.
        feeds: the kinds of feeds that it supports.
        requires: the packages that it needs; without them it is omitted.
    """

    name: str
    rank: int
    against: str
    prepare: Callable[[Task, Path], Run]
    kinds: tuple[str, ...] = ("train", "evaluate")
    feeds: tuple[str, ...] = ("tensors", "loader", "list")
    requires: tuple[str, ...] = ()

    def can_do(self, task: Task) -> bool:
        """Whether it can run `task`."""
        return task.kind in self.kinds and task.feed in self.feeds

    @property
    def is_installed(self) -> bool:
        """Whether all required packages are installed."""
        return all(importlib.util.find_spec(package) is not None for package in self.requires)


def find_contenders() -> list[Contender]:
    """Every `CONTENDER` in `tools.bench.contenders` with installed packages, in the order of the table."""
    package = importlib.import_module("tools.bench.contenders")
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = [module.CONTENDER for module in modules if hasattr(module, "CONTENDER")]
    return sorted((contender for contender in found if contender.is_installed), key=lambda c: c.rank)
