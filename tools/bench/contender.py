"""`Contender`: one way to carry out a task, and where the contenders are found."""

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
"""Carries out a task once and returns the values that must agree: the final weights, or the collected outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to carry out a task.

    Attributes:
        name: as in the table.
        rank: the place in the table.
        against: the name of the hand-written loop that does the same arithmetic: ratios are formed with it, and
            the results must be the same bits. Where that one has no part in a workload, `raw` takes its place.
        prepare: makes model and data ready, given a task and an empty folder to write to. Not timed; the time that it
            returns is.
        kinds: of tasks that it can carry out.
        feeds: ways for batches to reach the loop that it has.
        requires: packages without which it is left out.
    """

    name: str
    rank: int
    against: str
    prepare: Callable[[Task, Path], Run]
    kinds: tuple[str, ...] = ("train", "evaluate")
    feeds: tuple[str, ...] = ("tensors", "loader", "list")
    requires: tuple[str, ...] = ()

    def can_do(self, task: Task) -> bool:
        """Whether it has a part in `task`."""
        return task.kind in self.kinds and task.feed in self.feeds

    @property
    def is_installed(self) -> bool:
        """Whether all packages that it requires are there."""
        return all(importlib.util.find_spec(package) is not None for package in self.requires)


def find_contenders() -> list[Contender]:
    """Every `CONTENDER` in a module of `tools.bench.contenders` whose packages are installed, in the table's order."""
    package = importlib.import_module("tools.bench.contenders")
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = [module.CONTENDER for module in modules if hasattr(module, "CONTENDER")]
    return sorted((contender for contender in found if contender.is_installed), key=lambda c: c.rank)
