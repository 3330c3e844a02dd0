"""One training run, in words that every trainer understands: model, data, batches, optimizer, where to write."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, IterableDataset

FEATURES, WIDTH, CLASSES, IGNORED = 4, 1024, 3, -100


class Samples(Dataset[dict[str, Any]]):
    """`count` samples {"x": [4], "labels": []}; `x[0]` is the sample's index. With `noisy`, augmented at random."""

    def __init__(self, count: int, *, noisy: bool = False, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.x[:, 0] = torch.arange(count)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index]
        if self.noisy:
            noise = 0.1 * torch.randn(FEATURES) + float(np.random.normal()) + random.gauss(0.0, 1.0)
            x = x + noise.to(x.dtype)
        return {"x": x, "labels": self.labels[index]}


class Sequences(Dataset[dict[str, Any]]):
    """Sequences of 6 classes, of which between one and six count; the others are padding (-100)."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, 6, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, CLASSES, (count, 6), generator=generator)
        lengths = torch.randint(1, 7, (count, 1), generator=generator)
        self.labels[torch.arange(6) >= lengths] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Stream(IterableDataset[dict[str, Any]]):
    """`count` samples as a stream; each process gets every n-th, unless its trainer sees to that and sets `shared`."""

    def __init__(self, count: int) -> None:
        self.samples, self.shared = Samples(count), False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world = (int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("WORLD_SIZE", 1)))
        for index in range(len(self.samples)) if self.shared else range(rank, len(self.samples), world):
            yield self.samples[index]


class Net(nn.Module):
    """A classifier that returns {"loss", "outputs", "score"} and tells its `spy` of every training pass.

    The loss is the mean over the batch's items, `score` is x[0] of each sample. The spy is called with the net and x,
    and may return a function to be applied to the outputs.
    """

    def __init__(self, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), drop, nn.Linear(WIDTH, CLASSES)).to(dtype)
        self.still = nn.Dropout(0.5)
        self.spy: Callable[[Net, Tensor], Callable[[Tensor], Tensor] | None] | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """x: [n, 4] or [n, 6, 4]; labels: [n] or [n, 6], without which there is no loss."""
        change = self.spy(self, x) if self.spy is not None and torch.is_grad_enabled() else None
        outputs = self.body(torch.cat([x[..., :1] * 0.01, x[..., 1:]], dim=-1))
        if change is not None:
            outputs = change(outputs)
        returned = {"outputs": outputs, "score": x.reshape(len(x), -1)[:, 0]}
        return returned if labels is None else {"loss": mean_loss(outputs, labels), **returned}


def mean_loss(outputs: Tensor, labels: Tensor, items: Tensor | int | None = None) -> Tensor:
    """The cross entropy over positions without padding: its mean, or its sum divided by `items`."""
    values = outputs.flatten(0, -2), labels.flatten()
    if items is None:
        return nn.functional.cross_entropy(*values, ignore_index=IGNORED)
    return nn.functional.cross_entropy(*values, ignore_index=IGNORED, reduction="sum") / items


class Recording(torch.optim.SGD):
    """SGD that notes its learning rate in `rates` whenever it really steps."""

    def __init__(self, params: Any, rates: list[float], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self._note = lambda rate: rates.append(rate)  # not the list: a trainer may restore attributes of optimizers

    def step(self, closure: Any = None) -> Any:
        """Computes the closure first, as trainers that pass one rely on it."""
        result = closure() if closure is not None else None
        self._note(self.param_groups[0]["lr"])
        super().step()
        return result


@dataclass(kw_only=True)
class Task:
    """The training: model, data and settings.

    Attributes:
        folder: where the trainer may write.
        model: trained in place, so that it can be looked at afterwards.
        data: map-style training data.
        validation: for trainers to evaluate at the end of each epoch, or when told to.
        batch: samples of a micro-batch on each process.
        accumulate: micro-batches an optimizer step.
        epochs: passes over the data.
        shuffle: in the trainer's own way.
        processes: how many train together; this process is one of them.
        rates: the values that `Recording` notes.
        decay: "linear", from the base to zero over the steps of the run; "hyperbolic", base / (1 + n) after n steps.
        fp16: mixed precision in float16 with a loss scaler.
        items: how many items the loss of a batch is a mean over, where that is not its samples.
        save: keep a checkpoint of every optimizer step.
        resume: a checkpoint to continue from; "newest" for the newest in `folder`.
        exact: the run, when resumed, is to be as if it had not been interrupted; for trainers with a mode for that.
        seed: for trainers that take one; None leaves it at their default.
    """

    folder: Path
    model: Net
    data: Any
    validation: Any = None
    batch: int = 4
    accumulate: int = 1
    epochs: int = 1
    shuffle: bool = False
    processes: int = 1
    rates: list[float]
    decay: Literal["linear", "hyperbolic"] | None = None
    fp16: bool = False
    items: Callable[[Any], int] | None = None
    save: bool = False
    resume: Path | Literal["newest"] | None = None
    exact: bool = False
    seed: int | None = 7

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """The optimizer over `params`."""
        return Recording(params, self.rates)

    def schedule(self, optimizer: Any, total: int) -> LRScheduler | None:
        """The schedule over `total` ticks."""
        if self.decay == "linear":
            return LambdaLR(optimizer, lambda tick: max(0.0, 1 - tick / total))
        return LambdaLR(optimizer, lambda tick: 1 / (1 + tick)) if self.decay else None


def make_task(folder: Path, *, dropout: float = 0.0, **changes: Any) -> Task:
    """The setup of a script: seed everything, build the model, define the training."""
    seed_all(changes.get("seed", 7))
    dtype = torch.float32 if changes.get("fp16") else torch.float64
    folder.mkdir(parents=True, exist_ok=True)
    values = {"data": Samples(24, dtype=dtype), "rates": [], **changes}
    return Task(folder=folder, model=Net(dropout=dropout, dtype=dtype), **values)


def seed_all(seed: int | None) -> None:
    """Seed the generators of random, numpy and torch; None leaves them."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def weights(model: nn.Module) -> Tensor:
    """All weights as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])
