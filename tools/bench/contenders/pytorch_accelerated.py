"""pytorch-accelerated with minimal options: no callbacks, and the loader of the task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.bench.contender import Contender, Run
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """`Trainer.train`, with the loader of the task instead of its default loader."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    model, loader = task.make_model(), task.make_loader()
    from pytorch_accelerated import Trainer  # after the model, because the import draws random numbers

    class Lean(Trainer):  # type: ignore[misc]
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return loader

    def run() -> Sequence[Tensor]:
        optimizer = task.make_optimizer(model.parameters())
        trainer = Lean(model=model, loss_func=task.loss, optimizer=optimizer, callbacks=())
        trainer.train(
            loader.dataset,
            num_epochs=1,
            per_device_batch_size=task.micro_batch,
            gradient_accumulation_steps=task.accumulation,
        )
        return list(model.state_dict().values())

    return run


CONTENDER = Contender(
    name="pytorch_accelerated",
    rank=34,
    against="raw",
    prepare=prepare,
    kinds=("train",),
    feeds=("tensors",),  # it needs a loader with a batch sampler
    requires=("pytorch_accelerated",),
)
