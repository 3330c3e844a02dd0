"""The number of samples in a batch, and the number of items in the mean of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainstack.errors import ModuleContractError

_OVERRIDE = (
    "Override ModuleInterface.batch_weight(batch) and return the number of items that the loss of the batch is a mean "
    "over."
)


def samples_in(batch: Any, *, lists_are_fields: bool = False) -> int:
    """Return the number of samples in a collated batch.

    It is the length of the first dimension of the first tensor or array that has dimensions, or the length of a list of
    strings, numbers, dicts or 0-dim tensors, if that comes first. `differing_lengths` reports other lengths.

    Args:
        batch: batch from the loader.
        lists_are_fields: whether a list has an item for each field of a sample, as from torch's collate functions.
            Otherwise a list of similar tensors is an error, because it may also have a tensor for each sample.

    Raises:
        ModuleContractError: the number is unknown or ambiguous; `batch_weight` must be overridden.
    """
    fields_known = type(batch) is tuple or (type(batch) is list and lists_are_fields)
    if fields_known and batch and type(batch[0]) is Tensor and batch[0].dim():
        return batch[0].shape[0]
    first = next((length for length in _lengths(batch, lists_are_fields) if length is not None), None)
    if first is None:
        raise ModuleContractError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds. {_OVERRIDE}"
        )
    return first


def differing_lengths(batch: Any) -> str | None:
    """Return a warning if the parts of a batch have different lengths: the first may not be the number of samples."""
    if type(batch) in (list, tuple) and len(batch) == 2:  # fast path for the usual pair of inputs and targets
        one, two = batch
        if type(one) is type(two) is Tensor and one.dim() and two.dim() and one.shape[0] == two.shape[0]:
            return None
    lengths = list(_lengths(batch, True))
    known = [length for length in lengths if length is not None]
    if not known or (len(set(known)) == 1 and (len(known) > 1 or len(lengths) == 1)):
        return None
    sizes = ", ".join("none" if length is None else str(length) for length in lengths[:6])  # 6: one line of a message
    return (
        f"the first dimensions of the tensors in a batch differ ({sizes}): the first of them is used, so the batch "
        f"counts as {known[0]} samples. {_OVERRIDE}"
    )


def checked_weight(weight: Any) -> float:
    """Convert the result of `batch_weight` to a float.

    Raises:
        ModuleContractError: it is inf, nan, negative or not a number.
    """
    try:
        number = (
            math.nan if isinstance(weight, str) else float(weight.detach() if isinstance(weight, Tensor) else weight)
        )
    except (TypeError, ValueError, RuntimeError):  # None, or a tensor of several elements
        number = math.nan
    if not 0 <= number < math.inf:
        raise ModuleContractError(
            f"batch_weight returned {weight!r}: return the number of items that the loss of the batch is a mean over, "
            "a finite number >= 0, such as (labels != -100).sum()."
        )
    return number


IGNORED_LABEL = -100
"""The label that `torch.nn.functional.cross_entropy` ignores by default."""


def labels_in(labels: Any, *, shifted: bool = False) -> int | None:
    """Return the number of labels in the mean of a loss: those that are not -100. None if `labels` has no integers.

    Args:
        labels: integer tensor of any shape.
        shifted: whether the first label of each row is not predicted, as in a causal language model.
    """
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype is torch.bool
    ):
        return None
    if shifted and labels.dim():
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def _lengths(item: Any, lists_are_fields: bool, nested: bool = False) -> Iterator[int | None]:
    """Yield the lengths of the parts of a batch; None for a tensor without dimensions."""
    if isinstance(item, PackedSequence):
        raise ModuleContractError(
            f"a PackedSequence has time steps of several samples, and the loss may be a mean over either. {_OVERRIDE}"
        )
    if isinstance(item, Tensor) and item.is_nested:
        yield item.size(0)
        return
    shape = getattr(item, "shape", None)
    if shape is not None and not isinstance(item, Mapping):
        yield int(shape[0]) if len(shape) else None
        return
    if is_dataclass(item) and not isinstance(item, type):
        item = {f.name: getattr(item, f.name) for f in fields(item)}
    if isinstance(item, Mapping):
        parts, within = list(item.values()), nested
    elif isinstance(item, list | tuple):
        if item and _has_one_item_a_sample(item):
            yield len(item)
            return
        _check_fields(item, lists_are_fields, nested)
        parts, within = list(item), True
    else:
        return
    for part in parts:
        yield from _lengths(part, lists_are_fields, within)


def _has_one_item_a_sample(items: list[Any] | tuple[Any, ...]) -> bool:
    if all(isinstance(item, str | bytes | int | float) for item in items):
        return True
    if not isinstance(items, list):
        return False
    return all(isinstance(item, dict) for item in items) or all(getattr(item, "shape", None) == () for item in items)


def _may_be_samples(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether `items` are tensors or arrays of one shape, or of images with different sizes (3 dimensions or more)."""
    shapes = [getattr(item, "shape", None) for item in items]
    if len(items) < 2 or not all(shapes) or len({getattr(item, "dtype", None) for item in items}) > 1:
        return False
    dims = {len(shape) for shape in shapes if shape is not None}
    return len(set(shapes)) == 1 or (len(dims) == 1 and dims.pop() > 2)


def _check_fields(items: list[Any] | tuple[Any, ...], lists_are_fields: bool, nested: bool) -> None:
    """Raise an error for a list that may have a tensor for each sample or a tensor for each field."""
    known = lists_are_fields if isinstance(items, list) else hasattr(items, "_fields")
    first = getattr(items[0], "shape", None) if items else None
    if not known and ((nested and first) or (isinstance(items, list) and _may_be_samples(items))):
        raise ModuleContractError(
            f"a {type(items).__name__} of {len(items)} tensors in a batch may have a tensor for each sample, or one "
            f"for each field of a sample. Use a tuple for the fields of a batch. {_OVERRIDE}"
        )
