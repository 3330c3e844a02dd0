"""Attributes of objects as live mappings: in dicts, in slots, and data of the user's classes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainstack.backends.generator_search import is_of_user

_DATA = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray, Tensor)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def attributes_of(path: str, value: Any) -> Iterator[tuple[str, Any, MutableMapping[str, Any]]]:
    """The attributes of `value`, those in its slots, and those of its classes; no code of `value` runs.

    Yields:
        The path, the object or class, and its attributes.
    """
    yield from own_attributes_of(path, value)
    for base in type(value).__mro__:
        if is_of_user(base):
            yield f"class {base.__qualname__}", base, ClassAttributes(base)


def own_attributes_of(path: str, value: Any) -> Iterator[tuple[str, Any, MutableMapping[str, Any]]]:
    """`attributes_of` without the attributes of the classes."""
    held = object.__getattribute__(value, "__dict__") if _has_dict(value) else None
    if held is not None:
        yield path, value, held
    slots = SlotAttributes(value)
    if slots.names:
        yield (path if held is None else f"{path}(slots)"), value, slots


def _has_dict(value: Any) -> bool:
    try:
        return type(object.__getattribute__(value, "__dict__")) is dict
    except AttributeError:
        return False


class SlotAttributes(MutableMapping[str, Any]):
    """The values in the slots of an object."""

    names: dict[str, MemberDescriptorType]

    def __init__(self, value: Any) -> None:
        self._value = value
        self.names = {
            name: member
            for base in type(value).__mro__
            if "__slots__" in vars(base) and is_of_user(base)
            for name, member in vars(base).items()
            if type(member) is MemberDescriptorType
        }

    def __getitem__(self, key: str) -> Any:
        try:
            return self.names[key].__get__(self._value)
        except AttributeError:  # an empty slot
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.names[key].__set__(self._value, value)  # past the check of a frozen dataclass

    def __delitem__(self, key: str) -> None:
        self.names[key].__delete__(self._value)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self.names if name in self])

    def __len__(self) -> int:
        return len(list(iter(self)))


class ClassAttributes(MutableMapping[str, Any]):
    """Data that a class holds: numbers, texts, tensors, arrays, containers and objects of the user's classes."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        type.__setattr__(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        type.__delattr__(self._kind, key)

    def __iter__(self) -> Iterator[str]:
        held = [(key, value) for key, value in vars(self._kind).items() if not key.startswith("__")]
        return iter([key for key, value in held if _is_data(type(value))])  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(list(iter(self)))


@lru_cache(maxsize=1024)  # each look at a class asks for the kinds of all its values
def _is_data(kind: type) -> bool:
    if issubclass(kind, (*_DATA, *_CONTAINERS)):
        return True
    return issubclass(kind, nn.Module) or (is_of_user(kind) and not hasattr(kind, "__get__"))
