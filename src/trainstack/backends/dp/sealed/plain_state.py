"""Plain attributes of modules and of the objects that they hold: how to find, copy and compare them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainstack.backends.dp.sealed.object_attributes import attributes_of
from trainstack.backends.dp.sealed.tensor_digest import Digest, TensorDigest
from trainstack.backends.generator_search import is_of_user

_LARGE, LARGE_ITEMS, _DEEP = 2**22, 1000, 4
"""Bytes above which a tensor or array is not copied; items of a container and objects that are looked at; levels of
objects below a module. Modules keep states of a few kilobytes, and data that is larger belongs to data sets."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
"""Values that cannot be changed in place."""

_TENSORS = frozenset({"_parameters", "_buffers"})
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)

Held = MutableMapping[str, Any]
"""The attributes of an object, as a live mapping."""

Owners = Mapping[str, Held]
"""Attributes by the path of their object."""

Place = tuple[str, str]
"""The path of an object and the name of one of its attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A copy of a value; of a large one the value itself and a digest."""

    value: Any
    is_large: bool = False
    digest: Any = None


def keep(owners: Owners) -> dict[Place, Kept]:
    """Copies of the attributes in `owners`, without those that share memory with parameters and buffers."""
    storages = storages_of(owners)
    return {
        (path, key): kept_of(value, storages)
        for path, held in owners.items()
        for key, value in held.items()
        if is_watched(path, key) and not shares_memory(value, storages)
    }


def is_watched(path: str, key: str) -> bool:
    """Whether the attribute `key` of the object at `path` is the user's."""
    hidden = path.endswith("]") and key in _TENSORS  # of a module that no module has registered
    return (key not in OF_EVERY_MODULE or hidden) and key not in ("_log_sink", "_step_view", "plan")


def kept_of(value: Any, shared: AbstractSet[int] = frozenset()) -> Kept:
    """A copy of `value` to compare with later, or `value` itself if it is large, with a digest.

    Args:
        value: of an attribute.
        shared: the memory of parameters and buffers, of which nothing is copied.
    """
    if _is_large(value):
        return Kept(value=value, is_large=True, digest=_digest(value))
    return Kept(value=copy_value(value, shared))


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes > _LARGE
    return isinstance(value, (*_SEQUENCES, *_SETS, Mapping)) and len(value) > LARGE_ITEMS


def _digest(value: Any) -> Any:
    """Of the bits of a tensor or array, and of which objects a container holds."""
    if isinstance(value, Tensor):
        try:
            return TensorDigest().compute({"": value.detach().as_subclass(Tensor)})
        except (RuntimeError, NotImplementedError):  # sparse and others
            return value._version
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).reshape(-1)
        return hash(tuple(map(id, data))) if value.dtype.hasobject else zlib.crc32(data.view(np.uint8).data)
    items = chain(value, value.values()) if isinstance(value, Mapping) else value
    return hash(tuple(map(id, items)))


def copy_value(value: Any, shared: AbstractSet[int] = frozenset(), depth: int = 0) -> Any:
    """A copy of plain data; objects of other kinds, and tensors in the memory `shared`, as they are."""
    if isinstance(value, Tensor):
        try:
            is_plain = type(value) in (Tensor, nn.Parameter) and not shares_memory(value, shared)
            return value.detach().clone() if is_plain else value
        except RuntimeError:  # a tensor of a `vmap` that is over
            return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth >= _DEEP or not isinstance(value, (*_SEQUENCES, *_SETS, dict)):
        return value
    try:
        return _copy_items(value, lambda item: copy_value(item, shared, depth + 1))
    except Exception:  # a class of the user may raise any error
        return value


