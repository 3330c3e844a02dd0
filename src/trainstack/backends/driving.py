"""What is needed to drive a stack without a `Trainer`: the arguments, and what drives it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBackendArguments:
    """What `TrainerBackend.init` is given.

    Args:
        model: a `ModuleInterface`.
        optimizers: over the parameters of `model`.
        schedulers: stepped once after each global step that moved the weights.
        device: `"auto"`, or what `torch.device` understands.
        gradient_accumulation: batches of the dataloader that make up one global step, on each process.
        max_train_steps_per_epoch: global steps after which `train_dl` stops.
        max_val_steps_per_epoch: batches after which `validate_dl` stops.
        clip_grads: limit the joint L2 norm of the gradients.
        max_grad_norm: to what.
    """

    model: nn.Module
    optimizers: Iterable[Optimizer]
    schedulers: Iterable[Any] = ()
    device: str | torch.device = "auto"
    gradient_accumulation: int = 1
    max_train_steps_per_epoch: int | None = None
    max_val_steps_per_epoch: int | None = None
    clip_grads: bool = True
    max_grad_norm: float = 1.0


class Driver(Protocol):
    """What stands above a stack and calls its verbs."""

    @property
    def global_steps(self) -> int:
        """Global steps finished."""

    @property
    def batches(self) -> int:
        """Micro-batches finished."""

    def train(self, dataloader: Any, callback: Any) -> Any:
        """One pass of training over `dataloader`."""

    def validate(self, dataloader: Any) -> Any:
        """One pass of validation over `dataloader`."""
