"""A micro-batch that is fitted to the memory of several processes."""

from __future__ import annotations

from typing import Any

import torch

import trainstack as ts
from tests.helpers.modules import arguments, weights
from tests.helpers.workers import RANK
from tests.helpers.workers.training import Uneven


def hungry(directory: str) -> dict[str, Any]:
    """The second process has memory for two samples a forward pass, the first for more."""
    sizes: list[int] = []

    class Hungry(Uneven):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            sizes.append(len(batch[0]))
            if len(batch[0]) > (2 if RANK else 4):
                raise torch.OutOfMemoryError("no memory for so many")
            return super().train_step(global_step, batch, device)

    module = Hungry()
    trainer = ts.Trainer(module, arguments(directory, backend="ddp", train_batch_size=12, fit_micro_batch=True))
    trainer.train()
    found = ts.find_lr(trainer, start=1e-3, end=1.0, steps=4)
    return {
        "micro_batch": trainer.plan.micro_batch,
        "sizes": sizes,
        "weights": weights(module).tolist(),
        "rates": [found.rates, found.losses],
    }
