"""Data that is split by rank: declarations, known splitters, and digests that find other differences."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainstack.backends import Communicator
from trainstack.errors import ModuleContractError
from trainstack.trainer.data.epochs import datasets_in, samplers_of
from trainstack.trainer.data.step_batches import StepBatches


def check_not_presharded(loader: Any, world_size: int, declared: str, stage: str = "train") -> None:
    """Refuse a loader that is known to split the data by rank: the library would split it a second time.

    Args:
        loader: what the module returned.
        world_size: number of ranks.
        declared: `data_sharding` of this stage. With "trainer" the digests of the ranks decide.
        stage: by which `data_sharding` names it.

    Raises:
        ModuleContractError: there are several ranks, and nothing is declared.
    """
    found = _find_split(loader) if world_size > 1 and declared == "auto" else None
    if found is not None:
        raise ModuleContractError(
            f"{found}, and so does the library: each process would use a part of its part. Write "
            f"data_sharding={{{stage!r}: 'loader'}} in TrainerArguments if the batches of each process are its own, or "
            f"data_sharding={{{stage!r}: 'trainer'}} if all processes read the same batches. Or give the loader all of "
            "the data: DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset)), with the sampler that the "
            "method is handed."
        )


def _find_split(loader: Any) -> str | None:
    """The known splitter of the data, as the beginning of a sentence; None if there is none."""
    datasets = list(datasets_in(getattr(loader, "dataset", None)))
    for owner in (*samplers_of(loader), *datasets, loader):
        # torch, Lightning and timm have the first name, accelerate and transformers the second.
        for name in ("num_replicas", "num_processes"):
            parts = getattr(owner, name, None)
            if type(parts) is int and parts > 1:
                return f"a {type(owner).__name__} shares the data out among {parts} processes"
    for owner in (*datasets, loader):
        for kind in type(owner).__mro__:
            if kind.__name__ == "StreamingDataset" and kind.__module__.partition(".")[0] == "streaming":
                return f"a {type(owner).__name__} (mosaicml-streaming) gives each process its own part of the data"
        node: Any = getattr(owner, "_distributed", None)  # datasets 5.2.0: a DistributedConfig
        if type(owner).__module__.partition(".")[0] == "datasets" and getattr(node, "world_size", 1) > 1:
            return f"split_dataset_by_node gave each of {node.world_size} processes its own part of the {_name(owner)}"
        if any(getattr(stage, "__name__", "") == "split_by_node" for stage in _stages(owner)):
            return f"split_by_node gives each process its own part of the {_name(owner)}"
    return None


def _name(owner: Any) -> str:
    return type(owner).__name__


def _stages(owner: Any) -> Iterator[Any]:
    """The functions of a pipeline of webdataset 1.0.2, of a loader's dataset included."""
    pipeline = getattr(owner, "pipeline", None)
    for stage in pipeline if isinstance(pipeline, list) else ():
        yield getattr(stage, "func", stage)  # a functools.partial
        yield from _stages(stage)
        if isinstance(stage, DataLoader):
            yield from _stages(stage.dataset)


_SAMPLED_ELEMENTS = 2048


class StreamDigest:
    """A running digest of the batches that one rank has read from a loader that keeps its own order.

    It is made on the host, of the loader's batches as they come. Tensors of a device are not read. Of large tensors it
    takes elements at equal distances, unless `whole` asks for all.
    """

    batches: int
    value: int

    def __init__(self) -> None:
        self.batches = self.value = 0

    def add(self, batch: Any, *, whole: bool = False) -> None:
        """Take in a batch; equal batches on all ranks give equal digests."""
        self.batches += 1
        self.value = _digest(batch, self.value, whole, 0)

    def read(self, batches: Iterator[tuple[Any, int | None]]) -> Iterator[tuple[Any, int | None]]:
        """`batches` with their numbers of samples, taken in as they are read."""
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
        return zlib.crc32(flat[::step].contiguous().view(torch.uint8).numpy().data, value)
    if isinstance(item, np.ndarray) and item.dtype.hasobject is False:
        value = zlib.crc32(f"{item.shape}{item.dtype}".encode(), value)
        step = 1 if whole else -(-item.size // _SAMPLED_ELEMENTS) or 1
        return zlib.crc32(np.ascontiguousarray(item.reshape(-1)[::step]).view(np.uint8).data, value)
    if item is None or isinstance(item, str | bytes | int | float | complex | np.generic):
        return zlib.crc32(item if isinstance(item, bytes) else f"{item!r}".encode(), value)
    if depth < 8:
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
    elif isinstance(item, list | tuple):
        yield from item
    elif is_dataclass(item) and not isinstance(item, type):
        yield from (getattr(item, field.name, None) for field in fields(item))
    elif not isinstance(item, type) and not callable(item):
        yield from getattr(item, "__dict__", {}).values()  # containers of other libraries


class StreamCheck:
    """Finds a stream that is expected to be the same on all ranks and is not.

    The ranks compare the first batch before the first forward pass, all batches of the first step before its update,
    and the batches read so far whenever `compare` is called. All ranks call it together.

    Args:
        comm: to the other ranks.
        first_step: batches that all ranks read for a step.
    """

    def __init__(self, comm: Communicator, first_step: int) -> None:
        self._comm, self._first_step, self._digest, self._name = comm, first_step, StreamDigest(), ""

    def read(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches` of `loader`, taken in as they are read."""
        digest, self._name = self._digest, stream_name(loader)
        first = not digest.batches
        for batch in batches:
            digest.add(batch, whole=digest.batches < self._first_step)
            if first:
                self.compare()
                first = False
            yield batch
            del batch
        if first:  # the stream is empty here
            self.compare()

    def begin(self, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
        """`steps`; the ranks compare what they have read when the first of them has run its micro-batches."""
        for first in steps:
            first.micro_batches = self._compare_after(first.micro_batches)
            yield first
            break
        yield from steps

    def _compare_after(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        yield from micro_batches
        self.compare()

    def compare(self) -> None:
        """Compare what has been read.

        Raises:
            ModuleContractError: on all ranks, where they have read different batches.
        """
        refuse_unlike_streams(self._name, self._comm.gather((self._digest.batches, self._digest.value)), "train")


def stream_name(loader: Any) -> str:
    """The class of what gives the batches, for messages."""
    dataset = getattr(loader, "dataset", None)
    return f"{_name(loader)} over a {_name(dataset)}" if dataset is not None else _name(loader)


def refuse_unlike_streams(name: str, digests: list[Any], stage: str) -> None:
    """Refuse batches that differ between ranks.

    Args:
        name: of the loader.
        digests: `(batches, value)` of each rank.
        stage: by which `data_sharding` names it.

    Raises:
        ModuleContractError: they differ.
    """
    unlike = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise ModuleContractError(
            f"rank {', '.join(unlike)} read other batches than rank 0 from the {stage} loader, a {name}: "
            f"{', '.join(f'{count} batches with digest {value:08x}' for count, value in digests[:8])}. All processes "
            "have to read the same batches, of which each uses its part. If the loader gives each process its own part "
            f"of the data, write data_sharding={{{stage!r}: 'loader'}} in TrainerArguments. If not, let it draw from "
            "the generators of torch, numpy and random, which are alike on all processes while it is read, and not "
            "from the rank, the clock or the operating system."
        )
