"""Search for the random generators that a module and the objects in it hold, by their paths."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Classes of the generators that are found."""
DEPTH, WIDTH, MAX_VISITED = 3, 100, 10_000
"""How far is looked: levels of containers and objects below an attribute, items of each, and values in all."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch", "trainstack", "builtins")
_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, torch.Tensor, np.ndarray, nn.Module)


@dataclass(slots=True)
class FoundGenerators:
    """What a search has found.

    Attributes:
        by_path: the generators, each once, under its first path.
        without_state: paths of generators whose numbers come from the operating system.
        is_complete: False if there were more values than a search looks at.
    """

    by_path: dict[str, Any] = field(default_factory=dict)
    without_state: list[str] = field(default_factory=list)
    is_complete: bool = True


def find_generators(*roots: Any, named: Mapping[str, Any] = MappingProxyType({})) -> FoundGenerators:
    """The generators of `roots`: those of modules and their parts, and those below other objects.

    Attributes are looked through, items of lists and dicts, what functions have closed over, and global variables
    beside the classes of a module's parts and of `named` objects, whose names begin the paths. Nothing is called, and
    no property is read.
    """
    found = FoundGenerators()
    search = _Search(found)
    for root in roots:
        if isinstance(root, nn.Module):
            search.look_through_module(root)
        else:
            search.look("", root, DEPTH)
    for name, root in named.items():
        search.look(name, root, DEPTH)
    search.look_through_globals(type(root) for root in named.values())
    return found


class _Search:
    def __init__(self, found: FoundGenerators) -> None:
        self._found = found
        self._seen = dict[int, Any]()  # keeps the objects, so that no id is used twice
        self._depths = dict[int, int]()
        self._left = MAX_VISITED

    def look_through_module(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        for name, part in parts.items():
            for key, value in list(vars(part).items()):
                if key not in _OF_EVERY_MODULE and type(value) not in _LEAVES:
                    self.look(f"{name}.{key}" if name else key, value, DEPTH)
        self.look_through_globals(type(part) for part in parts.values())

    def look_through_globals(self, classes: Iterable[type]) -> None:
        """Look at the global variables of the files in which `classes` and their bases are defined."""
        scopes = dict.fromkeys(base.__module__ for kind in classes for base in kind.__mro__)
        for scope in scopes:
            if scope.partition(".")[0] not in _LIBRARIES and scope in sys.modules:
                for key, value in list(vars(sys.modules[scope]).items()):
                    self.look(f"global {key}", value, 0)

    def look(self, path: str, value: Any, depth: int) -> None:
        """Look at `value` and, down to `depth` levels, at what is in it."""
        if isinstance(value, KINDS):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                if isinstance(value, random.SystemRandom):
                    self._found.without_state.append(path)
                else:
                    self._found.by_path[_free(path, self._found.by_path)] = value
            return
        if isinstance(value, _LEAVES) or _is_of_library(value) or depth < 1 or self._depths.get(id(value), -1) >= depth:
            return
        self._seen[id(value)], self._depths[id(value)] = value, depth
        for key, item in islice(_items(value), WIDTH):
            self._left -= 1
            if self._left < 0:
                self._found.is_complete = False
                return
            self.look(f"{path}{key}", item, depth - 1)


def _is_of_library(value: Any) -> bool:
    """Whether it is an object of trainstack, such as the plan or a log sink, which saves its own state."""
    return type(value).__module__.partition(".")[0] == "trainstack"


def _free(path: str, taken: Mapping[str, Any]) -> str:
    count, free = 1, path
    while free in taken:
        count += 1
        free = f"{path}-{count}"
    return free


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in `value`, with the end of the path that leads there."""
    if isinstance(value, Mapping):
        if type(value).__module__ in ("builtins", "collections"):
            yield from ((f"[{key!r}]", item) for key, item in list(islice(value.items(), WIDTH)))
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value[:WIDTH]))
    elif isinstance(value, functools.partial):
        yield from ((f"({index})", item) for index, item in enumerate(value.args))
        yield from ((f"({key}=)", item) for key, item in value.keywords.items())
        yield ".func", value.func
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    else:
        yield from ((f".{key}", item) for key, item in list(_attributes_of(value).items()))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = vars(kind).get(name)
                if type(member).__name__ == "member_descriptor" and hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _attributes_of(value: Any) -> Mapping[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")  # a class may define `__getattr__`, which is not called
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"({name})", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for index, item in enumerate(function.__defaults__ or ()):
        yield f"(default {index})", item
    for key, item in (function.__kwdefaults__ or {}).items():
        yield f"({key}=)", item


def get_generator_state(generator: Any) -> Any:
    """The state of one generator, as plain values, arrays and tensors."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give one generator the state that `get_generator_state` returned of one of its kind.

    Raises:
        TypeError, ValueError, RuntimeError, KeyError: it is the state of another kind of generator.
    """
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed one generator with 64 bits.

    Raises:
        TypeError, ValueError: it cannot be seeded.
    """
    if isinstance(generator, np.random.Generator):
        bits: Any = type(generator.bit_generator)
        generator.bit_generator.state = bits(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        # Shifted by one: a seed of 63 bits is the same number whether it is read with a sign or without.
        generator.manual_seed(seed >> 1)
