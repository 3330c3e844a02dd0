"""A small training that logs all kinds of values, for the scripts of this folder."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

STEPS = 8  # two epochs of four


class Line(ts.SupervisedModule):
    """Fits a line. Logs an image, a text and a table at the end of each epoch, and raises `crash` after step 6."""

    def __init__(self, crash: BaseException | None = None) -> None:
        inputs = torch.linspace(-1, 1, 32).unsqueeze(1)
        super().__init__(nn.Linear(1, 1), nn.MSELoss(), "sgd", TensorDataset(inputs, 2 * inputs))
        self.hyperparameters = {"width": 1}
        self.crash = crash

    def on_end_train_step(self, global_step: int) -> None:
        """Raise the requested error."""
        if self.crash is not None and global_step == 6:
            raise self.crash

    def on_end_train_epoch(self, global_step: int) -> None:
        """Log a value other than a number."""
        self.log_image("media/ramp", torch.linspace(0, 1, 48).reshape(1, 6, 8))
        self.log_text("media/note", f"after step {global_step}")
        self.log_table("media/table", {"step": [global_step], "weight": [self.model.weight.item()]})


def run(folder: Path, *writers: Any, crash: BaseException | None = None, **changes: Any) -> ts.Trainer:
    """Train two epochs of four steps; a requested exception ends the training and is caught.

    Raises:
        AssertionError: a writer has failed.
    """
    given = {"epochs": 2, "train_batch_size": 8, "log_every": 1, "progress": "none", "output_dir": folder}
    trainer = ts.Trainer(Line(crash), ts.TrainerArguments(writers=list(writers), **given | changes))
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainstack").addHandler(listener)
    try:
        with contextlib.suppress(KeyboardInterrupt if isinstance(crash, KeyboardInterrupt) else RuntimeError):
            trainer.train()
    finally:
        logging.getLogger("trainstack").removeHandler(listener)
    failures = [message for message in said if "This writer gets nothing more" in message]
    assert not failures, failures
    return trainer


def losses(trainer: ts.Trainer) -> list[tuple[int, float]]:
    """Step and training loss of each step in the history."""
    return [(record.step, record.value) for record in trainer.history.records("train/loss")]


def close(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    """Whether both have the same steps, and values equal up to float32."""
    same_steps = [step for step, _ in found] == [step for step, _ in wanted]
    return same_steps and all(abs(a - b) < 1e-6 for (_, a), (_, b) in zip(found, wanted, strict=True))
