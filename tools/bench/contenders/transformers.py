"""The transformers Trainer with minimal options: no clipping, a constant rate, no bar, no logs, no checkpoints."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tools.bench.contender import Contender, Run
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """`Trainer.train`, or `Trainer.predict` for an evaluation, with the loader of the task."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model, loader = task.make_model(), task.make_loader()

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return self.accelerator.prepare(loader)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            return task.loss(model(inputs[0]), inputs[1])

        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            with torch.no_grad():
                return None, model(inputs[0]), None

    def run() -> Sequence[Tensor]:
        with redirect_stdout(io.StringIO()):  # it prints its time
            return _run()

    def _run() -> Sequence[Tensor]:
        optimizer = task.make_optimizer(model.parameters())
        args = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=task.micro_batch,
            per_device_eval_batch_size=task.micro_batch,
            gradient_accumulation_steps=task.accumulation,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            eval_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(
            model=model, args=args, train_dataset=loader.dataset, optimizers=(optimizer, LambdaLR(optimizer, _constant))
        )
        if task.kind == "evaluate":
            return [torch.as_tensor(trainer.predict(loader.dataset).predictions)]
        trainer.train()
        return list(model.state_dict().values())

    return run


def _constant(tick: int) -> float:
    return 1.0


CONTENDER = Contender(
    name="transformers",
    rank=32,
    against="raw",
    prepare=prepare,
    requires=("transformers", "accelerate"),
    feeds=("tensors", "loader"),
)
