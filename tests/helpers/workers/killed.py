"""A run whose process is killed at an event."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack import callbacks as cb


def killed(directory: str, at: str = "") -> dict[str, Any]:
    """Averages that begin late, and an epoch that ends early; killed when a checkpoint is safe, or between two of them.

    Returns:
        the weights, which are averages, and the first step.
    """
    ts.seed_everything(0)
    module, steps = Classifier(numbers(32), dropout=0.2), list[int]()
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    args = arguments(directory, epochs=3, train_batch_size=4, resume="auto", checkpointer_args=saving)
    trainer = ts.Trainer(module, args, callbacks=[cb.EMA(0.5, start_step=3, every=2)])

    @trainer.on(ts.Event.CHECKPOINT_SAVED)
    def saved(trainer: ts.Trainer, path: Path) -> None:
        if at == "saved" and path.name == "checkpoint-000000004":
            os.kill(os.getpid(), signal.SIGKILL)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def end(trainer: ts.Trainer, step: int) -> None:
        steps.append(step)
        if step == 5:
            trainer.end_epoch()
        if at == f"step {step}":
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.train()
    return {"weights": weights(module).tolist(), "first": steps[0], "last": steps[-1]}
