"""Data that a loader splits by rank: declarations, known splitters, and digests that find undeclared differences."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainstack._tensor_bytes import bytes_of
from trainstack.backends import Communicator
from trainstack.errors import ModuleContractError
from trainstack.trainer.data.epochs import datasets_in, samplers_of
from trainstack.trainer.data.step_batches import StepBatches


def check_not_presharded(loader: Any, world_size: int, declared: str, stage: str = "train") -> None:
    """Refuse a loader that is known to split the data by rank, because the library would split it a second time.

    Args:
        loader: the loader that the module returned.
        world_size: the number of ranks.
        declared: `data_sharding` of this stage. With "trainer", the digests of the ranks are compared instead.
        stage: the key of the stage in `data_sharding`.

    Raises:
        ModuleContractError: there are several ranks, and `declared` is "auto".
    """
    found = _find_split(loader) if world_size > 1 and declared == "auto" else None
    if found is not None:
        raise ModuleContractError(
            f"{found}, and so does the library: each process would use a part of its part. Write "
            f"data_sharding={{{stage!r}: 'loader'}} in TrainerArguments if each process has different batches, or "
            f"data_sharding={{{stage!r}: 'trainer'}} if all processes read the same batches. Or give the loader all of "
            "the data: DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset)), with the `sampler` "
            "argument of the method."
        )


def _find_split(loader: Any) -> str | None:
    """The known splitter of the data, as the beginning of a sentence; None if there is none."""
    datasets = list(datasets_in(getattr(loader, "dataset", None)))
    for owner in (*samplers_of(loader), *datasets, loader):
        # torch, Lightning and timm have the first name, accelerate and transformers the second.
        for name in ("num_replicas", "num_processes"):
            parts = getattr(owner, name, None)
            if type(parts) is int and parts > 1:
                return f"a {type(owner).__name__} divides the data among {parts} processes"
    for owner in (*datasets, loader):
        for kind in type(owner).__mro__:
            if kind.__name__ == "StreamingDataset" and kind.__module__.partition(".")[0] == "streaming":
                return f"a {type(owner).__name__} (mosaicml-streaming) gives each process its own part of the data"
        node: Any = getattr(owner, "_distributed", None)  # private, a DistributedConfig in datasets 5.2.0
        if type(owner).__module__.partition(".")[0] == "datasets" and getattr(node, "world_size", 1) > 1:
            return f"split_dataset_by_node gave each of {node.world_size} processes its own part of the {_name(owner)}"
        if any(getattr(stage, "__name__", "") == "split_by_node" for stage in _stages(owner)):
            return f"split_by_node gives each process its own part of the {_name(owner)}"
    return None


def _name(owner: Any) -> str:
    return type(owner).__name__


def _stages(owner: Any) -> Iterator[Any]:
    """The functions of a pipeline of webdataset 1.0.2, and of the dataset of a loader in it."""
    pipeline = getattr(owner, "pipeline", None)
    for stage in pipeline if isinstance(pipeline, list) else ():
        yield getattr(stage, "func", stage)  # a functools.partial
        yield from _stages(stage)
        if isinstance(stage, DataLoader):
            yield from _stages(stage.dataset)


_SAMPLED_ELEMENTS = 2048
"""The largest number of elements of a tensor in a digest, so that a digest takes microseconds."""


class StreamDigest:
    """A running digest of the batches that one rank has read from a loader with a custom order.

    It is computed on the host, before batches are moved. Tensors on another device are not read. Of large tensors it
    uses elements at equal distances, unless `whole` is True.
    """

    batches: int
    value: int

    def __init__(self) -> None:
        self.batches = self.value = 0

    def add(self, batch: Any, *, whole: bool = False) -> None:
        """Add a batch. Equal batches on all ranks give equal digests."""
        self.batches += 1
        self.value = _digest(batch, self.value, whole, 0)

    def read(self, batches: Iterator[tuple[Any, int | None]]) -> Iterator[tuple[Any, int | None]]:
        """Add `batches`, given with their numbers of samples, while they are read."""
        for batch, count in batches:
            self.add(batch)
            yield batch, count
            del batch


def _digest(item: Any, value: int, whole: bool, depth: int) -> int:
    if isinstance(item, Tensor):
        value = zlib.crc32(f"{tuple(item.shape)}{item.dtype}".encode(), value)
        if type(item) is not Tensor or item.device.type != "cpu" or item.layout is not torch.strided:
            return value
        if item.is_quantized or item.is_conj() or item.is_neg() or not item.numel():
            return value
        flat = item.detach().reshape(-1)
        step = 1 if whole else -(-flat.shape[0] // _SAMPLED_ELEMENTS)
        return zlib.crc32(bytes_of(flat[::step]).numpy().data, value)
    if isinstance(item, np.ndarray) and item.dtype.hasobject is False:
        value = zlib.crc32(f"{item.shape}{item.dtype}".encode(), value)
        step = 1 if whole else -(-item.size // _SAMPLED_ELEMENTS) or 1
        return zlib.crc32(np.ascontiguousarray(item.reshape(-1)[::step]).view(np.uint8).data, value)
    if item is None or isinstance(item, str | bytes | bytearray | int | float | complex | range | np.generic):
        return zlib.crc32(item if isinstance(item, bytes | bytearray) else f"{item!r}".encode(), value)
    if isinstance(item, Set):  # the order of its items may differ between processes
        items = sorted(_digest(part, 0, whole, depth + 1) for part in item) if depth < 8 else []
        return zlib.crc32(f"{type(item).__name__}{items}".encode(), value)
    if depth < 8:  # limits the recursion in containers that contain themselves
        for part in _parts(item):
            value = _digest(part, value, whole, depth + 1)
    return zlib.crc32(type(item).__name__.encode(), value)


def _parts(item: Any) -> Iterator[Any]:
    """The items of a container, in an order that does not depend on the process."""
    if isinstance(item, np.ndarray):
        yield from item.reshape(-1).tolist()
    elif isinstance(item, Mapping):
        for pair in item.items():
            yield from pair
    elif isinstance(item, list | tuple | deque):
        yield from item
    elif is_dataclass(item) and not isinstance(item, type):
        yield from (getattr(item, field.name, None) for field in fields(item))
    elif not isinstance(item, type) and not callable(item):
        yield from getattr(item, "__dict__", {}).values()  # a container of another library


class StreamCheck:
    """Finds differences between the ranks in a stream that must be equal on all of them.

    The ranks compare the first batch before the first forward pass, all batches of the first step before its update,
    and all batches so far in each call of `compare`. All ranks call it together.

    Args:
        comm: the communicator.
        first_step: the number of batches that all ranks read for a step.
    """

    def __init__(self, comm: Communicator, first_step: int) -> None:
        self._comm, self._first_step, self._digest, self._name = comm, first_step, StreamDigest(), ""

    def read(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Add `batches` of `loader` while they are read."""
        digest, self._name = self._digest, stream_name(loader)
        first = not digest.batches
        for batch in batches:
            digest.add(batch, whole=digest.batches < self._first_step)
            if first:
                self.compare()
                first = False
            yield batch
            del batch
        if first:  # this rank's stream is empty, and the others compare their first batch
            self.compare()

    def begin(self, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
        """Wrap `steps`, so that the ranks compare their batches after the micro-batches of the first step."""
        for first in steps:
            first.micro_batches = self._compare_after(first.micro_batches)
            yield first
            break
        yield from steps

    def _compare_after(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        yield from micro_batches
        self.compare()

    def compare(self) -> None:
        """Compare the batches that the ranks have read.

        Raises:
            ModuleContractError: they have read different batches; raised on all ranks.
        """
        refuse_unlike_streams(self._name, self._comm.gather((self._digest.batches, self._digest.value)), "train")


def stream_name(loader: Any) -> str:
    """The classes of the loader and its dataset, for messages."""
    dataset = getattr(loader, "dataset", None)
    return f"{_name(loader)} over a {_name(dataset)}" if dataset is not None else _name(loader)


def refuse_unlike_streams(name: str, digests: list[Any], stage: str) -> None:
    """Refuse batches that differ between ranks.

    Args:
        name: the name of the loader.
        digests: `(batches, value)` of each rank.
        stage: the key of the stage in `data_sharding`.

    Raises:
        ModuleContractError: they differ.
    """
    unlike = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise ModuleContractError(
            f"rank {', '.join(unlike)} read other batches than rank 0 from the {stage} loader, a {name}: "
            f"{', '.join(f'{count} batches with digest {value:08x}' for count, value in digests[:8])}. All processes "
            "must read the same batches, of which each uses its part. If the loader gives each process its own part "
            f"of the data, write data_sharding={{{stage!r}: 'loader'}} in TrainerArguments. If not, let it draw from "
            "the generators of torch, numpy and random, which are equal on all processes while it is read, and not "
            "from the rank, the clock or the operating system."
        )
