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
"""The trainers in the order of the table. It does not have the adapter `naive`, which has to fail."""


class NotOfferedError(Exception):
    """The trainer has no feature for the case: the cell is n.a. with the reason."""


@dataclass(frozen=True)
class Verdict:
    """A cell of the table; `seen` is one line."""

    status: Literal["pass", "wrong", "n.a."]
    seen: str = ""


class Adapter(ABC):
    """One trainer: the class `Peer` of a file in `adapters/`.

    Attributes:
        distribution: its name in the package index.
        not_offered: the reason why it does not run a case, by case.
        notes: an explanation of a wrong cell, by case.
    """

    distribution: ClassVar[str]
    not_offered: ClassVar[Mapping[str, str]] = {}
    notes: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def train(self, task: Task) -> None:
        """Run `task` in the documented way of the trainer."""

    @abstractmethod
    def evaluate(self, task: Task) -> float:
        """The mean `score` over `task.validation` in the report of the trainer."""

    @abstractmethod
    def checkpoints(self, folder: Path) -> list[Path]:
        """The checkpoints of a run of `task.save` in `folder`, oldest first."""

    def newest(self, folder: Path) -> Path:
        """The checkpoint from which `resume="newest"` continues."""
        return self.checkpoints(folder)[-1]

    def lacks(self, why: str) -> NoReturn:
        """Raise `NotOfferedError` with the reason."""
        raise NotOfferedError(why)

    @classmethod
    def version(cls) -> str:
        """The installed release."""
        return importlib.metadata.version(cls.distribution)


def load(name: str) -> Adapter:
    """The adapter in `adapters/<name>.py`; imports the trainer only when it is used."""
    adapter: Adapter = importlib.import_module(f"tools.conformance.adapters.{name}").Peer()
    return adapter
