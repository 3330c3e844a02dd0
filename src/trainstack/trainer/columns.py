"""The records of metrics as packed arrays, and all of them as three tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch


class Record(NamedTuple):
    """One value of one metric. `step` counts optimizer updates, `epoch` is the epoch it was measured in."""

    name: str
    value: float
    step: int
    epoch: int


class Column:
    """The records of one metric as three packed arrays: 24 bytes a record."""

    __slots__ = ("epochs", "flushed", "name", "steps", "values")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values = array("d")
        self.steps = array("q")
        self.epochs = array("q")
        self.flushed = 0

    def append(self, value: float, step: int, epoch: int) -> None:
        """Add a record."""
        self.values.append(value)
        self.steps.append(step)
        self.epochs.append(epoch)

    def record(self, index: int) -> Record:
        """The record at `index`."""
        return Record(self.name, self.values[index], self.steps[index], self.epochs[index])

    def flushed_at(self, step: int) -> int:
        """How many of the records that were flushed belong to `step`."""
        return int(np.count_nonzero(np.array(self.steps)[: self.flushed] == step))


def pack(columns: Iterable[Column]) -> dict[str, Any]:
    """Names and lengths of `columns`, and their records one column after the other, as tensors."""
    kept = list(columns)
    return {
        "names": [column.name for column in kept],
        "lengths": [len(column.values) for column in kept],
        "values": _joined([column.values for column in kept], np.float64),
        "steps": _joined([column.steps for column in kept], np.int64),
        "epochs": _joined([column.epochs for column in kept], np.int64),
    }


def unpack(state: Mapping[str, Any]) -> dict[str, Column]:
    """The columns of what `pack` returned, by name; all records count as flushed.

    Raises:
        KeyError, TypeError, ValueError: `state` is something else.
    """
    names, lengths = list(map(str, state["names"])), list(map(int, state["lengths"]))
    if len(set(names)) != len(names) or len(lengths) != len(names) or min(lengths, default=1) < 1:
        raise ValueError("names and lengths do not fit each other")
    arrays = [_checked(state, key, sum(lengths)) for key in ("values", "steps", "epochs")]
    columns, start = {}, 0
    for name, length in zip(names, lengths, strict=True):
        column = columns[name] = Column(name)
        own: tuple[array[Any], ...] = (column.values, column.steps, column.epochs)
        for packed, source in zip(own, arrays, strict=True):
            packed.frombytes(source[start : start + length].tobytes())
        column.flushed = length
        start += length
    return columns


def _joined(parts: list[array[Any]], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.array(part, dtype) for part in parts)]))


def _checked(state: Mapping[str, Any], key: str, length: int) -> np.ndarray[Any, Any]:
    tensor, dtype = state[key], torch.float64 if key == "values" else torch.int64
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype or tensor.shape != (length,):
        raise ValueError(f"{key!r} is not a tensor of {length} {dtype} values")
    return tensor.to("cpu").numpy()
