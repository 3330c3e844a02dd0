"""trainstack with minimal options: no clipping, no writers, no bar."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.library import prepare_library
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """The arithmetic of `raw`."""
    return prepare_library(task, folder, clip_grads=False, writers=(), progress="none")


CONTENDER = Contender(name="trainstack_lean", rank=20, against="raw", prepare=prepare)
