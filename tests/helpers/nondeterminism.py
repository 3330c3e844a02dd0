"""A file for `trainstack doctor --determinism`: modules that are deterministic, and that are not in one way each."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainstack as ts


class Good(ts.ModuleInterface):
    """Dropout, batch norm, an augmentation of torch's generator, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.data: Dataset[Any] = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
        self.steps = 0

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [torch.optim.AdamW(self.parameters())], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=sampler(self.data))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0] + torch.randn(4)), batch[1])

    def on_end_train_step(self, global_step: int) -> None:
        self.steps += 1


class Clock(Good):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * (1 + time.perf_counter_ns() % 1009 * 1e-6)


class Activation(Good):
    """Noise of the system on the output of one part, in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net[2].register_forward_hook(self.disturb)

    def disturb(self, part: nn.Module, given: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output + int.from_bytes(os.urandom(4), "little") * 1e-9 if self.calls == 2 else output


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + int.from_bytes(os.urandom(4), "little") * 1e-9)


class Backward(Good):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.mse_loss(self.net[3](_Noise.apply(self.net[:3](batch[0]))), batch[1])  # type: ignore[no-untyped-call]


class _Unseeded(Dataset[Any]):
    """The trainer seeds generators that a data set holds; this one makes a new one for each sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.random.default_rng().normal(size=4)).float(), torch.ones(1)


class Data(Good):
    def __init__(self) -> None:
        super().__init__()
        self.data = _Unseeded()


class Start(Good):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.net[3].weight.add_(float(np.random.default_rng().normal()))


class Hook(Good):
    def on_end_train_step(self, global_step: int) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(time.perf_counter_ns() % 1009 * 1e-6)


class _Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1 + int.from_bytes(os.urandom(2), "little") * 1e-6)


class Optimizer(Good):
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return [_Optimizer(self.parameters(), lr=0.1)], []


class Order(Good):
    """Depends on the order of a set, which depends on the hash seed of the process."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        order = sum(position * len(name) for position, name in enumerate({"a", "bb", "ccc", "dddd", "eeeee", "f" * 6}))
        return super().train_step(global_step, batch, device) * (1 + order * 1e-3)


class Scatters(Good):
    """Operators that are not deterministic on CUDA."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(batch[0])
        rows = torch.zeros(len(outputs), 1, dtype=torch.long)
        sums = torch.zeros(3, 1).scatter_add(0, rows, outputs).sum() + torch.cumsum(outputs, 0).mean()
        whole = torch.cumsum(rows, 0).float().mean()  # of integers: deterministic
        return nn.functional.mse_loss(outputs, batch[1]) + 0.01 * (sums + whole)
