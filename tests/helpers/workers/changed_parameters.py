"""Parameters that are added, frozen or unfrozen within a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.workers import RANK
from tests.helpers.workers.agreement import Logged


class Changing(Classifier):
    """Changes its parameters as `how` says."""

    how = ""

    def __init__(self) -> None:
        super().__init__(numbers(16, dtype=torch.float64), dtype=torch.float64)
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=self.how != "unfrozen in a hook")

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD([*self.net.parameters(), self.shift], lr=0.1)
        return self.optimizer, None

    def add(self, start: float) -> None:
        self.extra = nn.Parameter(torch.full((6,), start, dtype=torch.float64))
        self.optimizer.add_param_group({"params": [self.extra]})

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        first = global_step == 2 and self.micro_batch.number == 0
        if first and self.how.startswith("created in the step"):
            self.add(0.1 + (RANK if self.how.endswith("differing") else 0))
        if self.how == "frozen in the step" and global_step == 2:
            self.net[0].weight.requires_grad_(False)
        inputs, labels = batch
        loss = super().train_step(global_step, (inputs * getattr(self, "extra", 1.0), labels), device)
        return loss + (self.shift * inputs.mean()).sum() * 0.1

    def on_end_backward(self, global_step: int, loss_tensor: Any) -> None:
        if global_step != 2 or self.micro_batch.number:
            return
        if self.how.endswith("frozen in a hook"):
            self.shift.requires_grad_(self.how == "unfrozen in a hook")
        if self.how == "added in a hook":
            self.add(1.0)


def changed(directory: str, how: str, **changes: Any) -> dict[str, Any]:
    Changing.how = how
    module, error = Changing(), None
    with Logged() as logged:
        try:
            ts.Trainer(module, arguments(directory, epochs=2, **changes)).train()
        except ts.TrainstackError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "weights": weights(module).tolist(), "warnings": logged.lines}
