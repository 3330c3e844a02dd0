"""The `Trainer` of transformers, as "Trainer" and `TrainingArguments` of its documentation have it.

`compute_loss_func`, which is given the number of items of the whole window; `save_strategy="steps"` and
`train(resume_from_checkpoint=PATH or True)`; `evaluate` with `compute_metrics`; `create_scheduler` overridden for a
schedule of one's own; `seed`; `train_sampling_strategy`. Gradients are not clipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tools.conformance.adapter import Adapter
from tools.conformance.task import Stream, Task, mean_loss

transformers.utils.logging.set_verbosity_error()


class _Trainer(transformers.Trainer):
    task: Task

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        chosen = self.optimizer if optimizer is None else optimizer
        constant = LambdaLR(chosen, lambda tick: 1.0) if self.task.decay is None else None
        self.lr_scheduler = constant or self.task.schedule(chosen, num_training_steps)
        return self.lr_scheduler


def _loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return mean_loss(outputs["outputs"], labels, num_items_in_batch)


class Peer(Adapter):
    """The transformers Trainer."""

    distribution: ClassVar[str] = "transformers"
    notes: ClassVar[dict[str, str]] = {
        "resume_augmentation": "the batch after is loaded before a checkpoint is written",
        "generators": "documented: the argument seed, 42 by default, is set at the beginning of training",
        "mode_restored": "it calls model.train() in every step",
    }

    def train(self, task: Task) -> None:
        if task.fp16:
            self.lacks("float16 with a loss scaler needs a GPU")
        resume = True if task.resume == "newest" else str(task.resume) if task.resume else None
        self._trainer(task).train(resume_from_checkpoint=resume)

    def evaluate(self, task: Task) -> float:
        if isinstance(task.validation, Stream):
            task.validation.shared = True
        return float(self._trainer(task).evaluate()["eval_score"])

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))

    def _trainer(self, task: Task) -> _Trainer:
        args = transformers.TrainingArguments(
            output_dir=str(task.folder),
            num_train_epochs=task.epochs,
            per_device_train_batch_size=task.batch,
            per_device_eval_batch_size=task.batch,
            gradient_accumulation_steps=task.accumulate,
            train_sampling_strategy="random" if task.shuffle else "sequential",
            max_grad_norm=0.0,
            save_strategy="steps" if task.save else "no",
            save_steps=1,
            eval_strategy="no" if task.validation is None else "epoch",
            use_cpu=True,
            ddp_backend="gloo" if task.processes > 1 else None,
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            **({} if task.seed is None else {"seed": task.seed}),
        )
        trainer_class = type("_Bound", (_Trainer,), {"task": task})
        trainer: _Trainer = trainer_class(
            model=task.model,
            args=args,
            train_dataset=task.data,
            eval_dataset=task.validation,
            optimizers=(task.optimizer(task.model.parameters()), None),
            compute_loss_func=_loss,
            compute_metrics=lambda made: {"score": made.predictions[-1].mean()},
        )
        return trainer
