"""Trainings over data sets whose order does not fit into memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainstack as ts
from tests.helpers.modules import arguments, weights


class Virtual(Dataset[Any]):
    """Samples that are made of their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.tensor([index >> shift & 255 for shift in (0, 8, 16, 24)], dtype=torch.float32) / 255
        return x, x.sum(0, keepdim=True), index


class Remembers(ts.ModuleInterface):
    """A linear model that notes the indices of each step.

    Args:
        length: of the data.
        shape: of the loader, "plain", "ordered", "dict" or "subset"; "private" is plain without validation.
    """

    def __init__(self, length: int, shape: str) -> None:
        super().__init__()
        self.data: Any = Virtual(length)
        if shape == "subset":
            self.data = torch.utils.data.Subset(self.data, range(7, length))
        self.shape, self.seen = shape, list[list[int]]()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(4, 1)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        if self.shape == "ordered":
            return DataLoader(self.data, batch_size)
        loader = DataLoader(self.data, batch_size, sampler=sampler(self.data))
        return {"one": loader, "other": DataLoader(Virtual(5), batch_size)} if self.shape == "dict" else loader

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size) if self.shape in ("plain", "ordered") else None

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        x, y, index = batch["one"] if self.shape == "dict" else batch
        self.seen += [[] for _ in range(global_step - len(self.seen))]
        self.seen[-1] += index.tolist()
        return nn.functional.mse_loss(self.net(x), y)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def huge(
    directory: str, length: int = 10**12, steps: int = 3, shape: str = "plain", backend: str = "ddp", **options: Any
) -> dict[str, Any]:
    """Train `steps` steps of 10 samples, in micro-batches of 2, and save after each."""
    module = Remembers(length, shape)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    sizes: dict[str, Any] = {"train_batch_size": 10, "gpu_batch_size_limit": 2, "max_steps": steps}
    sizes |= {"max_val_steps_per_epoch": 2, "combine_loaders": "cycle" if shape == "dict" else None}
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    trainer = ts.Trainer(module, arguments(directory, backend=backend, checkpointer_args=saving, **sizes, **options))
    trainer.train()
    trainer.close()
    return {
        "steps": trainer.global_steps_finished,
        "seen": module.seen,
        "weights": weights(module).tolist(),
        "seconds": time.monotonic() - began,
        "MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024,
    }


def in_parts(directory: str) -> list[dict[str, Any]]:
    """A run of 5 steps, one of 3, and its rest."""
    parts = f"{directory}/parts"
    return [huge(f"{directory}/whole", steps=5), huge(parts), huge(parts, steps=5, resume=True)]
