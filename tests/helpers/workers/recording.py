"""Runs of two ranks whose steps are recorded."""

from __future__ import annotations

from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train


def recorded(directory: str, backend: str = "ddp", dropout: float = 0.2, **changes: Any) -> int:
    """Train 2 epochs of 4 steps on 24 samples in batches of 6, of which each rank has 3; the global steps."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=None)
    made = {"train_batch_size": 6, "epochs": 2, "log_every": 2, "checkpointer_args": saving, **changes}
    trainer = train(
        Classifier(numbers(24), dropout=dropout, optimizer=torch.optim.Adam), directory, backend=backend, **made
    )
    return trainer.state.global_step
