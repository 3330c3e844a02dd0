"""The loop that a user writes: zero_grad, forward, backward, step."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.handwritten import prepare_handwritten
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """The plain loop."""
    return prepare_handwritten(task)


CONTENDER = Contender(name="raw", rank=0, against="raw", prepare=prepare, kinds=("train", "tuned", "evaluate"))
