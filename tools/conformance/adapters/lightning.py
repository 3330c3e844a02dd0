"""Lightning's `Trainer`, as "LightningModule", "Checkpointing" and "GPU training" of its documentation have it.

`accumulate_grad_batches`; `ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, save_last=True)` and
`fit(ckpt_path=..., weights_only=True)`, the latter as advised for checkpoints that are not trusted; `ckpt_path="last"`;
`self.log(..., sync_dist=True, batch_size=...)` in validation; a scheduler with `"interval": "step"` over
`estimated_stepping_batches`; `seed_everything`; two processes under the variables of torchrun. A stream of data shares
itself out, as its documentation leaves that to the user.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from tools.conformance.adapter import Adapter
from tools.conformance.task import Task

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class _Module(pl.LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.net = task, task.model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        score = self.net(**batch)["score"]
        self.log("score", score.mean(), batch_size=len(score), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.task.optimizer(self.parameters())
        if self.task.decay is None:
            return optimizer
        schedule = self.task.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Peer(Adapter):
    """Lightning."""

    distribution: ClassVar[str] = "lightning"
    notes: ClassVar[dict[str, str]] = {
        "resume_dropout": "its checkpoints hold no random states",
        "resume_augmentation": "its checkpoints hold no random states",
        "no_duplicates": "its documentation advises to evaluate on one device",
        "nonfinite_step": "detect_anomaly=True, for debugging, raises",
    }

    def train(self, task: Task) -> None:
        if task.items is not None:
            self.lacks("no weights of micro-batches but in manual optimization, where the user writes the loop")
        if task.seed is not None:
            pl.seed_everything(task.seed, verbose=False)
        trainer, resume = self._trainer(task), "last" if task.resume == "newest" else task.resume
        validation = None if task.validation is None else DataLoader(task.validation, batch_size=task.batch)
        loader = DataLoader(task.data, batch_size=task.batch, shuffle=task.shuffle)
        trainer.fit(_Module(task), loader, validation, ckpt_path=resume, weights_only=True)

    def evaluate(self, task: Task) -> float:
        loader = DataLoader(task.validation, batch_size=task.batch)
        return float(self._trainer(task).validate(_Module(task), loader, verbose=False)[0]["score"])

    def checkpoints(self, folder: Path) -> list[Path]:
        saved = (folder / "checkpoints").glob("step=*.ckpt")
        return sorted(saved, key=lambda path: int(path.stem.removeprefix("step=")))

    def newest(self, folder: Path) -> Path:
        return folder / "checkpoints" / "last.ckpt"

    def _trainer(self, task: Task) -> pl.Trainer:
        saving = ModelCheckpoint(
            dirpath=task.folder / "checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
        )
        scaler = torch.amp.GradScaler("cpu")
        return pl.Trainer(
            accelerator="cpu",
            devices=task.processes,
            strategy="ddp" if task.processes > 1 else "auto",
            max_epochs=task.epochs,
            accumulate_grad_batches=task.accumulate,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if task.fp16 else None,
            callbacks=[saving] if task.save or task.resume == "newest" else [],
            enable_checkpointing=task.save or task.resume == "newest",
            default_root_dir=task.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
