"""`RecordLog` keeps records in order of arrival, packed so that a save costs little in a long run."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

CHUNK = 4096
"""Records of a packed chunk. Each save writes the chunks as they are, and the records after them unpacked."""

Arrays = tuple[np.ndarray[Any, Any], ...]
"""For each record: the number of its metric (int32), its step and epoch (int64), its value (float64)."""

_KEYS = {"metrics": "int32", "steps": "int64", "epochs": "int64", "values": "float64"}
_RECORD_BYTES = sum(np.dtype(dtype).itemsize for dtype in _KEYS.values())


class RecordLog:
    """Records in order of arrival, in chunks that never change once they are full.

    A chunk is packed once, by zlib, and takes 4 to 10 bytes a record. Its bytes go into each checkpoint without a copy
    or a conversion. Only the records since the last chunk are converted at each save.
    """

    def __init__(self) -> None:
        self._recent: dict[str, Any] = {key: array(np.dtype(dtype).char) for key, dtype in _KEYS.items()}
        self._packed, self._used = np.empty(0, np.uint8), 0
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._sizes) * CHUNK + len(self._recent["values"])

    def append(self, metric: int, value: float, step: int, epoch: int) -> None:
        """Add a record of the metric with this number."""
        recent = self._recent
        recent["steps"].append(step)  # first: the step and the epoch may be too large for the array
        try:
            recent["epochs"].append(epoch)
        except OverflowError:
            recent["steps"].pop()
            raise
        recent["metrics"].append(metric)
        recent["values"].append(value)
        if len(recent["values"]) == CHUNK:
            self._pack()

    def truncate(self, length: int) -> None:
        """Forget all records but the first `length`."""
        chunks = length // CHUNK
        if chunks < len(self._sizes):
            used = sum(self._sizes[:chunks])
            chunk = _unpacked(self._packed[used : used + self._sizes[chunks]].tobytes())
            for column, values in zip(self._recent.values(), chunk, strict=True):
                del column[:]
                column.frombytes(values.tobytes())
            # a copy: states that were taken before share the memory
            self._packed, self._used, self._sizes = self._packed[:used].copy(), used, self._sizes[:chunks]
        for column in self._recent.values():
            del column[length - chunks * CHUNK :]

    def arrays(self) -> Iterator[Arrays]:
        """The records, some thousand at a time."""
        start = 0
        for size in self._sizes:
            yield _unpacked(self._packed[start : start + size].tobytes())
            start += size
        yield tuple(np.array(column) for column in self._recent.values())

    def get_state(self) -> dict[str, Any]:
        """Tensors. Those of the packed chunks share memory with this log, which never changes it."""
        recent = {key: torch.from_numpy(np.array(column)) for key, column in self._recent.items()}
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        return {"packed": torch.from_numpy(self._packed[: self._used]), "sizes": sizes, **recent}

    def update_state(self, state: Mapping[str, Any], metrics: int) -> None:
        """Replace everything by the result of `get_state` for this number of metrics.

        Raises:
            KeyError, TypeError, ValueError: `state` is something else. The log is not usable then.
        """
        sizes, packed = _array(state, "sizes", "int64").tolist(), _array(state, "packed", "uint8")
        if min(sizes, default=1) < 1 or sum(sizes) != len(packed):
            raise ValueError("the sizes of the packed chunks do not fit the chunks")
        columns = {key: _array(state, key, dtype) for key, dtype in _KEYS.items()}
        if len({len(column) for column in columns.values()}) > 1 or len(columns["values"]) >= CHUNK:
            raise ValueError("the columns of the records do not fit each other")
        self.__init__()  # type: ignore[misc]
        self._packed, self._used, self._sizes = packed.copy(), len(packed), sizes
        for key, column in columns.items():
            self._recent[key].frombytes(column.tobytes())
        for numbers, *_ in self.arrays():
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < metrics):
                raise ValueError("a record belongs to no metric")

    def _pack(self) -> None:
        chunk = _packed(tuple(np.array(column) for column in self._recent.values()))
        end = self._used + len(chunk)
        if end > len(self._packed):  # new memory: a checkpoint in the background may still read the old
            grown = np.empty(max(2 * len(self._packed), end), np.uint8)
            grown[: self._used] = self._packed[: self._used]
            self._packed = grown
        self._packed[self._used : end] = np.frombuffer(chunk, np.uint8)
        self._used = end
        self._sizes.append(len(chunk))
        for column in self._recent.values():
            del column[:]


def _packed(arrays: Arrays) -> bytes:
    """Differences of steps and epochs, and the bytes of equal weight side by side: most are zero or the same.

    The records of a metric are put together, since their values are like each other. They keep their order.
    """
    metrics, steps, epochs, values = arrays
    order = np.argsort(metrics, kind="stable")
    planes = (metrics, np.diff(steps[order], prepend=0), np.diff(epochs[order], prepend=0), values[order])
    return zlib.compress(b"".join(plane.view(np.uint8).reshape(CHUNK, -1).T.tobytes() for plane in planes), 1)


def _unpacked(chunk: bytes) -> Arrays:
    reader, size = zlib.decompressobj(), CHUNK * _RECORD_BYTES
    try:
        data = np.frombuffer(reader.decompress(chunk, size), np.uint8)  # not more, even if the chunk claims more
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) != size or reader.decompress(reader.unconsumed_tail, 1) or not reader.eof or reader.unused_data:
        raise ValueError("a packed chunk does not hold the records of one chunk")
    planes, start = [], 0
    for dtype in _KEYS.values():
        width = np.dtype(dtype).itemsize
        plane = data[start : start + CHUNK * width].reshape(width, CHUNK)
        planes.append(np.ascontiguousarray(plane.T).view(dtype).reshape(CHUNK))
        start += CHUNK * width
    metrics, *sorted_columns = planes
    steps, epochs, values = (np.empty_like(column) for column in sorted_columns)
    order = np.argsort(metrics, kind="stable")
    steps[order], epochs[order], values[order] = np.cumsum(planes[1]), np.cumsum(planes[2]), planes[3]
    return metrics, steps, epochs, values


def _array(state: Mapping[str, Any], key: str, dtype: str) -> np.ndarray[Any, Any]:
    tensor = state[key]
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not getattr(torch, dtype) or tensor.dim() != 1:
        raise ValueError(f"{key!r} is not a tensor of {dtype} values in one dimension")
    return tensor.detach().to("cpu").numpy()
