"""How many records a batch holds, and that it holds no others than were drawn."""

from __future__ import annotations

from typing import Any

from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.records import rows_of
from trainstack.backends.dp.torch_names import pytree
from trainstack.errors import PrivacyError


def count_records(batch: Any) -> int:
    """How many records a collated batch holds: the length of what comes first in it.

    Whether everything else in it agrees is for the gradient mode to see.
    """
    leaves = pytree.tree_leaves(batch, is_leaf=lambda value: isinstance(value, list) and not _has_tensors(value))
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape:
            return int(shape[0])
        if isinstance(leaf, list):
            return len(leaf)
    raise PrivacyError(
        f"cannot tell how many records a batch of type {type(batch).__name__} holds. Let collate_fn return tensors "
        "with the records along dimension 0."
    )


def check_records(batch: Any, records: int) -> None:
    """Refuse a batch in which a record is missing, or stands more than once: each would add more than is accounted for.

    Raises:
        PrivacyError: saying what to let `collate_fn` return.
    """
    found = count_records(batch)
    if found != records:
        raise PrivacyError(
            f"collate_fn made a batch of {found} records of {records}: each record has to be one row of the batch, so "
            "that its gradient is clipped once. Do several views of a record inside of train_step, and leave none out."
        )
    try:
        rows_of(batch, records, slice(0, 1))
    except Unsupported as error:
        raise PrivacyError(str(error)) from error


def _has_tensors(values: list[Any]) -> bool:
    return any(hasattr(leaf, "shape") for leaf in pytree.tree_leaves(values))
