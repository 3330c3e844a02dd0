"""trainstack with its defaults, channels last and a fused optimizer, and without clipping."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.library import prepare_library
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """The arithmetic of `raw_tuned`."""
    return prepare_library(task, folder, progress="plain", clip_grads=False, channels_last=True)


CONTENDER = Contender(name="trainstack_tuned", rank=24, against="raw_tuned", prepare=prepare, kinds=("tuned",))
