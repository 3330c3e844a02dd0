"""`DatasetSnapshot` restores the plain attributes of datasets after a trial."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainstack.backends.generators import kinds_of_generators
from trainstack.trainer.core.state_tree import SMALL, copied, same, size_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, dict, set, deque, tuple, frozenset)
_INERT = (Tensor, np.ndarray, nn.Module, Dataset, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""If a dataset has attributes of these classes or generators, its other attributes can still be restored."""
_ITEMS = SMALL
"""The largest number of keys and values in a container, at all levels together, because each has at least a byte. More
items are data, and a search of them would take long."""


class DatasetSnapshot:
    """The plain attributes of the datasets of a module: numbers, text, and small containers, arrays and tensors.

    Datasets are found among the attributes of the module and its parts, in their loaders, lists and dicts, in other
    datasets, and among the global variables of the Python modules that define the classes of the parts.

    Args:
        module: the module to search. Nothing in it is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self._datasets = [(name, one, _Attributes(one)) for name, one in _find(module).items()]

    def restore(self) -> list[str]:
        """Restore changed attributes. Returns the names of changed attributes that keep their new values.

        A dataset with other objects, such as an open file, is not restored, because its numbers may have to fit these
        objects.
        """
        return [f"{name}.{key}" for name, _, attributes in self._datasets for key in attributes.restore()]


class _Attributes:
    def __init__(self, dataset: Any) -> None:
        self._values, found = vars(dataset), dict(vars(dataset))
        self._kept = {key: (value, copied(value)) for key, value in found.items() if _is_small(value)}
        self._names = set(found)
        self._lengths = {
            key: len(one) for key, one in found.items() if type(one) in _CONTAINERS and key not in self._kept
        }
        others = (value for key, value in found.items() if key not in self._kept)
        inert = (*_INERT, *_CONTAINERS, *kinds_of_generators())
        self._is_plain = all(isinstance(one, inert) for one in others)

    def restore(self) -> list[str]:
        now = self._values
        changed = [key for key, (_, kept) in self._kept.items() if key not in now or not same(now[key], kept)]
        grown = [key for key, count in self._lengths.items() if _length(now.get(key)) != count]
        added = [key for key, value in now.items() if key not in self._names and _is_small(value)]
        if not self._is_plain or grown:
            return sorted({*changed, *grown, *added})
        for key in changed:
            value, kept = self._kept[key]
            now[key] = _fill(value, kept)
        for key in added:
            del now[key]
        return []


def _length(value: Any) -> int:
    return len(value) if type(value) in _CONTAINERS else -1


def _is_small(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    is_data = isinstance(value, Tensor | np.ndarray) or (type(value) in _CONTAINERS and _is_plain(value))
    return is_data and size_of(value) <= SMALL


def _is_plain(value: Any) -> bool:
    """Whether `value` consists of plain values, tensors and arrays, at most `_ITEMS` together."""
    items = list(islice(_items_in(value, 4), _ITEMS + 1))  # deeper containers are data, or contain themselves
    return len(items) <= _ITEMS and all(isinstance(item, (*_PLAIN, Tensor, np.ndarray)) for item in items)


def _items_in(value: Any, depth: int) -> Iterator[Any]:
    if type(value) in _CONTAINERS and depth:
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _items_in(item, depth - 1)
    else:
        yield value


def _fill(value: Any, kept: Any) -> Any:
    """`value` with the content of `kept`, in place if possible, because other objects may hold it."""
    if isinstance(value, list):
        value[:] = kept
    elif isinstance(value, dict | set | deque):
        value.clear()
        value.extend(kept) if isinstance(value, deque) else value.update(kept)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = kept
    elif isinstance(value, Tensor) and value.shape == kept.shape:
        value.data.copy_(kept)
    else:
        return kept
    return value


def _find(module: nn.Module) -> dict[str, Any]:
    """The datasets by name, each once."""
    found, seen = dict[str, Any](), set[int]()
    parts = dict(module.named_modules())
    roots = [(f"{path}.{key}" if path else key, one) for path, part in parts.items() for key, one in vars(part).items()]
    scopes = dict.fromkeys(kind.__module__ for part in parts.values() for kind in type(part).__mro__)
    for scope in scopes:
        if scope.partition(".")[0] not in ("torch", "trainstack", "builtins") and scope in sys.modules:
            roots += vars(sys.modules[scope]).items()
    for name, root in roots:
        for path, dataset in _datasets_in(name, root, 4):  # deeper than any usual nesting of wrappers
            if id(dataset) not in seen:
                seen.add(id(dataset))
                found[path] = dataset
    return found


def _datasets_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not depth:
        return
    if isinstance(value, DataLoader):
        yield from _datasets_in(f"{name}.dataset", value.dataset, depth)
    elif type(value) in (list, tuple, dict) and len(value) <= 100:  # a longer one holds samples, not datasets
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _datasets_in(f"{name}[{key!r}]", item, depth - 1)
    elif isinstance(value, Dataset):
        yield name, value
        for key, item in list(vars(value).items()):
            yield from _datasets_in(f"{name}.{key}", item, depth - 1)
