"""`trainstack_full` without clipping, with the arithmetic of `raw`."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.contenders.trainstack_full import prepare_full
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """A training with all options for observing a run."""
    return prepare_full(task, folder, clip_grads=False)


CONTENDER = Contender(name="trainstack_unclipped", rank=23, against="raw", prepare=prepare, kinds=("train",))
