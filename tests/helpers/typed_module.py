"""Code of users, for type checkers: the imports of the README, and each documented form of each hook.

`make check` runs `mypy --strict` over this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainstack import AbstractTrainer, Callback, ModuleInterface, Trainer, TrainerArguments


class Typed(ModuleInterface):
    """Every method with its types."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64))
        self.called: list[str] = []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=batch_size, sampler=sampler(self.data))

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> DataLoader[Any]:
        return self.get_train_dataloader(sampler, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [torch.optim.AdamW(self.parameters(), lr=1e-2)], []

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        scores = self.model(batch[0])
        return cross_entropy(scores, batch[1]), scores

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> dict[str, Tensor]:
        loss, scores = self.train_step(global_step, batch, device)
        return {"loss": loss, "correct": scores.argmax(dim=1) == batch[1]}

    test_step = val_step


class WithoutOutputs(Typed):
    """Hooks with fewer parameters than they may have."""

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.called.append("begin")

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        self.called.append("backward")

    def on_end_train_step(self, global_step: int) -> None:
        self.called.append("step")

    def on_end_train_epoch(self, global_step: int) -> None:
        self.called.append("epoch")

    def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
        self.called.append(key)

    def on_end_train(self, global_step: int) -> None:
        self.called.append("end")


class WithOutputs(Typed):
    """Hooks with their own names for the outputs."""

    def on_end_train_step(self, global_step: int, losses: Tensor, scores: Tensor) -> None:
        super().on_end_train_step(global_step, losses, scores)
        self.called.append("step")

    def on_end_train_epoch(self, global_step: int, *outputs: Tensor) -> None:
        self.called.append("epoch")

    def on_end_val_epoch(self, global_step: int, outputs: dict[str, Tensor], key: str = "default") -> None:
        self.log("val/accuracy", outputs["correct"].float().mean())
        self.called.append(key)


class Notes(Callback):
    """A callback with one method."""

    def on_train_step_end(self, trainer: AbstractTrainer, step: int) -> None:
        assert trainer.state.global_step == step


def run(module: Typed, args: TrainerArguments) -> list[str]:
    """Train `module`; the hooks that were called."""
    Trainer(module, args, callbacks=[Notes()]).train()
    return module.called
