"""`KeptNumbers` restores numbers that a dataset or `collate_fn` has stored from a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainstack.backends.dp.sealed.object_attributes import ClassAttributes, own_attributes_of
from trainstack.backends.generator_search import functions_of, held_by_function, is_of_user

_ITEMS, _OBJECTS = 100, 200
"""The largest numbers of items of a container, and of objects and containers, that are searched. More are data."""
_TENSOR, _ARRAY, _BUDGET = 2**16, 2**12, 2**20
"""The largest number of bytes of a copied tensor, of a copied array, and of all copies. Tensors count their writes;
arrays are compared for each sample, so only smaller ones are copied."""

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LISTS, _CONTAINERS = (list, deque, set), (list, deque, set, dict, tuple)
_CALLABLES = (FunctionType, MethodType, BuiltinFunctionType, partial)
_ABSENT = object()


class KeptNumbers:
    """A snapshot of the numbers in attributes of objects, classes and functions, in containers, closures and defaults.

    A running maximum that a dataset updates in `__getitem__` would make a sample depend on earlier samples. The search
    follows the objects and functions that user's objects and library objects hold, such as transforms. It does not
    restore lazily opened files, lazily loaded arrays and caches in dicts, and does not see global variables and
    attributes of library objects.

    Args:
        roots: the objects to search, such as a dataset.
    """

    def __init__(self, *roots: Any) -> None:
        self._mappings: list[tuple[Any, MutableMapping[str, Any], dict[str, Any], bool]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._left, seen, ahead = _BUDGET, set[int](), [*roots]
        while ahead and len(seen) < _OBJECTS:
            value = ahead.pop()
            if not isinstance(value, _SCALARS) and id(value) not in seen:
                seen.add(id(value))
                ahead += self._look(value)
        # views of dicts follow their changes, so that one pass over `_live` finds any change
        self._live = [*(live.values() for live, *_ in self._mappings), *(value for value, _ in self._lists)]
        self._items = [item for part in self._live for item in part]
        self._lengths = [len(part) for part in self._live]

    def _look(self, value: Any) -> Iterator[Any]:
        """Note the contents of `value`. Returns the values to search next."""
        if isinstance(value, Tensor | np.ndarray):
            self._add_numbers(value)
        elif isinstance(value, _CONTAINERS):
            if is_of_user(type(value)):  # a subclass of the user, with attributes
                yield from self._look_into_object(value)
            if len(value) <= _ITEMS:
                yield from self._look_into(value)
        elif isinstance(value, FunctionType):
            self._cells += [(cell, _content(cell)) for cell in value.__closure__ or ()]
            yield from (held for _, held in held_by_function(value))
            yield from self._add_attributes(vars(value), vars(value))
        elif isinstance(value, MethodType | BuiltinFunctionType):
            if not isinstance(value.__self__, ModuleType):
                yield from (value.__self__, getattr(value, "__func__", None))
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, type):
            if is_of_user(value):
                yield from self._look_into_class(value)
        elif is_of_user(type(value)) or isinstance(value, nn.Module):
            yield from self._look_into_object(value)
        else:  # an object of a library, which may hold objects and functions of the user
            found = [*getattr(value, "__dict__", {}).values()]
            kinds = (*_CONTAINERS, *_CALLABLES, Dataset)
            yield from (one for one in found if isinstance(one, kinds) or is_of_user(type(one)))

    def _look_into(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            self._mappings.append((value, value, dict(value), False))
            yield from value.values()
            return
        if isinstance(value, _LISTS):
            self._lists.append((value, tuple(value)))
        yield from value

    def _look_into_object(self, value: Any) -> Iterator[Any]:
        yield type(value)  # searched last, because the number of objects is limited
        for *_, held in own_attributes_of("", value):
            yield from self._add_attributes(held, held)

    def _look_into_class(self, kind: type) -> Iterator[Any]:
        yield from kind.__bases__
        for function in chain.from_iterable(map(functions_of, [*vars(kind).values()])):
            if isinstance(function, FunctionType) and _may_keep(function):
                yield function
        yield from self._add_attributes(vars(kind), ClassAttributes(kind))

    def _add_attributes(self, live: Any, held: MutableMapping[str, Any]) -> Iterable[Any]:
        before = dict(held)
        self._mappings.append((live, held, before, True))
        return before.values()

    def _add_numbers(self, value: Any) -> None:
        if value.nbytes > min(self._left, _TENSOR if isinstance(value, Tensor) else _ARRAY):
            return
        if isinstance(value, np.ndarray):
            if not value.dtype.hasobject and value.flags.writeable:
                self._arrays.append((value, value.tobytes()))
        elif not value.is_inference() and type(value) is Tensor:
            self._tensors.append((value, value._version, value.detach().clone()))  # private, checked on torch 2.13.0
        self._left -= value.nbytes

    def restore(self, made: Any) -> Any:
        """Restore changed numbers, tensors and arrays.

        Args:
            made: a sample or a batch, which may share memory with a restored tensor or array.

        Returns:
            `made`, or a copy of it if a tensor or an array was restored.
        """
        if [*map(len, self._live)] != self._lengths or not all(map(is_, chain.from_iterable(self._live), self._items)):
            self._restore_containers()
        for cell, number in self._cells:
            now = _content(cell)
            if now is number or not _is_kept(number, now):
                continue
            if number is _ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = number
        tensors = [place for place, (tensor, version, _) in enumerate(self._tensors) if tensor._version != version]
        arrays = [(array, content) for array, content in self._arrays if array.tobytes() != content]
        if tensors or arrays:
            made = deepcopy(made)
        for place in tensors:
            tensor, _, copy = self._tensors[place]
            tensor.detach().copy_(copy)
            self._tensors[place] = (tensor, tensor._version, copy)
        for array, content in arrays:
            array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)
        return made

    def _restore_containers(self) -> None:
        for _, held, before, is_object in self._mappings:
            _restore_items(held, before, is_object)
        for value, items in self._lists:
            if len(value) != len(items) or not all(map(is_, value, items)):
                _restore_list(value, items)


def _may_keep(method: FunctionType) -> bool:
    """Whether a method can keep values. Defaults of most methods are plain numbers, and a search would take long."""
    defaults = (*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values())
    return method.__closure__ is not None or not all(isinstance(one, _SCALARS) for one in defaults)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _ABSENT


def _restore_items(held: MutableMapping[str, Any], before: Mapping[str, Any], is_object: bool) -> None:
    """Restore numbers of an object or a dict. New items of a dict whose keys are not text remain: they are a cache."""
    changed = {key for key in {**before, **held} if held.get(key, _ABSENT) is not before.get(key, _ABSENT)}
    opened = any(before.get(key) is None and not _is_number(held.get(key, _ABSENT)) for key in changed)
    for key in changed:
        now, value = held.get(key, _ABSENT), before.get(key, _ABSENT)
        is_flag = opened and isinstance(now, bool)  # such as whether a file is open, and the file was opened
        if is_flag or not _is_kept(value, now) or not (is_object or value is not _ABSENT or isinstance(key, str)):
            continue
        if value is _ABSENT:
            del held[key]
        else:
            held[key] = value


def _restore_list(value: Any, items: tuple[Any, ...]) -> None:
    if all(map(_is_number, value)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)


def _is_kept(before: Any, now: Any) -> bool:
    """Whether `now` may come from a sample, so that `before` must be restored."""
    if isinstance(before, _CONTAINERS) and isinstance(now, type(before)):
        return len(before) <= _ITEMS
    if before is None or before is _ABSENT:
        return _is_number(now) and getattr(now, "nbytes", 0) <= _ARRAY  # a larger array is lazily loaded data
    return _is_number(before) and (now is _ABSENT or _is_number(now))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= _ITEMS and all(map(_is_number, value))
    return isinstance(value, (*_SCALARS, np.ndarray, Tensor))
