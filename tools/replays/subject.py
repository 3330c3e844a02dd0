"""The module that is trained and replayed, with many ways to change a bit."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainstack as ts
from trainstack.trainer.callbacks import EMA

FEATURES, CLASSES, SAMPLES = 8, 3, 43


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; a planted difference changes one of them, or has a `plant`.

    Attributes:
        dropout: the probability of the dropout layer.
        augmentation: the standard deviation of the noise of a sample, which is drawn when it is loaded.
        workers: the number of workers of the training loader.
        norm: whether the network has running statistics.
        ema: whether the callback EMA averages the weights.
        schedule: "", "cosine" by steps, or "plateau" by validation loss.
        optimizer: "adamw" or "sgd".
        lr, weight_decay, smoothing: arguments of the optimizer and the loss of torch.
        seed: the seed of the initial weights.
        plant: the name of a difference within the training, and its global step.
    """

    dropout: float = 0.3
    augmentation: float = 0.1
    workers: int = 0
    norm: bool = False
    ema: bool = False
    schedule: str = "cosine"
    optimizer: str = "adamw"
    lr: float = 0.01
    weight_decay: float = 0.01
    smoothing: float = 0.0
    seed: int = 0
    plant: tuple[str, int] = ("", 0)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points with classes, and noise from all three generators of the host."""

    def __init__(self, settings: Settings) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.scale = settings.augmentation
        self.edited = settings.plant[1] if settings.plant[0] == "one sample" else -1
        if settings.plant[0] == "swapped samples":
            swapped = [1, 0, *range(2, SAMPLES)]
            self.inputs, self.labels = self.inputs[swapped], self.labels[swapped]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) + float(np.random.normal()) + random.gauss(0.0, 1.0)
        return self.inputs[index] + self.scale * noise + 1e-3 * (index == self.edited), self.labels[index]


class Subject(ts.ModuleInterface):
    """A small classifier."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            layers: list[nn.Module] = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(settings.dropout)]
            self.net = nn.Sequential(*layers, *[nn.BatchNorm1d(16)] * settings.norm, nn.Linear(16, CLASSES))
        if settings.plant[0] == "one bit at the start":
            flip_bit(self.net[0].weight)
        if settings.plant[0] == "another torch":
            torch.__version__ = "9.9.0"
        self.opt: Any = None

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        made = self.settings
        if made.optimizer == "sgd":
            self.opt = torch.optim.SGD(self.parameters(), lr=made.lr, weight_decay=made.weight_decay, momentum=0.9)
        else:
            betas = (0.8 if made.plant[0] == "betas" else 0.9, 0.999)
            self.opt = torch.optim.AdamW(self.parameters(), lr=made.lr, weight_decay=made.weight_decay, betas=betas)
        if not made.schedule:
            return [self.opt], []
        if made.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=0)
            return [self.opt], [ts.SchedulerConfig(plateau, monitor="val/loss")]
        return [self.opt], [
            torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, estimated_global_steps_per_epoch * epochs)
        ]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        data = Samples(self.settings)
        return DataLoader(data, batch_size, sampler=sampler(data), num_workers=self.settings.workers)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        data = Samples(self.settings)
        return DataLoader(data, batch_size, sampler=sampler(data))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        inputs, labels = batch
        name = self._due(global_step)
        if name == "another dropout draw":
            torch.rand(1)
        loss = nn.functional.cross_entropy(self.net(inputs), labels, label_smoothing=self.settings.smoothing)
        if name == "another order of a sum":  # as in an atomic scatter
            return loss * (1 + 1e-6)
        return loss * float("nan") if name == "an overflow" else loss

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        if self._due(global_step) == "one bit of a gradient":
            flip_bit(next(self.parameters()).grad)

    def on_end_train_step(self, global_step: int) -> None:
        name = self._due(global_step)
        if name == "one bit of a weight":
            flip_bit(next(self.parameters()))
        elif name == "one bit of a moment":
            flip_bit(self.opt.state[next(self.parameters())]["exp_avg"])
        elif name == "a learning rate in a hook":
            self.opt.param_groups[0]["lr"] *= 1.5
        elif name in _DRAWS:
            _DRAWS[name]()

    def _due(self, step: int) -> str:
        return self.settings.plant[0] if self.settings.plant[1] == step else ""


_DRAWS: dict[str, Any] = {
    "a hook that draws from torch": lambda: torch.rand(1),
    "a hook that draws from numpy": lambda: np.random.rand(),
    "a hook that draws from random": random.random,
}


def flip_bit(tensor: Any, bit: int = 1 << 18) -> None:
    """Flip one bit of the first element of a float32 tensor, in place; of a sharded one, in each part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    with torch.no_grad():
        local.data.view(-1)[:1].view(torch.int32).bitwise_xor_(bit)


def make(settings: Settings) -> Any:
    """The module of a run, with its callbacks."""
    return Subject(settings), [EMA(decay=0.9)] if settings.ema else []


def arguments(place: Path, **changes: Any) -> ts.TrainerArguments:
    """The arguments of a run of 18 steps in 3 epochs, with 6 checkpoints."""
    values: dict[str, Any] = {
        "epochs": 3,
        "train_batch_size": 8,
        "device": "cpu",
        "log_every": 3,
        "output_dir": str(place),
        "resume": "auto",
        "writers": [],
        "progress": "none",
        "checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=4, keep_last=None),
    }
    return ts.TrainerArguments(**{**values, **changes})


def with_plant(settings: Settings, name: str, step: int) -> Settings:
    """`settings` with a difference at this global step."""
    return dataclasses.replace(settings, plant=(name, step))


def usual() -> Any:
    """The module of the usual run."""
    return make(Settings())


def usual_module() -> Subject:
    """The module of the usual run without callbacks, for the command line."""
    return Subject(Settings())


def edited_module() -> Subject:
    """The module with another augmentation."""
    return Subject(Settings(augmentation=0.11))
