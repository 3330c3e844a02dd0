"""Hand-written loops with torch only, as in a tutorial."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.bench.contender import Run
from tools.bench.task import Task


def prepare_handwritten(task: Task, *, max_norm: float | None = None, tuned: bool = False) -> Run:
    """A plain loop over `task`; with `max_norm`, it clips gradients by `clip_grad_norm_` of torch.

    With `tuned`, the channels are last in memory and the optimizer is the tuned one.
    """
    model, loader = task.make_model(), task.make_loader()
    make_optimizer = (tuned and task.tuned_optimizer) or task.make_optimizer
    if tuned:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def train() -> Sequence[Tensor]:
        optimizer = make_optimizer(model.parameters())
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        return list(model.state_dict().values())

    def train_accumulating() -> Sequence[Tensor]:
        optimizer, every = make_optimizer(model.parameters()), task.accumulation
        model.train()
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = task.loss(model(inputs), targets) / every
            loss.backward()
            if number % every == 0:
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        return list(model.state_dict().values())

    def evaluate() -> Sequence[Tensor]:
        model.eval()
        outputs = []
        with torch.no_grad():
            for inputs, _ in loader:
                outputs.append(model(inputs))
        return [torch.cat(outputs)]

    if task.kind == "evaluate":
        return evaluate
    return train if task.accumulation == 1 else train_accumulating
