"""Evaluations of a sharded module that is never whole, for `run_world`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

import trainstack as ts
from tests.helpers.modules import arguments
from tests.helpers.workers.sharded import DATA, model
from trainstack._tensor_classes import is_sharded


class _Part(IterableDataset[Any]):
    """Batches that rank 0 alone has."""

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter([DATA[n] for n in range(5)] if rank == 0 else [])


class Evaluates(ts.SupervisedModule):
    """Counts its validation steps, and notes whether the weights were whole before one began."""

    def __init__(self, count: int = 13) -> None:
        super().__init__(model(), nn.MSELoss(), "adamw", DATA, val_dataset=Subset(DATA, range(count)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.whole = self.kills = False

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.whole |= not is_sharded(self.model[0].weight)
        self.calls += 1
        self.log("calls", self.calls)
        if self.kills and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().val_step(global_step, batch, device)


def _trainer(
    module: ts.ModuleInterface, directory: str, backend: str, metrics: dict[str, Any] | None = None, **given: Any
) -> ts.Trainer:
    if backend == "fsdp":
        given["backend_options"] = {"fsdp": {"gather_for_evaluation": False}}
    args = arguments(directory, backend=backend, train_batch_size=6, val_batch_size=2, **given)
    return ts.Trainer(module, args, metrics=metrics)


def evaluations(directory: str, backend: str) -> dict[str, Any]:
    """Everything that evaluates, over numbers of samples that the ranks cannot divide."""
    import torchmetrics  # which other functions here do without, because it takes long

    module, metrics = Evaluates(), {"error": torchmetrics.MeanAbsoluteError()}
    trainer = _trainer(module, directory, backend, metrics, epochs=2, validate_every=1, sanity_val_steps=1)
    trainer.train()
    found: dict[str, Any] = {
        name: trainer.history.get_metric_values(name) for name in ("val/loss", "val/error", "train/loss_epoch")
    }
    for count in (1, 7):
        some = DataLoader(Subset(DATA, range(count)), batch_size=2)
        found[f"predicted {count}"] = [row.tolist() for row in trainer.predict(some)]
        found[f"streamed {count}"] = [one.tolist() for one in trainer.predict(some, stream=True)]
        found[f"validated {count}"] = trainer.validate(some, log=False).metrics["val/loss"]
    found["whole"] = module.whole
    return found


def evaluated_on_main(directory: str, backend: str) -> Any:
    """The loss where rank 0 evaluates alone."""
    module = Evaluates()
    module.evaluate_on_main = True
    return _trainer(module, directory, backend).validate(log=False).metrics["val/loss"]


def own_batches(directory: str, backend: str) -> Any:
    """The loss over batches that rank 0 alone has."""
    given = {"data_sharding": {"val": "loader"}} if backend == "fsdp" else {}
    trainer = _trainer(Evaluates(), directory, backend, **given)
    return trainer.validate(DataLoader(_Part(), batch_size=2), log=False).metrics["val/loss"]


def interrupted(directory: str, backend: str) -> tuple[str, int]:
    """The name of the error of a run that one rank is asked to stop in a validation, and the steps of that."""
    module = Evaluates()
    module.kills = True
    try:
        _trainer(module, directory, backend, checkpointer_args=ts.DefaultCheckpointerArguments()).train()
    except ts.errors.Preempted as error:
        return type(error).__name__, int(module.calls)
    return "finished", int(module.calls)
