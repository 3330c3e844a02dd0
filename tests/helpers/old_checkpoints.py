"""The run whose checkpoints of format version 1 are kept as fixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments

FOLDER = Path(__file__).parent.parent / "contract" / "checkpoints"
STOP_AT = 4
"""Within the first of two epochs of six steps."""


def run(spec: str, directory: Path, *, stop_at: int | None = None, **changes: Any) -> ts.Trainer:
    """Train a model with dropout, augmentation, a scheduler and validation, so that every kind of state is saved."""
    module = Classifier(Noisy(), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=STOP_AT, keep_last=None)
    sizes: dict[str, Any] = {"epochs": 2, "train_batch_size": 8, "gpu_batch_size_limit": 4}
    trainer = ts.Trainer(module, arguments(directory, backend=spec, checkpointer_args=saving, **sizes, **changes))

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def stop(trainer: ts.Trainer) -> None:
        if trainer.global_steps_finished == stop_at:
            trainer.request_stop("the checkpoint is written")

    trainer.train()
    return trainer
