"""pytorch-accelerated's `Trainer` with its default callbacks, as its documentation has it.

`calculate_train_batch_loss` and `calculate_eval_batch_loss` overridden; `gradient_accumulation_steps`;
`create_scheduler_fn` with `TrainerPlaceholderValues` as in their docstring; `SaveTrainingStateCallback` and
`train(resume_from=...)`; `evaluate`. Two processes run under the variables of torchrun, on the CPU as `accelerate
launch --cpu` says it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

from tools.conformance.adapter import Adapter
from tools.conformance.task import Stream, Task

os.environ["ACCELERATE_USE_CPU"] = "true"

_RESUMED = "documented: training resumes from the saved epoch"


class _Trainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        returned = self.model(**batch)
        return {"loss": returned["loss"], "model_outputs": returned["outputs"], "batch_size": len(batch["x"])}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """The score replaces the loss, so that the trainer averages it."""
        with torch.no_grad():
            returned = self.model(**batch)
        score = returned["score"].mean()
        return {"loss": score, "model_outputs": returned["outputs"], "batch_size": len(batch["x"])}


class Peer(Adapter):
    """pytorch-accelerated."""

    distribution: ClassVar[str] = "pytorch-accelerated"
    notes: ClassVar[dict[str, str]] = {
        "resume_dropout": _RESUMED,
        "resume_augmentation": _RESUMED,
        "ticks_ddp": "with NUM_UPDATE_STEPS_PER_EPOCH, as its documentation has it",
        "generators": "every run begins with set_seed(42), which no argument changes",
    }

    def train(self, task: Task) -> None:
        if task.fp16:
            self.lacks("float16 with a loss scaler needs a GPU")
        if task.items is not None:
            self.lacks("no weights of micro-batches: each loss is divided by the number of accumulation steps")
        if task.resume == "newest":
            self.lacks("the user chooses the checkpoint to continue from")
        schedule = partial(
            lambda optimizer, epochs, steps_per_epoch: task.schedule(optimizer, epochs * steps_per_epoch),
            epochs=TrainerPlaceholderValues.NUM_EPOCHS,
            steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        )
        self._trainer(task).train(
            task.data,
            num_epochs=task.epochs,
            eval_dataset=task.validation,
            per_device_batch_size=task.batch,
            gradient_accumulation_steps=task.accumulate,
            create_scheduler_fn=schedule if task.decay else None,
            train_dataloader_kwargs={"shuffle": task.shuffle, "num_workers": 0},
            eval_dataloader_kwargs={"num_workers": 0},
            resume_from=None if task.resume is None else str(task.resume),
        )

    def evaluate(self, task: Task) -> float:
        if isinstance(task.validation, Stream):
            self.lacks("takes data sets with a length only")
        trainer = self._trainer(task)
        trainer.evaluate(task.validation, per_device_batch_size=task.batch, dataloader_kwargs={"num_workers": 0})
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))

    def _trainer(self, task: Task) -> _Trainer:
        saving = SaveTrainingStateCallback(save_dir=str(task.folder), save_every_n_steps=1)
        return _Trainer(
            model=task.model,
            loss_func=None,
            optimizer=task.optimizer(task.model.parameters()),
            callbacks=(*DEFAULT_CALLBACKS, *([saving] if task.save else [])),
        )
