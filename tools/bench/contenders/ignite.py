"""Ignite with minimal options: its supervised trainer and evaluator, with only the handler that collects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.bench.contender import Contender, Run
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """`Engine.run` for one epoch."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer

    model, loader = task.make_model(), task.make_loader()

    def train() -> Sequence[Tensor]:
        trainer = create_supervised_trainer(
            model,
            task.make_optimizer(model.parameters()),
            task.loss,
            output_transform=lambda x, y, y_pred, loss: None,
            gradient_accumulation_steps=task.accumulation,
        )
        trainer.run(loader, max_epochs=1)
        return list(model.state_dict().values())

    def evaluate() -> Sequence[Tensor]:
        outputs: list[Tensor] = []
        evaluator = create_supervised_evaluator(model, output_transform=lambda x, y, y_pred: y_pred)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: outputs.append(engine.state.output))
        evaluator.run(loader)
        return [torch.cat(outputs)]

    return evaluate if task.kind == "evaluate" else train


CONTENDER = Contender(name="ignite", rank=33, against="raw", prepare=prepare, requires=("ignite",))
