"""PyMarlin's `ddp` over trainstack."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.modules import Classifier
from trainstack.compat.pymarlin.core import trainer, trainer_backend
from trainstack.compat.pymarlin.utils.checkpointer import DefaultCheckpointerArguments


class PartlyUnused(Classifier):
    """One layer takes no part in the loss, and each rank begins with other weights."""

    def __init__(self) -> None:
        super().__init__(validate=True)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            self.unused.weight.fill_(float(os.environ["RANK"]))


def train_ddp(directory: str, as_objects: bool) -> dict[str, Any]:
    module = PartlyUnused()
    args = trainer.TrainerArguments(
        train_batch_size=8,
        writers=[],
        backend="ddp",
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
        disable_tqdm=True,
        output_dir=str(Path(directory)),
    )
    stack = trainer_backend.DDPTrainerBackend(trainer_backend.SingleProcess()) if as_objects else None
    made = trainer.Trainer(module, args, stack)
    made.train()
    place = made.args.distributed_training_args
    return {
        "steps": made.global_steps_finished,
        "unused": module.unused.weight.tolist(),
        "inner": type(made.trainer_backend.trainer_backend).__name__,
        "place": [place.local_rank, place.global_rank, place.world_size],
    }
