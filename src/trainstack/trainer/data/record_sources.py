"""`record_sources` tells from where a dataset reads its records, through torch's wrappers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainstack.trainer.data.epochs import datasets_in

RecordSources = dict[Hashable, Any]
"""For each source an array of int64 with the number of each record in it. One record may be there several times."""


def record_sources(dataset: Any) -> RecordSources:
    """The records that `dataset` reads, each by its source and its number there, in no order.

    Records of a `TensorDataset` are the addresses of the rows of its first tensor, so that slices and other datasets
    of the same tensors have the same ones. Every other dataset but `Subset` and `ConcatDataset` is a source by itself.

    Args:
        dataset: with a length.
    """
    found: dict[Hashable, list[Any]] = {}
    _collect(dataset, np.arange(len(dataset)), found)
    return {source: np.concatenate(parts) for source, parts in found.items()}


def most_repeats(dataset: Any) -> int:
    """How often the record that `dataset` has most often is in it, as far as `record_sources` can tell."""
    counts = (np.unique(rows, return_counts=True)[1] for rows in record_sources(dataset).values() if len(rows))
    return max((int(count.max()) for count in counts), default=0)


def shares_records(one: Any, other: Any) -> bool:
    """Whether two datasets with lengths have a record in common, or `one` holds `other` in an attribute."""
    if any(dataset is other for dataset in datasets_held(one)):
        return True
    theirs = record_sources(other)
    return any(np.isin(rows, theirs.get(source, ())).any() for source, rows in record_sources(one).items())


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


def _collect(dataset: Any, rows: Any, found: dict[Hashable, list[Any]]) -> None:
    if isinstance(dataset, Subset) and (indices := _as_rows(dataset)) is not None:
        _collect(dataset.dataset, indices[rows], found)
    elif isinstance(dataset, ConcatDataset):
        ends = dataset.cumulative_sizes
        for part, first, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            _collect(part, rows[(rows >= first) & (rows < end)] - first, found)
    elif isinstance(dataset, TensorDataset) and _has_rows(dataset.tensors[0]):
        tensor = dataset.tensors[0]
        found.setdefault(tensor.device, []).append(tensor.data_ptr() + rows * tensor.stride(0) * tensor.element_size())
    else:
        found.setdefault(id(dataset), []).append(rows)


def _as_rows(subset: Subset[Any]) -> Any:
    """The indices of `subset`, int64 and at least 0; None for others than numbers."""
    given: Any = subset.indices
    is_range = isinstance(given, range)
    indices: Any = np.arange(given.start, given.stop, given.step) if is_range else np.asarray(given)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or len(indices) != len(subset):
        return None
    return indices.astype(np.int64) % max(1, len(subset.dataset))  # type: ignore[arg-type]


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether each row has memory that is not another's."""
    return tensor.layout is torch.strided and tensor.stride(0) != 0 and tensor[:1].numel() > 0
