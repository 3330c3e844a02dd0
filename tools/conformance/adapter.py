"""The interface of a trainer for the suite, and the results."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NoReturn

from tools.conformance.task import Task

TRAINERS = ("trainstack", "lightning", "accelerate", "transformers", "ignite", "pytorch_accelerated")
"""In the order of the table. The adapter `naive` is not in it: it is there to fail."""


class NotOfferedError(Exception):
    """The trainer has no feature for the case: the cell says n.a., and why."""


@dataclass(frozen=True)
class Verdict:
    """A cell of the table; `seen` is one line."""

    status: Literal["pass", "wrong", "n.a."]
    seen: str = ""


class Adapter(ABC):
    """One trainer. A file in `adapters/` holds its class under the name `Peer`.

    Attributes:
        distribution: its name in the package index.
        not_offered: why a case is not asked of it, by case.
        notes: an explanation of a wrong cell, by case.
    """

    distribution: ClassVar[str]
    not_offered: ClassVar[Mapping[str, str]] = {}
    notes: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def train(self, task: Task) -> None:
        """Run `task` in the trainer's documented way."""

    @abstractmethod
    def evaluate(self, task: Task) -> float:
        """The mean `score` over `task.validation`, as the trainer reports it."""

    @abstractmethod
    def checkpoints(self, folder: Path) -> list[Path]:
        """The checkpoints that a run of `task.save` left in `folder`, oldest first."""

    def newest(self, folder: Path) -> Path:
        """The one from which `resume="newest"` continues."""
        return self.checkpoints(folder)[-1]

    def lacks(self, why: str) -> NoReturn:
        """Say that the trainer offers no such thing."""
        raise NotOfferedError(why)

    @classmethod
    def version(cls) -> str:
        """The installed release."""
        return importlib.metadata.version(cls.distribution)


def load(name: str) -> Adapter:
    """The adapter in `adapters/<name>.py`; imports the trainer only when it is used."""
    adapter: Adapter = importlib.import_module(f"tools.conformance.adapters.{name}").Peer()
    return adapter
