"""The training and validation data: datasets, collate functions, and loaders with their own order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from tools.differential.networks import OUT
from tools.differential.trace import Trace
from trainstack import LengthGroupedSampler

if TYPE_CHECKING:
    from tools.differential.case import Case

INDEXED = (
    "tensors",
    "subset",
    "channels last",
    "map",
    "dicts",
    "getitems",
    "list",
    "own getitem",
    "length groups",
    "several loaders",
)
"""Data for which the library determines the order."""
LOADERS = (
    "iterable data set",
    "list of batches",
    "batch sampler",
    "sampler",
    "own loader",
    "recycling loader",
    "loader with own __iter__",
    "loader with own _get_iterator",
)
"""Loaders that determine their order."""

INDEX_KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64": lambda rows: np.array(rows, dtype=np.int64),
    "int32": lambda rows: np.array(rows, dtype=np.int32),
    **{kind: partial(np.array, dtype=kind) for kind in ("int8", "int16", "uint8", "uint16", "uint32", "uint64")},
    "list of numpy integers": lambda rows: list(np.array(rows, dtype=np.int64)),
    "tensor": torch.tensor,
    "int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
}


def make_inputs(case: Case, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs for the network of the case, and targets."""
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if case.double else torch.float32
    if case.network == "tokens":
        x = torch.randint(0, 11, (count, 5), generator=draw)
    else:
        shape = {"flat": (6,), "image": (2, 4, 4), "series": (4, 3)}[case.network]
        x = torch.randn(count, *shape, generator=draw, dtype=dtype)
    return x, torch.randn(count, OUT, generator=draw, dtype=dtype)


class Recorded(Dataset[Any]):
    """Records the requested samples, and draws random numbers for each."""

    def __init__(
        self, tensors: tuple[Tensor, Tensor], trace: Trace, *, dicts: bool = False, share: float = 0.1
    ) -> None:
        self.tensors, self.trace, self.dicts, self.share = tensors, trace, dicts, share
        self.scale = 1.0

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        self.trace.add("data", "sample", index, noise)
        x, y = (tensor[index] for tensor in self.tensors)
        y = (y + self.share * noise.to(y.dtype)) * self.scale
        return {"x": x, "y": y} if self.dicts else (x, y)


class Fetches(Recorded):
    """Loads several samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.trace.add("data", "samples", indices)
        return [self[index] for index in indices]


class OwnGetItem(TensorDataset):
    """Overrides a method of a class of torch."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x, 2 * y


class _Stream(IterableDataset[Any]):
    def __init__(self, dataset: Recorded) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


class _Batches:
    """A batch sampler with batches of different sizes, in random order."""

    def __init__(self, sizes: list[int]) -> None:
        ends = np.cumsum(sizes).tolist()
        self.rows = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.rows[position] for position in torch.randperm(len(self.rows)).tolist())


class _OwnLoader:
    """Makes batches; with `recycles` always in the same memory."""

    def __init__(self, tensors: tuple[Tensor, Tensor], sizes: list[int], recycles: bool, trace: Trace) -> None:
        self.tensors, self.sizes, self.recycles, self.trace = tensors, sizes, recycles, trace
        self.memory = [torch.empty_like(tensor[: max(sizes)]) for tensor in tensors]

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        begin = 0
        for size in self.sizes:
            self.trace.add("data", "batch", begin)
            parts = [tensor[begin : begin + size] for tensor in self.tensors]
            if self.recycles:
                parts = [memory[:size].copy_(part) for memory, part in zip(self.memory, parts, strict=True)]
            yield parts
            begin += size


class _NoLength(_OwnLoader):
    __len__ = None  # type: ignore[assignment]


class _OwnIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([x, y / 2] for x, y in super().__iter__())


class _OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        batches = super()._get_iterator()
        return ([x, y / 2] for x, y in batches)


def batch_sizes(samples: int) -> list[int]:
    """Different sizes of batches with the sum `samples`."""
    sizes, kinds = [], (3, 2, 1, 3, 4)
    while sum(sizes) < samples:
        sizes.append(min(kinds[len(sizes) % len(kinds)], samples - sum(sizes)))
    return sizes


