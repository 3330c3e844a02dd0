"""Streams of data over ranks: random numbers, loaders with their own order, data that is split by rank."""

from __future__ import annotations

import os
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments, weights
from tests.helpers.workers import RANK


class Seen(ts.ModuleInterface):
    """A linear model in float64 that records the first feature of each sample, step by step.

    Args:
        loader: called with a batch size for each epoch; returns the training loader.
        validation: the same for validation.
        drops: whether the model draws random numbers, on each rank other amounts.
    """

    def __init__(self, loader: Any, validation: Any = None, drops: bool = False) -> None:
        super().__init__()
        self.make, self.make_validation, self.drops = loader, validation, drops
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.constant_(self.net.weight, 0.5), nn.init.zeros_(self.net.bias)
        self.seen: list[list[float]] = []
        self.validated: list[float] = []
        self.stop_at: int | None = None

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return self.make(batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return None if self.make_validation is None else self.make_validation(batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        x = batch[0] if isinstance(batch, list | tuple) else batch
        while len(self.seen) < global_step:
            self.seen.append([])
        self.seen[global_step - 1] += x.flatten().tolist()
        if self.drops:
            torch.rand(RANK + len(x)), np.random.rand(RANK), random.random()
        return (self.net(x.double().reshape(-1, 1)) - 1).pow(2).mean()

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return (self.net(x.double().reshape(-1, 1)) - 1).pow(2).mean(), x.flatten()

    def on_end_val_epoch(self, global_step: int, loss: Any = None, x: Any = None, key: str = "default") -> None:
        self.validated = [] if x is None else x.tolist()


def run(module: ts.ModuleInterface, backend: str = "ddp", **changes: Any) -> ts.Trainer:
    """Train with a global batch of 4."""
    values: dict[str, Any] = {"train_batch_size": 4, "clip_grads": False, "val_batch_size": 2, **changes}
    trainer = ts.Trainer(module, arguments(values.pop("directory", "unused"), backend=backend, **values))
    trainer.train()
    return trainer


def drawn(backend: str = "ddp") -> list[list[float]]:
    """The numbers that each step draws from the three generators of the host, in two calls of `train()`."""

    class Draws(Seen):
        numbers: Any = ()

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.numbers += ([torch.rand(()).item(), float(np.random.rand()), random.random()],)
            return super().train_step(global_step, batch, device)

    ts.seed_everything(0)
    module = Draws(lambda size: DataLoader(TensorDataset(torch.ones(12, 1)), size))
    trainer = run(module, backend)
    trainer.train(epochs=2)
    return list(module.numbers)


class _AtNext(Sampler[int]):
    """Draws at each index, from all generators."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(24))
        while left:
            which = int(torch.randint(99, ())) + int(np.random.randint(99)) + random.randrange(99)
            yield left.pop(which % len(left))

    def __len__(self) -> int:
        return 24


class _Own(RandomSampler):
    """Draws in the first index; any class of the user's."""


class _Shuffled(IterableDataset[Tensor]):
    """Shuffles in a buffer, from `random`."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer = list(range(8))
        for index in range(8, 24):
            place = random.randrange(8)
            yield torch.tensor([float(buffer[place])])
            buffer[place] = index
        random.shuffle(buffer)
        yield from (torch.tensor([float(index)]) for index in buffer)


class _Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        torch.rand(index), np.random.rand(index % 3)
        return torch.tensor([float(index)])


_DATA = TensorDataset(torch.arange(24.0)[:, None])


class _Drawing:
    """Not a DataLoader; draws when its iterator is created."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(24)
        return iter([[torch.tensor(order[i : i + 2], dtype=torch.float32)[:, None]] for i in range(0, 24, 2)])


def _split_again(size: int) -> Any:
    part = torch.utils.data.random_split(_DATA, [24])[0]
    return DataLoader(part, size, sampler=list(range(24)))


STREAMS: dict[str, Any] = {
    "at iter": lambda size: DataLoader(_DATA, size, sampler=_Own(_DATA)),
    "at next": lambda size: DataLoader(_DATA, size, sampler=_AtNext()),
    "augmented": lambda size: DataLoader(_Augmented(), size, sampler=_AtNext()),
    "buffer": lambda size: DataLoader(_Shuffled(), size),
    "no DataLoader": lambda size: _Drawing(),
    "in the method": _split_again,
    "workers": lambda size: DataLoader(_Augmented(), size, sampler=_Own(_DATA), num_workers=1),
}


def streams(kinds: list[str], seeded: bool, backend: str = "ddp", accumulation: int = 1) -> dict[str, Any]:
    """The samples of these streams on each rank in two epochs with a dropout; a micro-batch has 2 samples."""
    found = {}
    for kind in kinds:
        ts.seed_everything(0 if seeded else 100 + RANK)
        size = int(os.environ.get("WORLD_SIZE", 1)) if backend == "ddp" else 1
        module = Seen(STREAMS[kind], STREAMS[kind], drops=True)
        run(module, backend, epochs=2, train_batch_size=2 * size * accumulation, gpu_batch_size_limit=2)
        found[kind] = {"seen": module.seen, "validated": module.validated}
    return found


class Part(IterableDataset[Tensor]):
    """Gives each rank its own part of `ends[-1]` numbers: those between two ends, or every n-th."""

    def __init__(self, count: int, ends: list[int] | None = None) -> None:
        self.count, self.ends = count, ends

    def __iter__(self) -> Iterator[Tensor]:
        size = int(os.environ["WORLD_SIZE"])
        chosen = range(RANK, self.count, size) if self.ends is None else range(*self.ends[RANK : RANK + 2])
        return (torch.tensor([float(index)]) for index in chosen)


def parts(
    ends: list[int],
    accumulation: int = 1,
    sharding: Any = "loader",
    weigh: bool = False,
    length: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """A run over a stream of which each rank reads the part between two of `ends`."""

    class Weighed(Seen):
        def batch_weight(self, batch: Any) -> float:
            return float(batch.sum())

    def loader(size: int) -> Any:
        made = DataLoader(Part(ends[-1], ends), 2)
        if length:
            made.dataset.__class__ = type("Sized", (Part,), {"__len__": lambda self: ends[RANK + 1] - ends[RANK]})
        return made

    module = (Weighed if weigh else Seen)(loader, loader)
    size = int(os.environ["WORLD_SIZE"])
    stop_at = changes.pop("stop_at", None)
    if changes.pop("every_step", False):
        changes["checkpointer_args"] = ts.DefaultCheckpointerArguments(every_n_steps=1)
    values = {"train_batch_size": 2 * size * accumulation, "gpu_batch_size_limit": 2, **changes}
    try:
        if stop_at is not None:
            run(module, data_sharding=sharding, max_steps=stop_at, **values)
            done, module = module.seen, (Weighed if weigh else Seen)(loader, loader)
            trainer = run(module, data_sharding=sharding, resume=True, **values)
            module.seen = done + [batch for batch in module.seen if batch]
        else:
            trainer = run(module, data_sharding=sharding, **values)
    except ts.TrainstackError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "weights": weights(module).tolist(),
        "seen": module.seen,
        "validated": module.validated,
        "loss": trainer.history.get_latest_metric("val/loss"),
        "train": trainer.history.get_latest_metric("train/loss_epoch"),
        "steps": trainer.global_steps_finished,
        "planned": trainer.plan.steps_per_epoch,
        "batches": trainer.view.batches,
    }


class _LaterOnly(IterableDataset[Tensor]):
    """Equal on all ranks up to a sample; `late` is its number."""

    def __init__(self, late: int) -> None:
        self.late = late

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(40):
            yield torch.tensor([float(index + (RANK if index >= self.late else 0))])


def undeclared(sharding: Any, directory: str) -> dict[str, str]:
    """The messages on streams that split themselves, and on one that is the same on all ranks."""
    known = _known_splitters()
    found = {}
    for kind, dataset in {
        "part": Part(24),
        "late": _LaterOnly(3),
        "later": _LaterOnly(22),
        "same": None,
        **known,
    }.items():
        for stage in ("train", "val"):
            stream = DataLoader(dataset, 2) if dataset is not None else DataLoader(_Shuffled(), 2)
            whole = DataLoader(_DATA, 2)
            module = Seen(
                lambda size, own=stream if stage == "train" else whole: own,
                lambda size, own=stream if stage == "val" else whole: own,
            )
            try:
                run(module, data_sharding=sharding, log_every=2, directory=directory)
            except ts.ModuleContractError as error:
                found[f"{kind} {stage}"] = f"{len(module.seen)} steps: {error}"
    return found


def _known_splitters() -> dict[str, Any]:
    """Stand-ins for datasets of other libraries that split themselves by rank."""
    streaming = type("StreamingDataset", (Part,), {"__module__": "streaming.base.dataset"})
    face = type("IterableDataset", (Part,), {"__module__": "datasets.iterable_dataset"})(24)
    face._distributed = types.SimpleNamespace(rank=RANK, world_size=2)  # type: ignore[attr-defined]

    def split_by_node(source: Any) -> Any:
        return source

    pipeline = type("WebDataset", (Part,), {})(24)
    pipeline.pipeline = [split_by_node]  # type: ignore[attr-defined]
    return {
        "mosaicml-streaming": type("Mine", (streaming,), {})(24),
        "Hugging Face": face,
        "webdataset": pipeline,
    }


def running_sum(on_main: bool, backend: str = "ddp") -> dict[str, Any]:
    """A validation that carries state from batch to batch."""

    class Sum:
        total = 0.0

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.total += float((preds * target).sum())

        def compute(self) -> float:
            return self.total

        def reset(self) -> None:
            self.total = 0.0

    class Stateful(Seen):
        evaluate_on_main = on_main
        sum, ended = 0.0, 0

        def on_begin_train_epoch(self, *_: Any) -> None:
            self.sum = 0.0

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.sum += float(batch[0].sum())
            return torch.tensor(self.sum), torch.full((len(batch[0]),), self.sum)

        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return outputs[1], batch[0].flatten()

        def on_end_val_epoch(self, global_step: int, loss: Any = None, x: Any = None, key: str = "default") -> None:
            super().on_end_val_epoch(global_step, loss, x, key)
            self.ended += 1

    data = TensorDataset(torch.arange(15.0)[:, None])
    module = Stateful(lambda size: DataLoader(data, size), lambda size: DataLoader(data, size))
    trainer = ts.Trainer(
        module, arguments("unused", backend=backend, val_batch_size=2, train_batch_size=4), metrics={"sum": Sum()}
    )
    trainer.train()
    values = {name: trainer.history.get_latest_metric(name) for name in ("val/loss", "val/sum")}
    return values | {"outputs": module.validated, "ended": module.ended}


def summing_metrics(backend: str = "ddp") -> dict[str, Any]:
    """Metrics of torchmetrics whose values double where every input counts twice."""
    import torchmetrics

    class Matrix(Seen):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return batch[0].flatten().long() % 3

        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return {"value": batch[0].sum(), "preds": outputs, "target": batch[0].flatten().long() % 2}

    data = TensorDataset(torch.arange(7.0)[:, None])
    module = Matrix(lambda size: DataLoader(data, size), lambda size: DataLoader(data, size))
    metrics = {
        "sum": torchmetrics.SumMetric(),
        "matrix": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3),
    }
    trainer = ts.Trainer(module, arguments("unused", backend=backend, val_batch_size=2), metrics=metrics)
    measured = trainer.validate().metrics
    return {"sum": measured["val/sum"], "matrix": measured["val/matrix"].tolist()}
