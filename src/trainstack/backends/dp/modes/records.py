"""Cutting a batch into its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainstack.backends.dp.modes.base import Unsupported


def rows_of(batch: Any, records: int, rows: slice) -> Any:
    """The part of `batch` that holds the records `rows`, as a batch of the same structure.

    Tensors and arrays are cut along dimension 0; lists of strings, numbers or other plain objects by item; tuples,
    lists and mappings of those are rebuilt; None stays.

    Args:
        batch: of `records` examples.
        records: how many.
        rows: which.

    Raises:
        Unsupported: part of the batch belongs to no record in particular.
    """
    return _cut(batch, records, rows, "batch")


def _cut(value: Any, records: int, rows: slice, place: str) -> Any:
    if value is None:
        return None
    if isinstance(value, PackedSequence):
        raise Unsupported(f"{place} is a PackedSequence, which mixes its records. Give padded tensors and lengths.")
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0 or value.shape[0] != records:
            raise Unsupported(
                f"{place} has shape {tuple(value.shape)} in a batch of {records} records: which part belongs to which "
                "record? Put the records along dimension 0 of everything that collate_fn returns."
            )
        return value[rows]
    if isinstance(value, Mapping):
        cut = {key: _cut(item, records, rows, f"{place}[{key!r}]") for key, item in value.items()}
        return cut if type(value) is dict else type(value)(cut)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        if _is_one_a_record(value, records):
            return value[rows]
        parts = [_cut(item, records, rows, f"{place}[{i}]") for i, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise Unsupported(
        f"{place} is a {type(value).__name__}, which belongs to no record in particular. Let collate_fn return "
        "tensors with the records along dimension 0, lists of one item a record, and tuples, lists and dicts of those."
    )


def _is_one_a_record(value: list[Any] | tuple[Any, ...], records: int) -> bool:
    """Whether the items are records; tensors and containers in a list are always columns of the batch.

    To judge by lengths would mistake one for the other in the batches in which they agree.
    """
    atoms = not any(item is None or isinstance(item, Tensor | np.ndarray | Mapping | list | tuple) for item in value)
    return atoms and len(value) == records and not hasattr(value, "_fields")
