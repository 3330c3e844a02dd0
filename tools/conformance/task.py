"""One training run for any trainer: model, data, batches, optimizer and settings."""

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
    """`count` samples {"x": [4], "labels": []}; `x[0]` is the index. With `noisy`, `x` has random noise."""

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
    """Sequences of 6 classes; one to six of them count, and the others are padding (-100)."""

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
    """`count` samples as a stream; each process yields every n-th one, unless its trainer sets `shared` and divides."""

    def __init__(self, count: int) -> None:
        self.samples, self.shared = Samples(count), False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world = (int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("WORLD_SIZE", 1)))
        for index in range(len(self.samples)) if self.shared else range(rank, len(self.samples), world):
            yield self.samples[index]


class Net(nn.Module):
    """A classifier that returns {"loss", "outputs", "score"} and calls its `spy` in every training pass.

    The loss is the mean over the items of the batch, and `score` is x[0] of each sample. The arguments of the spy are
    the net and x; it can return a function for the outputs.
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
    """SGD that appends its learning rate to `rates` in each step."""

    def __init__(self, params: Any, rates: list[float], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self._note = lambda rate: rates.append(
            rate
        )  # not the list, because a trainer may restore attributes of optimizers

    def step(self, closure: Any = None) -> Any:
        """Call the closure first, and step."""
        result = closure() if closure is not None else None
        self._note(self.param_groups[0]["lr"])
        super().step()
        return result


@dataclass(kw_only=True)
class Task:
    """The training: model, data and settings.

    Attributes:
        folder: for the files of the trainer.
        model: trained in place, so that a case can read it afterwards.
        data: map-style training data.
        validation: for the evaluation at the end of each epoch, or of `evaluate`.
        batch: the number of samples of a micro-batch in each process.
        accumulate: the number of micro-batches of an optimizer step.
        epochs: the number of passes over the data.
        shuffle: in the way of the trainer.
        processes: the number of processes that train together, including this one.
        rates: the learning rates that `Recording` appends.
        decay: "linear", from the base to zero over the steps of the run; "hyperbolic", base / (1 + n) after n steps.
        fp16: mixed precision in float16 with a loss scaler.
        items: the number of items in the mean of the loss of a batch; None for the number of samples.
        save: keep a checkpoint of every optimizer step.
        resume: a checkpoint to continue from; "newest" for the newest in `folder`.
        exact: a resumed run has to equal an uninterrupted one; for trainers with a mode for this.
        seed: for trainers with a seed; None for their default.
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
    """Seed the generators of random, numpy and torch; None does not change them."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def weights(model: nn.Module) -> Tensor:
    """All weights as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])
