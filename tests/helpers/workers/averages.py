"""A run with the mean of the weights at the end of epochs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR
from torch.optim.swa_utils import SWALR, update_bn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack import callbacks as cb

START = 1
"""Epochs before the first that counts."""


class Normalized(Classifier):
    """A network with batch norm, and a learning rate that becomes constant where averaging begins."""

    epochs = 4
    stop_at = 0

    def __init__(self) -> None:
        super().__init__(numbers(12, dtype=torch.float64), dtype=torch.float64)
        self.net.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))
        self.order: list[int] = []
        self.rates: list[float] = []

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        early, late = CosineAnnealingLR(self.optimizer, self.epochs), SWALR(self.optimizer, 0.05, anneal_epochs=2)
        schedule = SequentialLR(self.optimizer, [early, late], milestones=[START])
        return self.optimizer, ts.SchedulerConfig(schedule, interval="epoch")

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise RuntimeError("lost")
        every = self.dataset.tensors[0]
        self.order += [int((every == row).all(1).nonzero()) for row in batch[0]]
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return super().train_step(global_step, batch, device)


def loader() -> DataLoader[Any]:
    """The data of the statistics."""
    return DataLoader(numbers(12, dtype=torch.float64), 5)


def averaged(
    directory: str, epochs: int, stop_at: int = 0, more: int = 0, backend: str = "sp", **changes: Any
) -> dict[str, Any]:
    """Train, or continue; the weights of the network at the end."""
    module = Normalized()
    module.stop_at = stop_at
    ema = cb.EMA(
        None,
        every="epoch",
        start_epoch=START,
        update_bn=lambda: update_bn(loader(), module.net),  # as users write it
    )
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    kept: dict[str, Any] = {"resume": "auto", "checkpointer_args": saving} if directory != "unused" else {}
    args = arguments(directory, epochs=epochs, train_batch_size=4, backend=backend, **kept, **changes)
    trainer = ts.Trainer(module, args, callbacks=[ema])
    trainer.train()
    if more:
        trainer.train(epochs=more)
    state = {name: value.tolist() for name, value in module.net.state_dict().items()}
    return {"state": state, "rates": module.rates, "updates": ema.updates}
