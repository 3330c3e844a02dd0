"""Sequences of several lengths and several loaders over ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights

COUNT = 45
LENGTHS = [1 + (7 * index * index + 3 * index) % 23 for index in range(COUNT)]


class Sequences(Dataset[Any]):
    """`count` samples: their index, and tokens that depend on it."""

    def __init__(self, count: int = COUNT, begin: int = 0) -> None:
        self.count, self.begin = count, begin

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = LENGTHS[index % COUNT]
        return self.begin + index, torch.rand(length, generator=generator, dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """The same samples without indices.

    Args:
        count: samples.
        stated: the result of `__len__`; None for no length.
    """

    def __init__(self, count: int, stated: int | None = None) -> None:
        self.samples, self.stated = Sequences(count), stated

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))

    def __len__(self) -> int:
        if self.stated is None:
            raise TypeError("no length")
        return self.stated


def pad(samples: list[tuple[int, Tensor]]) -> dict[str, Tensor]:
    """A batch whose rows have the length of the longest."""
    rows = [tokens for _, tokens in samples]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
    index = torch.tensor([index for index, _ in samples])
    return {"index": index, "tokens": nn.utils.rnn.pad_sequence(rows, batch_first=True), "mask": mask}


class Tokens(ts.ModuleInterface):
    """A linear model whose loss is a mean over tokens; records the samples and the padded size of each micro-batch.

    Args:
        make: is given a sampler class and a batch size, and makes the training loader.
        schedule: the interval of a scheduler; None for none.
    """

    def __init__(self, make: Any, schedule: Any = None) -> None:
        super().__init__()
        self.make, self.schedule = make, schedule
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.constant_(self.net.weight, 0.5), nn.init.zeros_(self.net.bias)
        self.seen: dict[int, list[Any]] = {}
        self.cells: dict[int, list[int]] = {}
        self.stop_at: int | None = None

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        if self.schedule is None:
            return optimizer, None
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer, ts.SchedulerConfig(scheduler, interval=self.schedule)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.make(sampler, batch_size)

    def batch_weight(self, batch: Any) -> float:
        return float((batch if "mask" in batch else next(iter(batch.values())))["mask"].sum())

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        parts = {"": batch} if "mask" in batch else batch
        parts = {name: part for name, part in parts.items() if part is not None}
        if self.micro_batch.samples != ():  # not borrowed
            found = [[name, index] for name, part in parts.items() for index in part["index"].tolist()]
            self.seen.setdefault(global_step, []).extend(found)
        self.cells.setdefault(global_step, []).append(sum(part["mask"].numel() for part in parts.values()))
        loss = torch.zeros((), dtype=torch.float64)
        for part in parts.values():
            each = (self.net(part["tokens"][..., None])[..., 0] - 1).pow(2)
            loss = loss + (each * part["mask"]).sum() / part["mask"].sum()
        return loss


def run(make: Any, backend: str = "sp", stop_at: int | None = None, schedule: Any = None, **changes: Any) -> Any:
    """Train with a global batch of 8; the steps' samples, the padded sizes, and the weights."""
    values: dict[str, Any] = {"train_batch_size": 8, "clip_grads": False, "epochs": 2, "backend": backend, **changes}
    if "every_step" in values:
        values["checkpointer_args"] = ts.DefaultCheckpointerArguments(every_n_steps=values.pop("every_step"))
    directory = values.pop("directory", "unused")
    module = Tokens(make, schedule)
    module.stop_at = stop_at
    trainer = ts.Trainer(module, arguments(directory, **values))
    with suppress(KeyboardInterrupt):
        trainer.train()
    seen = [sorted(module.seen[step]) for step in sorted(module.seen)]
    return {
        "seen": seen,
        "cells": [module.cells[step] for step in sorted(module.cells)],
        "weights": weights(module).tolist(),
        "first": min(module.seen, default=0),
        "plan": trainer.plan.to_dict(),
    }


def grouped(backend: str = "sp", window: int | None = 24, workers: int = 0, **changes: Any) -> Any:
    """Batches of similar lengths."""

    def make(sampler: Any, batch_size: int) -> Any:
        order = sampler(Sequences()) if window == 0 else ts.LengthGroupedSampler(LENGTHS, window=window)
        return DataLoader(Sequences(), batch_size, sampler=order, collate_fn=pad, num_workers=workers)

    return run(make, backend, **changes)


def several(backend: str = "sp", workers: int = 0, grouped: bool = False, **changes: Any) -> Any:
    """Two loaders in a step, of 45 and 27 samples."""

    def make(sampler: Any, batch_size: int) -> Any:
        one, two = Sequences(), Sequences(27, begin=100)
        order = ts.LengthGroupedSampler(LENGTHS) if grouped else sampler(one)
        return {
            "one": DataLoader(one, batch_size, sampler=order, collate_fn=pad, num_workers=workers),
            "two": DataLoader(two, batch_size, sampler=sampler(two), collate_fn=pad),
        }

    return run(make, backend, **{"combine_loaders": "cycle", **changes})


def growing(backend: str = "sp", **changes: Any) -> Any:
    """A data set with 10 more samples in each epoch."""

    class Growing(Sequences):
        def set_epoch(self, epoch: int) -> None:
            self.count = 10 * (epoch + 1)

    dataset = Growing(10)
    return run(
        lambda sampler, size: DataLoader(dataset, size, sampler=sampler(dataset), collate_fn=pad),
        backend,
        **{"epochs": 3, **changes},
    )


def streamed(backend: str = "sp", count: int = 20, stated: int | None = None, **changes: Any) -> Any:
    """A stream that states a length."""
    return run(lambda _, size: DataLoader(Stream(count, stated), size, collate_fn=pad), backend, **changes)
