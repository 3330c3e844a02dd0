"""`Snapshot` shows which plain attributes have changed since it was made, and puts them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainstack.backends.dp.sealed.plain_state import (
    LARGE_ITEMS,
    SCALARS,
    Held,
    Owners,
    Place,
    copy_value,
    is_watched,
    owners_of,
    same_value,
    shares_memory,
    storages_of,
)

_BUDGET = 2**20
"""Bytes of tensors and arrays that are copied, and compared at each look: 0.1 ms on a CPU."""

_DEEP = 4
"""Levels of containers within an attribute."""

_Owner = tuple[str, Held, dict[str, Any]]
"""The path of an object, its attributes, and a copy of them with the same values."""

_Content = tuple[Place, Any, Any]
"""The attribute that holds a container, tensor or array, the object, and a copy of its content."""


class Snapshot:
    """The plain attributes of a module, of its parts and of the objects that they hold, at one moment.

    Containers of up to 1000 items are compared item by item. Tensors and arrays are compared bit by bit, as long as
    they have less than 1 MiB together; of others the writes that torch counts (`_version`) are seen.

    Args:
        module: the user's module, never wrapped.
        owners: see `owners_of`; None to search for them.
    """

    def __init__(self, module: nn.Module, owners: Owners | None = None) -> None:
        self._module = module
        self._owners = owners_of(module) if owners is None else owners
        self._held: list[_Owner] = [(path, held, dict(held)) for path, held in self._owners.items()]
        self._left, self._shared = _BUDGET, storages_of(self._owners)
        self._contents: list[_Content] = []
        seen = set[int]()
        for path, _, values in self._held:
            for key, value in values.items():
                if not isinstance(value, SCALARS) and is_watched(path, key):
                    self._add_content((path, key), value, seen, 0)

    def changed(self) -> set[Place]:
        """The attributes that have another value, or a value with another content."""
        found = {place for place, value, copy in self._contents if not _has_content(value, copy)}
        for path, held, before in self._held:
            if len(held) == len(before) and all(map(is_, held.values(), before.values())):
                continue
            others = [key for key, value in held.items() if before.get(key, self) is not value]
            others += [key for key in before if key not in held]
            found.update((path, key) for key in others if is_watched(path, key))
        return found

    def values(self, places: set[Place]) -> dict[Place, Any]:
        """The values of now, of those of `places` that still exist."""
        return {(path, key): self._owners[path][key] for path, key in places if key in self._owners[path]}

    @property
    def not_copied(self) -> list[Tensor]:
        """The tensors whose content `restore` cannot put back."""
        return [value for _, value, copy in self._contents if isinstance(value, Tensor) and isinstance(copy, int)]

    def restore(self, kept: Collection[Place] = ()) -> None:
        """Give attributes their values back, and these their content, but for those of `kept`."""
        for path, key in self.changed().difference(kept):
            held, values = self._owners[path], next(values for at, _, values in self._held if at == path)
            if key not in values:
                held.pop(key, None)
            elif key not in held or held[key] is not values[key]:
                held[key] = values[key]
        for place, value, copy in self._contents:
            if place not in kept and not _has_content(value, copy):
                _set_content(value, copy)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which attributes have the values of this snapshot; afterwards they have those of before."""
        if not self.changed():
            yield
            return
        now = Snapshot(self._module)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def renewed(self, changed: set[Place]) -> Snapshot:
        """A snapshot of now, where the attributes `changed` have other values than in this one."""
        values = self.values(changed).values()
        same = all(isinstance(value, (*SCALARS, Tensor, np.ndarray)) for value in values)
        return Snapshot(self._module, self._owners if same else None)

    def with_values(self, values: Mapping[Place, Any]) -> Snapshot:
        """Set attributes to `values`; returns a snapshot of that."""
        for (path, key), value in values.items():
            self._owners[path][key] = value
        return self.renewed(set(values))

    def _add_content(self, place: Place, value: Any, seen: set[int], depth: int) -> None:
        if id(value) in seen or isinstance(value, SCALARS):
            return
        seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            self._add_numbers(place, value)
        elif isinstance(value, (list, tuple, deque, dict, set)) and depth < _DEEP and len(value) <= LARGE_ITEMS:
            items = dict.values(value) if isinstance(value, dict) else value
            if not isinstance(value, tuple):
                copy = (
                    dict(dict.items(value))
                    if isinstance(value, dict)
                    else set(value)
                    if isinstance(value, set)
                    else [*value]
                )
                self._contents.append((place, value, copy))
            for item in items if not isinstance(value, set) else ():
                self._add_content(place, item, seen, depth + 1)

    def _add_numbers(self, place: Place, value: Any) -> None:
        is_array = isinstance(value, np.ndarray)
        if not is_array and shares_memory(value, self._shared):
            return
        try:
            fits = value.nbytes <= self._left and not (is_array and value.dtype.hasobject)
            copy = copy_value(value) if fits else None if is_array else value._version  # torch 2.13.0
            copy = getattr(value, "_version", None) if copy is value else copy  # a tensor of a subclass
        except RuntimeError:  # a tensor of a `vmap` that is over
            return
        if copy is not None:
            self._left -= value.nbytes if fits else 0
            self._contents.append((place, value, copy))


def _has_content(value: Any, copy: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value._version == copy) if isinstance(copy, int) else same_value(value, copy)
    if isinstance(value, dict):
        return (
            len(value) == len(copy)
            and all(map(is_, dict.keys(value), copy))
            and all(map(is_, dict.values(value), copy.values()))
        )
    if isinstance(value, list | deque):
        return len(value) == len(copy) and all(map(is_, value, copy))
    return same_value(value, copy)


def _set_content(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        if not isinstance(copy, int):
            value.data = (
                copy.clone() if value.shape != copy.shape or value.dtype != copy.dtype else value.data.copy_(copy)
            )
    elif isinstance(value, np.ndarray):
        value[...] = copy
    else:
        value.clear()
        if isinstance(value, dict):
            for key, item in copy.items():  # `update` of a Counter adds
                value[key] = item
        else:
            (value.update if isinstance(value, set) else value.extend)(copy)
