"""The plain loop with a fused optimizer and channels last."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.handwritten import prepare_handwritten
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """The tuned plain loop."""
    return prepare_handwritten(task, tuned=True)


CONTENDER = Contender(name="raw_tuned", rank=11, against="raw_tuned", prepare=prepare, kinds=("tuned",))
