"""trainstack with its defaults: clipping at norm 1, lines on standard output, a CSV file, plain progress."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.library import prepare_library
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """All arguments have their defaults, except batch sizes and checkpoints."""
    return prepare_library(task, folder, progress="plain")


CONTENDER = Contender(name="trainstack_default", rank=21, against="raw_clip", prepare=prepare)
