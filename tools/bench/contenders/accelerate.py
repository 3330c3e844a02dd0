"""Accelerate: the hand-written loop with the changes of its "Quicktour"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.bench.contender import Contender, Run
from tools.bench.task import Task


def prepare(task: Task, folder: Path) -> Run:
    """Model, optimizer and loader go through `Accelerator.prepare`; accumulation through `accumulate`."""
    from accelerate import Accelerator

    model, loader = task.make_model(), task.make_loader()

    def train() -> Sequence[Tensor]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.accumulation)
        prepared, optimizer, batches = accelerator.prepare(model, task.make_optimizer(model.parameters()), loader)
        prepared.train()
        for inputs, targets in batches:
            with accelerator.accumulate(prepared):
                loss = task.loss(prepared(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return list(model.state_dict().values())

    def evaluate() -> Sequence[Tensor]:
        accelerator = Accelerator(cpu=True)
        prepared, batches = accelerator.prepare(model, loader)
        prepared.eval()
        outputs = []
        with torch.no_grad():
            for inputs, _ in batches:
                outputs.append(accelerator.gather_for_metrics(prepared(inputs)))
        return [torch.cat(outputs)]

    return evaluate if task.kind == "evaluate" else train


CONTENDER = Contender(
    name="accelerate", rank=30, against="raw", prepare=prepare, requires=("accelerate",), feeds=("tensors", "loader")
)
