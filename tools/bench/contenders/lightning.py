"""Lightning with minimal options: no logger, no bar, no summary, no checkpoints, nothing logged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.contender import Contender, Run
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """`Trainer.fit`, or `Trainer.predict` for an evaluation."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = task.make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return task.loss(self.model(inputs), targets)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return task.make_optimizer(self.parameters())

    module, loader = Module(), task.make_loader()

    def run() -> Sequence[Tensor]:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=task.accumulation,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        if task.kind == "evaluate":
            return [torch.cat(trainer.predict(module, loader))]
        trainer.fit(module, loader)
        return list(module.model.state_dict().values())

    return run


CONTENDER = Contender(name="lightning", rank=31, against="raw", prepare=prepare, requires=("lightning",))