def _copy_items(value: Any, copied: Callable[[Any], Any]) -> Any:
    """A container of the same class with copies of the items."""
    if isinstance(value, tuple):
        return tuple.__new__(type(value), map(copied, value))
    made = copy(value)
    if isinstance(value, dict):
        for key, item in dict.items(value):
            dict.__setitem__(made, key, copied(item))
    elif isinstance(value, list):
        list.__setitem__(made, slice(None), map(copied, value))
    elif isinstance(value, deque):
        for position, item in enumerate(value):
            deque.__setitem__(made, position, copied(item))
    return made


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal: tensors and arrays bit by bit, objects of unknown kinds by identity."""
    if isinstance(one, Kept) and isinstance(other, Kept):
        if one.is_large or other.is_large:
            return one.value is other.value and _same_digest(one.digest, other.digest)
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


def _same_digest(one: Any, other: Any) -> bool:
    if isinstance(one, Digest) and isinstance(other, Digest):
        return not bool(one.differs(other))
    return bool(one == other)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


@contextmanager
def installed_attributes(owners: Owners, values: Mapping[Place, Kept] | None = None) -> Iterator[None]:
    """A block in which attributes have copies of `values`; their old values return at its end.

    Args:
        owners: see `owners_of`.
        values: of all attributes; None for the current ones.
    """
    before = {path: dict(held) for path, held in owners.items()}
    now, shared = keep(owners), storages_of(owners)
    values = now if values is None else values
    try:
        for path, key in now:
            if (path, key) in values:
                owners[path][key] = copy_value(values[path, key].value, shared)
            else:
                del owners[path][key]
        for (path, key), kept in values.items():
            if path in owners and key not in owners[path]:
                owners[path][key] = copy_value(kept.value, shared)
        yield
    finally:
        for path, held in owners.items():
            for key in held.keys() - before[path].keys():
                del held[key]
            held.update(before[path])


def storages_of(owners: Owners) -> set[int]:
    """The memory of the parameters and buffers of a module, which `SealedState` watches."""
    tensors = (
        tensor
        for path, held in owners.items()
        if not path.endswith("]")
        for key in _TENSORS
        for tensor in held.get(key, {}).values()
    )
    return {_storage(tensor) for tensor in tensors if tensor is not None} - {0}


def shares_memory(value: Any, storages: AbstractSet[int]) -> bool:
    """Whether `value` is a tensor in the memory `storages`; see `storages_of`."""
    return isinstance(value, Tensor) and _storage(value) in storages


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory
        return 0


def owners_of(module: nn.Module) -> dict[str, Held]:
    """The attributes of the parts of `module`, of objects that these hold, and of the user's classes of both.

    Objects of the user's classes are followed, and modules that no module has registered. Data sets and optimizers are
    not.
    """
    owners: dict[str, Held] = {}
    seen = set[int]()
    ahead = deque[tuple[str, Held, int]]()

    def add(path: str, one: Any, depth: int) -> None:
        if id(one) not in seen and len(owners) < LARGE_ITEMS:
            seen.add(id(one))
            for name, owner, held in attributes_of(path, one):
                if owner is one or id(owner) not in seen:
                    seen.add(id(owner))
                    free = name if name not in owners else f"{name}-{len(owners)}"
                    owners[free] = held
                    ahead.append((free, held, depth))

    for path, part in module.named_modules():
        add(path, part, 0)
    while ahead:
        path, held, depth = ahead.popleft()
        items = [(key, value) for key, value in held.items() if key not in OF_EVERY_MODULE] if depth < _DEEP else []
        for key, value in items:
            for label, item in _objects_in(f"{path}.{key}".lstrip("."), value):
                found = item.named_modules() if isinstance(item, nn.Module) else [("", item)]
                for inner, one in found:
                    add(f"{label}.{inner}".rstrip(".") + f"[{type(one).__name__}]", one, depth + 1)
    return owners


def _objects_in(label: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The modules and objects of the user's classes in a value: itself and items of containers."""
    kind = type(value)
    if issubclass(kind, nn.Module) or (is_of_user(kind) and not issubclass(kind, (Dataset, Enum, type, Optimizer))):
        yield label, value
    if depth < _DEEP and isinstance(value, (*_SEQUENCES, dict)) and len(value) <= LARGE_ITEMS:
        items = dict.items(value) if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if not isinstance(item, (*SCALARS, Tensor, np.ndarray)):
                yield from _objects_in(f"{label}.{key}", item, depth + 1)
