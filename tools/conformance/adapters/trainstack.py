"""trainstack with its defaults, but without gradient clipping, because the reference is plain PyTorch.

Documented in docs/quickstart.md, order.md, checkpoints.md and resume.md. The streams of the tasks are split by rank,
which `data_sharding` says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

import trainstack as ts
from tools.conformance.adapter import Adapter
from tools.conformance.task import Task


class _Module(ts.ModuleInterface):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.net = task, task.model
        self.mean_score = float("nan")

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = self.task.optimizer(self.parameters())
        assert self.plan is not None
        schedule = self.task.schedule(optimizer, self.plan.total_steps or 0)
        return [optimizer], [] if schedule is None else [schedule]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.task.data, batch_size=batch_size, shuffle=self.task.shuffle)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return None if self.task.validation is None else DataLoader(self.task.validation, batch_size=batch_size)

    def batch_weight(self, batch: Any) -> float:
        return self.task.items(batch) if self.task.items else len(batch["x"])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(**batch)["loss"]

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        returned = self.net(**batch)
        return {"loss": returned["loss"], "score": returned["score"]}

    def on_end_val_epoch(self, global_step: int, outputs: Any, key: str = "default") -> None:
        self.mean_score = float(outputs["score"].mean())


class Peer(Adapter):
    """trainstack."""

    distribution: ClassVar[str] = "trainstack"

    def train(self, task: Task) -> None:
        self._trainer(task).train()

    def evaluate(self, task: Task) -> float:
        trainer = self._trainer(task)
        trainer.validate()
        return trainer.module.mean_score

    def checkpoints(self, folder: Path) -> list[Path]:
        return [info.path for info in ts.list_checkpoints(folder / "checkpoints") if info.kind == "checkpoint"]

    def _trainer(self, task: Task) -> ts.Trainer:
        saving = ts.DefaultCheckpointerArguments(
            checkpoint=task.save, every_n_steps=1 if task.save else None, keep_last=None
        )
        process = "ddp" if task.processes > 1 else "sp"
        args = ts.TrainerArguments(
            epochs=task.epochs,
            train_batch_size=task.batch * task.accumulate * task.processes,
            gpu_batch_size_limit=task.batch,
            val_batch_size=task.batch,
            data_sharding={"val": "loader" if isinstance(task.validation, IterableDataset) else "auto"},
            clip_grads=False,
            backend=f"{process}-amp" if task.fp16 else process,
            device="cpu",
            seed=task.seed or 0,
            resume=True if task.resume == "newest" else task.resume or False,
            checkpointer_args=saving,
            output_dir=task.folder,
            writers=(),
            progress="none",
            log_level="ERROR",
        )
        return ts.Trainer(_Module(task), args)
