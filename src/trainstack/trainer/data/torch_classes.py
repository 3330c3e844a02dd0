"""Check whether loaders, samplers and datasets have the methods of torch or of the library, with known behaviour.

The methods are noted when this module is imported. If a method is overridden in a subclass, or replaced later in the
class or in the object, the object is used without assumptions.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data import default_collate as _default_collate
from torch.utils.data import default_convert as _default_convert

from trainstack.trainer.data.library_orders import CombinedOrder, LengthGroupedSampler


def _methods(kind: type) -> dict[str, Any]:
    """The methods and properties that `kind` itself defines, except for its constructor."""
    kinds = (FunctionType, property, staticmethod, classmethod)
    return {name: item for name, item in vars(kind).items() if isinstance(item, kinds) and name != "__init__"}


ORDERS: tuple[type, ...] = (RandomSampler, SequentialSampler, LengthGroupedSampler, CombinedOrder)
"""Samplers whose order the library makes."""
_KINDS: tuple[type, ...] = (DataLoader, BatchSampler, *ORDERS, Subset, TensorDataset)
_METHODS = {kind: _methods(kind) for kind in _KINDS}
# torch 2.13.0: the registry behind `default_collate`, documented as its extension point, and its entry for tensors.
_collate = getattr(getattr(data, "_utils", None), "collate", None)
_stack_tensors = getattr(_collate, "collate_tensor_fn", None)
_collate_by_type = getattr(_collate, "collate", None)


def replaced_method(item: Any, kind: type) -> str | None:
    """The name of the first method of `kind` that `item` overrides or replaces; None if there is none."""
    mine = getattr(item, "__dict__", {})
    for name, usual in _METHODS[kind].items():
        if inspect.getattr_static(type(item), name, None) is not usual or name in mine:
            return name
    return None


def is_usual(item: Any, kind: type) -> bool:
    """Whether `item` is an object of exactly `kind`, with all of its methods, and fetches one sample at a time."""
    if type(item) is not kind or replaced_method(item, kind) is not None:
        return False
    return "__getitems__" in _METHODS[kind] or not hasattr(item, "__getitems__")


def stacks_tensors(collate_fn: Any) -> bool:
    """Whether `collate_fn` makes a list of stacked tensors of samples that are tuples of tensors."""
    registry = getattr(_collate, "default_collate_fn_map", None)
    if collate_fn is not _default_collate or _stack_tensors is None or not isinstance(registry, dict):
        return False
    usual = registry.get(Tensor) is _stack_tensors and getattr(_collate, "collate", None) is _collate_by_type
    return usual and not any(isinstance((), kind) for kind in registry)


def makes_lists_of_fields(loader: Any) -> bool:
    """Whether a batch of `loader` that is a list has an item for each field of a sample, not for each sample."""
    return getattr(loader, "collate_fn", None) in (_default_collate, _default_convert)


def draws_first_batch_alone(loader: Any) -> bool:
    """Whether only the first batch of a pass over `loader` may draw from the generators of this process.

    This is True if code of torch or Python fetches the samples, or if workers fetch them. A sampler without a generator
    draws a seed with the first batch.
    """
    if type(loader) in (list, tuple):
        return True
    if not is_usual(loader, DataLoader):
        return False
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):  # torch refuses samplers for an IterableDataset
        batches = loader.batch_sampler
        if not (batches is None or is_usual(batches, BatchSampler)):
            return False
        sampler: Any = loader.sampler if batches is None else batches.sampler
        if not is_usual(sampler, SequentialSampler) and not (
            is_usual(sampler, RandomSampler) and sampler.generator is None
        ):
            return False
    if loader.num_workers:
        return True
    if loader.collate_fn is _default_convert:
        return type(dataset) in (list, tuple) or is_usual(dataset, TensorDataset)
    return is_usual(dataset, TensorDataset) and stacks_tensors(loader.collate_fn)
