"""The killed training: saves take a large part of its time, so that many kills hit them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts

SAMPLES, BATCH, WIDTH = 400, 16, 384
STEPS_PER_EPOCH = SAMPLES // BATCH


class Heavy(ts.ModuleInterface):
    """A module with little computation and large saves: 300,000 parameters with Adam, dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.ReLU(),
            nn.Linear(2 * WIDTH, 2),
        )
        inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = estimated_global_steps_per_epoch * epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def call_in(place: Path, backend: str, async_save: bool) -> bytes:
    """A training of `Heavy` in `place`, for `TrialSetup`: 3 epochs of 25 steps, saved after every third step."""
    args = ts.TrainerArguments(
        epochs=3,
        train_batch_size=BATCH,
        val_batch_size=100,
        backend=backend,
        device="cpu",
        log_every=10,
        resume="auto",
        output_dir=str(place),
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=3, async_save=async_save),
        writers=[],
        progress="none",
    )
    return pickle.dumps((Heavy, (args,)))
