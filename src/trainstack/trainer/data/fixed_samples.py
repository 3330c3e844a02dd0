"""Hashes of three fixed samples, to compare the datasets of runs and ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainstack.trainer.core.fingerprints import hash_numbers, hash_value
from trainstack.trainer.core.random_state import preserve_host_rng
from trainstack.trainer.data.loading import SeededDataset
from trainstack.trainer.data.step_batches import unsupported_order_reason

MAX_ITEMS = 1000
"""The largest number of items of a container that is copied. Larger ones are data, which the copy shares."""
MAX_COPY = 2**24
"""The largest number of bytes of a copy, without shared objects. A larger dataset is not copied."""
MAX_OBJECTS = 20_000
"""The largest number of objects of a dataset that is copied. The copy takes about 2 microseconds for each."""
SMALL = 2**16
"""The largest number of bytes of a tensor or an array that may be a counter, and is copied."""
REPEATS = 8
"""The number of fetches that find random samples. They miss a coin flip on two ranks in one of 10,000 starts."""

Samples = dict[str, dict[str, str]]
"""By index: hashes of the numbers in a sample, by their place in it."""


def sample_hashes(loader: Any, seed: int) -> Samples:
    """Hashes of the first, the middle and the last sample, as the library loads them in epoch 0.

    The samples are fetched from a copy, so that attributes, generators, counters and caches in small containers and
    arrays of the user's dataset do not change. Large ones are shared, so writes of a fetch to them remain. The copy is
    made by pickle, with the `__getstate__` of the dataset. There are no hashes of a dataset that cannot be copied or
    has no indices, and of a sample that cannot be fetched.

    Args:
        loader: the training loader.
        seed: the seed of the run.
    """
    dataset = _copy_of(loader)
    return {} if dataset is None else _fetch(dataset, len(loader.dataset), seed)


def random_places(loader: Any, seed: int) -> tuple[Samples, bool]:
    """Fetch the samples of `sample_hashes` several times, to find those with random numbers that are not seeded.

    Returns:
        the places of numbers that differed between fetches, and whether the fetches left the copy unchanged: its
        generators, counters and caches.
    """
    dataset = _copy_of(loader)
    if dataset is None:
        return {}, False
    before = _contents(dataset)
    first, *again = (_fetch(dataset, len(loader.dataset), seed) for _ in range(REPEATS))
    found: Samples = {}
    for samples in again:
        for index in {**first, **samples}:
            one, other = first.get(index, {}), samples.get(index, {})
            places = {place: "" for place in {**one, **other} if one.get(place) != other.get(place)}
            found[index] = found.get(index, {}) | places
    after = _contents(dataset)
    return found, before is not None and after is not None and before.equals(after)


def _copy_of(loader: Any) -> Any:
    if loader is None or unsupported_order_reason(loader) is not None:
        return None
    return copy_dataset(loader.dataset)


def _fetch(dataset: Any, count: int, seed: int) -> Samples:
    seeded, found = SeededDataset(dataset, seed), Samples()
    with preserve_host_rng(), seeded.generators.preserved():
        for index in sorted({0, count // 2, count - 1}):
            try:
                found[str(index)] = dict(hash_numbers(seeded.__getitems__([(0, index)])[0]))
            except Exception:
                continue  # the step that needs the sample reports it
    return found


def copy_dataset(dataset: Any) -> Any:
    """A copy of `dataset` that shares large arrays and containers, functions and modules; None if that fails."""
    contents = _contents(dataset)
    try:
        return None if contents is None else contents.restore()
    except Exception:  # a class may raise anything when it is unpickled
        return None


class _Contents:
    """An object as bytes, except for `parts`: shared objects, and copies of small arrays."""

    def __init__(self, value: Any) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        copier = _Copier(_Limited(), self.buffers)
        copier.dump(value)
        self.parts, self.written = copier.parts, copier.sink.getvalue()

    def restore(self) -> Any:
        return _Restorer(io.BytesIO(self.written), self.parts, self.buffers).load()

    def equals(self, other: _Contents) -> bool:
        if self.written != other.written or len(self.parts) != len(other.parts):
            return False
        return all(a is b or _are_alike(a, b) for a, b in zip(self.parts, other.parts, strict=True))


def _contents(value: Any) -> _Contents | None:
    try:
        return _Contents(value)
    except Exception:  # a class may raise anything when it is pickled
        return None


def _are_alike(one: Any, other: Any) -> bool:
    return _is_small(one) and _is_small(other) and hash_value(one) == hash_value(other)


def _is_small(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.nbytes <= SMALL and not value.dtype.hasobject
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and not value.requires_grad and value.nbytes <= SMALL


class _Limited(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MAX_COPY:
            raise OverflowError
        return super().write(data)


class _Copier(pickle.Pickler):
    """Writes all objects except shared ones. The bytes are only read by this process."""

    def __init__(self, sink: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(sink, protocol=5, buffer_callback=buffers.append)  # 5 is the first with `buffer_callback`
        self.sink, self.parts = sink, list[Any]()
        self._numbers = dict[int, int]()
        self._kept = list[Any]()  # holds the objects, so that no `id` is reused
        self._free, self._count = MAX_COPY, 0

    def persistent_id(self, obj: Any) -> int | None:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise OverflowError
        large = isinstance(obj, list | tuple | Mapping | set | bytes | str) and len(obj) > MAX_ITEMS
        if large or isinstance(obj, Tensor | np.ndarray | nn.Module | type | FunctionType | ModuleType):
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self.parts)
                self._kept.append(obj)
                self.parts.append(self._part(obj))
            return self._numbers[id(obj)]
        return None

    def _part(self, obj: Any) -> Any:
        if not _is_small(obj) or obj.nbytes > self._free:
            return obj
        self._free -= obj.nbytes
        return obj.clone() if isinstance(obj, Tensor) else obj.copy(order="K")


class _Restorer(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, shared: list[Any], buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(source, buffers=buffers)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]
