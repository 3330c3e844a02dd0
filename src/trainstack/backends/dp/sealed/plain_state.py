"""Plain attributes of modules and of the objects that they hold: how to find, copy and compare them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainstack.backends.generator_search import is_of_user

_LARGE, _MANY, _DEEP = 2**22, 1000, 4
"""Bytes above which a tensor or array is not copied; items of a container and objects that are looked at; levels of
objects below a module. Modules keep states of a few kilobytes, and data that is larger belongs to data sets."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
"""Values that cannot be changed in place."""

_TENSORS = frozenset({"_parameters", "_buffers"})
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)

Place = tuple[str, str]
"""The path of an object and the name of one of its attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A copy of a value; of a large one the value itself and how often it was written to."""

    value: Any
    is_large: bool = False
    writes: int = 0


def keep(owners: Mapping[str, dict[str, Any]]) -> dict[Place, Kept]:
    """Copies of the attributes in `owners`, without those that share memory with parameters and buffers."""
    storages = _storages(owners)
    return {
        (path, key): kept_of(value)
        for path, held in owners.items()
        for key, value in held.items()
        if is_watched(path, key, owners) and not _shares_memory(value, storages)
    }


def is_watched(path: str, key: str, owners: Mapping[str, Any]) -> bool:
    """Whether the attribute `key` of the object at `path` is the user's."""
    hidden = path.endswith("]") and key in _TENSORS  # of a module that no module has registered
    return (key not in OF_EVERY_MODULE or hidden) and key not in ("_log_sink", "_step_view", "plan")


def kept_of(value: Any) -> Kept:
    """A copy of `value` to compare with later, or `value` itself if it is large."""
    if _is_large(value):
        return Kept(value=value, is_large=True, writes=value._version if isinstance(value, Tensor) else len(value))
    return Kept(value=copy_value(value))


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes > _LARGE
    return isinstance(value, (*_SEQUENCES, *_SETS, Mapping)) and len(value) > _MANY


def copy_value(value: Any, depth: int = 0) -> Any:
    """A copy of plain data, and objects of other kinds as they are."""
    if isinstance(value, Tensor):
        try:
            return value.detach().clone() if type(value) in (Tensor, nn.Parameter) else value
        except RuntimeError:  # a tensor of a `vmap` that is over
            return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth < _DEEP and type(value) in (list, set, frozenset):
        return type(value)(copy_value(item, depth + 1) for item in value)
    if depth < _DEEP and type(value) is deque:
        return deque((copy_value(item, depth + 1) for item in value), value.maxlen)
    if depth < _DEEP and type(value) is tuple:
        return tuple(copy_value(item, depth + 1) for item in value)
    if depth < _DEEP and type(value) is dict:
        return {key: copy_value(item, depth + 1) for key, item in value.items()}
    return value


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors and arrays bit by bit, objects of unknown kinds by identity."""
    if isinstance(one, Kept) and isinstance(other, Kept):
        if one.is_large or other.is_large:
            return one.value is other.value and one.writes == other.writes
        return same_value(one.value, other.value)
    if one is other:
        return True
    if type(one) is not type(other) and not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if isinstance(one, Tensor):
        try:
            return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other)
        except RuntimeError:  # a tensor of a `vmap` that is over
            return False
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, _SEQUENCES):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same_value, one.values(), other.values()))
    if isinstance(one, (*SCALARS, *_SETS)):
        return bool(one == other) or repr(one) == repr(other)  # nan
    return False


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def mark_of(value: Any) -> Any:
    """A mark that differs for a new value, in microseconds; it does not show each write into it."""
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version  # torch 2.13.0: counts writes in place
    if isinstance(value, np.ndarray) and value.nbytes <= 1024 and not value.dtype.hasobject:
        return value.tobytes()
    return (id(value), len(value)) if isinstance(value, (*_SEQUENCES, *_SETS, dict)) else id(value)


@contextmanager
def installed_attributes(
    owners: Mapping[str, dict[str, Any]], values: Mapping[Place, Kept] | None = None
) -> Iterator[None]:
    """A block in which attributes have copies of `values`; afterwards they are what they were.

    Args:
        owners: see `owners_of`.
        values: of all attributes; None for those of now.
    """
    before = {path: dict(held) for path, held in owners.items()}
    now = keep(owners)
    values = now if values is None else values
    try:
        for path, key in now:
            if (path, key) in values:
                owners[path][key] = copy_value(values[path, key].value)
            else:
                del owners[path][key]
        for (path, key), kept in values.items():
            if path in owners and key not in owners[path]:
                owners[path][key] = copy_value(kept.value)
        yield
    finally:
        for path, held in owners.items():
            for key in held.keys() - before[path].keys():
                del held[key]
            held.update(before[path])


def _storages(owners: Mapping[str, dict[str, Any]]) -> set[int]:
    """The memory of the parameters and buffers of a module, which `SealedState` watches."""
    tensors = (
        tensor
        for path, held in owners.items()
        if not path.endswith("]")
        for key in _TENSORS
        for tensor in held.get(key, {}).values()
    )
    return {_storage(tensor) for tensor in tensors if tensor is not None} - {0}


def _shares_memory(value: Any, storages: set[int]) -> bool:
    return isinstance(value, Tensor) and _storage(value) in storages


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # without memory of its own
        return 0


def owners_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of the parts of `module` and of objects that these hold, as the live dicts by path.

    Objects of the user's classes are followed, and modules that no module has registered. Data sets are not.
    """
    owners = {path: vars(part) for path, part in module.named_modules()}
    seen = {id(held) for held in owners.values()}
    ahead = deque((path, held, 0) for path, held in owners.items())
    while ahead and len(owners) < _MANY:
        path, held, depth = ahead.popleft()
        items = [(key, value) for key, value in held.items() if key not in OF_EVERY_MODULE] if depth < _DEEP else []
        for key, value in items:
            for label, item in _objects_in(f"{path}.{key}".lstrip("."), value):
                found = item.named_modules() if isinstance(item, nn.Module) else [("", item)]
                for inner, one in found:
                    if id(vars(one)) not in seen:
                        seen.add(id(vars(one)))
                        name = f"{label}.{inner}".rstrip(".") + f"[{type(one).__name__}]"
                        owners[name] = vars(one)
                        ahead.append((name, vars(one), depth + 1))
    return owners


def _objects_in(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[str, Any]] = ((label, value),)
    if isinstance(value, dict) and len(value) <= _MANY:
        items = ((f"{label}.{key}", item) for key, item in value.items())
    elif isinstance(value, _SEQUENCES) and len(value) <= _MANY:
        items = ((f"{label}.{position}", item) for position, item in enumerate(value))
    for name, item in items:
        kind = type(item)
        if issubclass(kind, nn.Module) or (is_of_user(kind) and not issubclass(kind, Dataset) and _has_dict(item)):
            yield name, item


def _has_dict(value: Any) -> bool:
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except AttributeError:
        return False
