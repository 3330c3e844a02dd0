"""`record_sources` finds the sources of the records of a dataset, through torch's wrappers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainstack.trainer.data.epochs import datasets_in

Rows = Any
"""Numbers of records: a `range`, which needs no memory for its items, or an int64 array."""
RecordSources = dict[Hashable, list[Rows]]
"""For each source, the numbers of its records, in parts. A record may occur several times."""


def record_sources(dataset: Any) -> RecordSources:
    """The records that `dataset` reads, by their source and their number in it, without an order.

    The number of a record of a `TensorDataset` is the address of its row in the first tensor, so that slices and other
    datasets of the same tensors have the same numbers. Every other dataset except for `Subset` and `ConcatDataset` is a
    separate source.

    Args:
        dataset: a dataset with a length.
    """
    found: RecordSources = {}
    _collect(dataset, range(len(dataset)), found)
    return found


def most_repeats(dataset: Any) -> int:
    """The largest number of times that `dataset` has the same record, by `record_sources`."""
    return max((_repeats(parts) for parts in record_sources(dataset).values()), default=0)


def shares_records(one: Any, other: Any) -> bool:
    """Whether two datasets with lengths have a record in common, or `one` holds `other` in an attribute."""
    if any(dataset is other for dataset in datasets_held(one)):
        return True
    theirs = record_sources(other)
    return any(_overlap(parts, theirs.get(source, [])) for source, parts in record_sources(one).items())


def datasets_held(dataset: Any) -> Iterator[Any]:
    """`dataset`, and the datasets in its attributes and in theirs."""
    ahead, seen = [dataset], set[int]()
    while ahead:
        one = ahead.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            held = [*getattr(one, "__dict__", {}).values(), *datasets_in(one)]
            ahead += [value for value in held if isinstance(value, Dataset)]


def _collect(dataset: Any, rows: Rows, found: RecordSources) -> None:
    if not len(rows):
        return
    if isinstance(dataset, Subset) and (indices := _as_rows(dataset)) is not None:
        _collect(dataset.dataset, _select(indices, rows), found)
    elif isinstance(dataset, ConcatDataset):
        ends = dataset.cumulative_sizes
        for part, first, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            _collect(part, _within(rows, first, end), found)
    elif isinstance(dataset, TensorDataset) and _has_rows(dataset.tensors[0]):
        tensor = dataset.tensors[0]
        address, size = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
        found.setdefault(tensor.device, []).append(_moved(rows, address, size))
    else:
        found.setdefault(id(dataset), []).append(rows)


def _array(rows: Rows) -> Any:
    return np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


def _select(indices: Rows, rows: Rows) -> Rows:
    """`indices` at the places `rows`."""
    if isinstance(rows, range):
        return indices[rows.start : rows.stop : rows.step]
    return _moved(rows, indices.start, indices.step) if isinstance(indices, range) else indices[rows]


def _within(rows: Rows, first: int, end: int) -> Rows:
    """The numbers of `rows` in the interval [`first`, `end`), minus `first`."""
    if not isinstance(rows, range):
        return rows[(rows >= first) & (rows < end)] - first
    begin, stop = (max(0, -(-(edge - rows.start) // rows.step)) for edge in (first, end))
    return _moved(rows[begin:stop], -first, 1)


def _moved(rows: Rows, by: int, factor: int) -> Rows:
    """`by + factor * rows`."""
    if isinstance(rows, range):
        return range(by + factor * rows.start, by + factor * rows.stop, factor * rows.step)
    return by + factor * rows


def _repeats(parts: list[Rows]) -> int:
    if len(parts) == 1 and isinstance(parts[0], range):
        return 1  # a range has no repeats, and needs no array for a data set of any length
    return int(np.unique(np.concatenate([_array(rows) for rows in parts]), return_counts=True)[1].max())


def _overlap(parts: list[Rows], others: list[Rows]) -> bool:
    return any(_share_one(rows, theirs) for rows in parts for theirs in others)


def _share_one(rows: Rows, theirs: Rows) -> bool:
    if isinstance(rows, range) and isinstance(theirs, range) and rows.step == theirs.step:
        first, last = max(rows[0], theirs[0]), min(rows[-1], theirs[-1])
        return first <= last and (rows[0] - theirs[0]) % rows.step == 0
    if not isinstance(rows, range):
        rows, theirs = theirs, rows
    if isinstance(rows, range):  # one of them may be too long for an array
        within = _array(theirs)
        within = within[(within >= rows[0]) & (within <= rows[-1])]
        return bool(((within - rows[0]) % rows.step == 0).any())
    return bool(np.isin(rows, theirs).any())


def _as_rows(subset: Subset[Any]) -> Rows | None:
    """The nonnegative indices of `subset`: a range with a positive step, or int64; None if they are not numbers."""
    given: Any = subset.indices
    dataset: Any = subset.dataset
    if isinstance(given, range) and given.step > 0 and given.start >= 0 and given.stop <= len(dataset):
        return given
    indices: Any = np.asarray(given)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) != len(subset):
        return None
    return indices.astype(np.int64) % max(1, len(dataset))


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether the rows have separate memory."""
    return tensor.layout is torch.strided and tensor.stride(0) != 0 and tensor[:1].numel() > 0