class TrainingSet:
    """The training data of a case."""

    def __init__(self, case: Case, trace: Trace) -> None:
        self.case, self.trace = case, trace
        self.tensors = make_inputs(case, case.samples, seed=case.number + 1)
        self.dataset = self._dataset()
        self.lengths = [1 + (7 * index * index + 3 * index) % 11 for index in range(len(self.dataset))]
        self._collate = _recycling() if case.collate == "recycles" else None

    @property
    def second(self) -> Any:
        """The data of the second loader: two samples for each of the first loader."""
        x, y = self.tensors
        count = 2 * max(self.case.samples // 2, self.case.batch)
        rows = torch.arange(count) % len(x)
        return TensorDataset(x[rows], 0.5 * y[rows])

    def _dataset(self) -> Any:
        case, tensors = self.case, self.tensors
        # Random numbers belong to a sample only if the library loads samples individually.
        share = 0.0 if case.additive and case.data not in ("map", "dicts", "several loaders") else 0.1
        if case.data == "subset":
            rows = [index for index in range(case.samples) if index % 4]
            return Subset(TensorDataset(*tensors), INDEX_KINDS[case.indices](rows[::-1]))
        if case.data == "channels last":
            return TensorDataset(tensors[0].to(memory_format=torch.channels_last), tensors[1])
        if case.data == "list":
            return list(zip(*tensors, strict=True))
        if case.data == "own getitem":
            return OwnGetItem(*tensors)
        if case.data == "getitems":
            return Fetches(tensors, self.trace, share=share)
        if case.data in ("map", "dicts", "iterable data set", "batch sampler", "sampler", "several loaders"):
            return Recorded(tensors, self.trace, dicts=case.data == "dicts", share=share)
        return TensorDataset(*tensors)

    def collate(self, rows: list[Any]) -> Any:
        """Collate in the way of the case, and record the call."""
        self.trace.add("data", "collate", len(rows), torch.rand(()))
        return default_collate(rows) if self._collate is None else self._collate(rows)

    def loader(self, sampler: type, batch_size: int) -> Any:
        """The result of `get_train_dataloader`."""
        case, dataset = self.case, self.dataset
        options: dict[str, Any] = {"collate_fn": self.collate} if case.collate in ("own", "recycles") else {}
        if case.data in INDEXED:
            order = sampler(dataset) if case.shuffle else SequentialSampler(dataset)
            if case.data == "length groups":
                order = LengthGroupedSampler(self.lengths)
            if case.data == "several loaders":
                options["drop_last"] = case.drop_last
                first = DataLoader(dataset, batch_size, sampler=order, **options)
                return {"first": first, "second": DataLoader(self.second, 2 * batch_size, shuffle=True, **options)}
            if case.workers:
                options |= {"num_workers": 1, "worker_init_fn": prepare_worker}
            return DataLoader(dataset, batch_size, sampler=order, drop_last=case.drop_last, **options)
        sizes = batch_sizes(case.samples)
        if case.data == "iterable data set":
            return DataLoader(_Stream(dataset), batch_size, drop_last=case.drop_last, **options)
        if case.data == "batch sampler":
            return DataLoader(dataset, batch_sampler=_Batches(sizes), **options)
        if case.data == "sampler":
            drawn = WeightedRandomSampler([1.0 + index for index in range(len(dataset))], case.samples)
            return DataLoader(dataset, batch_size, sampler=drawn, **options)
        if case.data == "list of batches":
            return list(_OwnLoader(self.tensors, sizes, False, Trace()))
        if case.data in ("own loader", "recycling loader"):
            kind = _NoLength if case.no_length else _OwnLoader
            return kind(self.tensors, sizes, case.data == "recycling loader", self.trace)
        own = _OwnIter if case.data == "loader with own __iter__" else _OwnIterator
        return own(dataset, batch_size, shuffle=case.shuffle, drop_last=case.drop_last)


SCALE = 3.0


def prepare_worker(worker: int) -> None:
    """Prepare the dataset of a worker, as in the documentation of torch."""
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = SCALE  # type: ignore[attr-defined]


def _recycling() -> Callable[[list[Any]], Any]:
    """A collate function that writes every batch into the same memory."""
    memory: list[Tensor] = []

    def collate(rows: list[Any]) -> list[Tensor]:
        parts = [torch.stack(column) for column in zip(*rows, strict=True)]
        if not memory:
            memory.extend(torch.empty(64, *part.shape[1:], dtype=part.dtype) for part in parts)
        return [kept[: len(rows)].copy_(part) for kept, part in zip(memory, parts, strict=True)]

    return collate


@contextmanager
def collate_map(case: Case, trace: Trace) -> Iterator[None]:
    """A block in which a case with `collate="map"` has an entry in the table of collate functions of torch."""
    if case.collate != "map":
        yield
        return
    usual = default_collate_fn_map[Tensor]

    def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
        trace.add("data", "collate tensors", len(batch))
        return 1 * usual(batch, collate_fn_map=collate_fn_map)

    default_collate_fn_map[Tensor] = collate_tensors
    try:
        yield
    finally:
        default_collate_fn_map[Tensor] = usual


class _Draws(TensorDataset):
    """Draws random numbers without using them."""

    def __getitem__(self, index: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()
        return super().__getitem__(index)


def validation_loaders(case: Case, sampler: type, batch_size: int) -> Any:
    """The result of `get_val_dataloaders`."""
    if not case.val:
        return None
    x, y = make_inputs(case, 5, seed=case.number + 2)
    drawing = _Draws(x, y)
    one = DataLoader(drawing, batch_size, sampler=sampler(drawing))
    if case.val == "one":
        return one
    ready = [[x[:2], y[:2]], [x[2:], y[2:]]]
    return {"default": one, "other": DataLoader(TensorDataset(x[1:], y[1:]), batch_size), "ready": ready}
