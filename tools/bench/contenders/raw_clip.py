"""`raw` with `torch.nn.utils.clip_grad_norm_(..., 1.0)` between backward and step."""

from __future__ import annotations

from pathlib import Path

from tools.bench.contender import Contender, Run
from tools.bench.handwritten import prepare_handwritten
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """The plain loop with clipping."""
    return prepare_handwritten(task, max_norm=1.0)


CONTENDER = Contender(name="raw_clip", rank=10, against="raw_clip", prepare=prepare, kinds=("train",))
