"""trainstack with its defaults, a bar on a terminal, TensorBoard, and a hook after each step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tools.bench.contender import Contender, Run
from tools.bench.library import TaskModule, prepare_library
from tools.bench.task import Task


class HookedModule(TaskModule):
    """Counts its steps; gets the collected outputs of an evaluation."""

    steps_seen = 0

    def on_end_train_step(self, global_step: int) -> None:
        self.__dict__["steps_seen"] = global_step

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs: Any, key: str = "default") -> None:
        self.rows_seen = len(val_step_collated_outputs[0])


def prepare(task: Task, folder: Path) -> Run:
    """A training with all options for observing a run."""
    return prepare_full(task, folder)


def prepare_full(task: Task, folder: Path, **options: Any) -> Run:
    """The same with further trainer arguments `options`."""
    writers = ["stdout", "csv", *(["tensorboard"] if importlib.util.find_spec("tensorboard") else [])]
    watched = {"on_terminal": True, "writers": writers, "progress": "rich"}
    return prepare_library(task, folder, module=HookedModule(task), **watched, **options)


CONTENDER = Contender(name="trainstack_full", rank=22, against="raw_clip", prepare=prepare)
