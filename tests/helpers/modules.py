"""Small modules to train in tests. Every weight is the same for the same seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainstack as ts
from trainstack.backends.fsdp import whole

FEATURES, CLASSES = 6, 3
REPRODUCIBLE = ts.DifferentialPrivacyArguments(
    delta=1e-4,
    noise_multiplier=0.1,
    debug_seed=3,
    log_train_loss=True,
    public_validation=True,
    expose_records=True,
)
"""For runs of private backends that are compared with each other; they are not private."""


class InMemory(ts.AbstractCheckpointer):
    """A checkpointer with the two required methods only. `kept` has all checkpoints."""

    def __init__(self) -> None:
        self.kept: list[ts.Checkpoint] = []

    def save(self, checkpoint_state: ts.Checkpoint, index: int, force: bool = False) -> str | None:
        self.kept.append(checkpoint_state)
        return "memory"

    def load(self, resume: Any = None) -> ts.Checkpoint:
        return self.kept[-1] if self.kept else ts.Checkpoint()


def numbers(count: int, *, dtype: torch.dtype = torch.float32, seed: int = 1) -> TensorDataset:
    """`count` samples with a class each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Random augmentation from all three generators of the host, in `__getitem__`."""

    def __init__(self, count: int = 41) -> None:
        self.base = numbers(count)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = self.base[index]
        noise = torch.randn(FEATURES) + float(np.random.normal()) + random.gauss(0.0, 1.0)
        return inputs + 0.1 * noise, label


class Classifier(ts.ModuleInterface):
    """A small network with dropout over any data set of (inputs, label)."""

    def __init__(
        self,
        dataset: Dataset[Any] | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        scheduler: bool = False,
        validate: bool = False,
        **loader: Any,
    ) -> None:
        super().__init__()
        self.dataset: Any = numbers(41, dtype=dtype) if dataset is None else dataset
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)).to(
                dtype
            )
        self.make_optimizer, self.lr, self.with_scheduler = optimizer, lr, scheduler
        self.validates, self.loader = validate, loader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = self.make_optimizer(self.parameters(), lr=self.lr)
        steps = max(1, estimated_global_steps_per_epoch * epochs)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [cosine] if self.with_scheduler else []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, sampler=sampler(self.dataset), batch_size=batch_size, **self.loader)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        if not self.validates:
            return None
        public = copy.copy(self.dataset)  # a private run whose validation data are public refuses its training data
        if type(public) is TensorDataset:
            public = TensorDataset(*(tensor.clone() for tensor in public.tensors))
        return DataLoader(public, sampler=sampler(public), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        torch.rand(3), np.random.rand(), random.random()  # validation may draw, without an effect on training
        outputs = self.net(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), outputs.argmax(1)


class Hooked(Classifier):
    """Dropout, running statistics, and a hook that a trial must not call."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"dropout": 0.3, "scheduler": True, "optimizer": torch.optim.AdamW, **changes})
        self.net.append(nn.BatchNorm1d(3))
        self.steps: list[int] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.log("seen", 1.0)
        return super().train_step(global_step, batch, device)

    def on_end_train_step(self, global_step: int) -> None:
        self.steps.append(global_step)


def arguments(directory: Any, **changes: Any) -> ts.TrainerArguments:
    """Quiet arguments that save nothing, unless told otherwise."""
    values: dict[str, Any] = {
        "train_batch_size": 8,
        "output_dir": str(directory),
        "writers": [],
        "progress": "none",
        "checkpointer_args": ts.DefaultCheckpointerArguments(checkpoint=False),
        "device": "cpu",
    }
    if "dp" in changes.get("backend", "sp").split("-"):
        values["differential_privacy_args"] = REPRODUCIBLE
    return ts.TrainerArguments(**{**values, **changes})


def train(module: ts.ModuleInterface, directory: Any, **changes: Any) -> ts.Trainer:
    """Train `module` to the end; returns the trainer."""
    trainer = ts.Trainer(module, arguments(directory, **changes))
    trainer.train()
    return trainer


def weights(module: nn.Module) -> Tensor:
    """All weights of `module` as one float64 vector. Where they are sharded, all ranks call it together."""
    return torch.cat([whole(p.detach()).double().flatten() for p in module.parameters()])
