"""Generators that a dataset and what is around it hold: the search for them, and their seeds."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainstack.backends.generators import KINDS, get_generator_state, seed_generator, set_generator_state
from trainstack.trainer.core.order import mix

DEEP, WIDE, MANY = 8, 100, 10_000
"""How far generators are looked for: levels below an object, items of a container, and objects in all."""

_NO_OWNERS = (str, bytes, bytearray, int, float, complex, bool, range, torch.Tensor, np.ndarray, np.generic)
_NO_OWNERS += (torch.dtype, torch.device, ModuleType, BuiltinFunctionType, type(None))  # type: ignore[assignment]


def can_be_seeded(generator: Any) -> bool:
    """Whether `seed_generator` determines what `generator` draws. Its state stays what it is."""
    if isinstance(generator, random.SystemRandom):
        return False
    try:
        state = get_generator_state(generator)
        seed_generator(generator, 1)
        set_generator_state(generator, state)
    except Exception:  # whatever a class of the user's does
        return False
    return True


def find_generators(
    root: Any, name: str, *, deep: int = DEEP, unsearched: dict[int, str] | None = None
) -> dict[str, Any]:
    """The generators that `root` holds, by the path to each, such as "train_dataset.augment.rng"; each once.

    They are looked for in attributes, containers, functions with what they enclose, and in the global variables that
    functions and methods name, one level deep. torch's, numpy's and Python's own global generators are left out. Equal
    objects give equal paths in equal order, in all processes.

    `unsearched` gets, by its id, the path of what was not searched whole, because it is too wide, too deep or too much.
    """
    found: dict[str, Any] = {}
    known = {id(torch.default_generator), id(getattr(np.random.mtrand, "_rand", None)), id(getattr(random, "_inst", 0))}
    seen, alive = set[int](), [root]  # `alive` keeps what was made on the way, so that no identity is used twice
    ahead: list[tuple[str, Any, int]] = [(name, root, 0)]
    for path, value, level in ahead:  # the nearest ones first; it grows
        if isinstance(value, KINDS):
            if id(value) not in known:
                known.add(id(value))
                found[path] = value
            continue
        if id(value) in seen or isinstance(value, _NO_OWNERS):
            continue
        if level >= deep or len(seen) >= MANY:
            if unsearched is not None and _may_own(value):
                unsearched.setdefault(id(value), path)
            continue
        seen.add(id(value))
        if unsearched is not None and any(map(_may_own, islice(_items(value), WIDE, MANY))):
            unsearched.setdefault(id(value), path)
        for label, inner in _parts(value):
            alive.append(inner)
            ahead.append((f"{path}{label}", inner, level + 1))
    return found


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(dict.values(value))
    return iter(value) if isinstance(value, list | tuple) else iter(())


def _may_own(value: Any) -> bool:
    """Whether a generator may be in `value`: it is one, an object of the user's, or a container of such.

    Objects of installed packages, such as tables, are taken for free of them; else nearly each data set would be named.
    """
    if isinstance(value, KINDS) or _is_of_user(value):
        return True
    return any(isinstance(item, KINDS) or _is_of_user(item) for item in islice(_items(value), WIDE))


def _is_of_user(value: Any) -> bool:
    if isinstance(value, (*_NO_OWNERS, type, FunctionType, MethodType)):
        return False
    scope = type(value).__module__
    if scope.partition(".")[0] in {*sys.stdlib_module_names, "torch", "numpy", "trainstack"} - {"__main__"}:
        return False
    return "site-packages" not in (getattr(sys.modules.get(scope), "__file__", None) or "")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):  # other mappings may read files
        yield from ((f"[{key!r}]", item) for key, item in islice(dict.items(value), WIDE))
    elif isinstance(value, list | tuple):
        yield from ((f"[{position}]", item) for position, item in enumerate(islice(iter(value), WIDE)))
    elif isinstance(value, FunctionType):
        yield from _held_by_function(value)
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, type):
        yield from _held_by_class(value)
    if not isinstance(value, FunctionType | MethodType | type):
        yield from ((f".{name}", item) for name, item in _attributes(value))
        yield "", type(value)


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from list(attributes.items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def _held_by_function(function: Any) -> Iterator[tuple[str, Any]]:
    code: CodeType = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from ((f"[{position}]", item) for position, item in enumerate(function.__defaults__ or ()))
    yield from ((f".{name}", item) for name, item in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", item) for name, item in _globals_named(code, function.__globals__))


def _held_by_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Generators that a class of the user's keeps, and global ones that its methods name."""
    if kind.__module__.partition(".")[0] in ("torch", "numpy", "builtins", "trainstack", "collections", "functools"):
        return
    for name, item in list(vars(kind).items()):
        inner = getattr(item, "__func__", item)
        if isinstance(inner, KINDS):
            yield f".{name}", inner
        elif isinstance(inner, FunctionType):
            yield from ((f".{word}", held) for word, held in _globals_named(inner.__code__, inner.__globals__))
    yield from (("", base) for base in kind.__bases__)


def _globals_named(code: CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in code.co_names:
        value = variables.get(name)
        if isinstance(value, KINDS):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", item) for key, item in _generators_in(dict.items(value)))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{place}]", item) for place, item in _generators_in(enumerate(value)))
        elif _is_of_user(value):
            yield from ((f"{name}.{label}", item) for label, item in _generators_in(_attributes(value)))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_named(inner, variables)


def _generators_in(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [(label, item) for label, item in islice(items, MANY) if isinstance(item, KINDS)]


class OwnGenerators:
    """The generators that a dataset and what makes its batches hold, seeded like those of the process.

    They are looked for in each process and each epoch anew: a `worker_init_fn` or `set_epoch` may have made others.

    Args:
        owners: what to look in, by the names that paths begin with.
    """

    def __init__(self, **owners: Any) -> None:
        self._owners = owners
        self._found: list[Any] = []
        self._found_at: tuple[int, int] | None = None  # the process and the epoch
        self._kept: list[tuple[Any, Any]] | None = None  # generators and their states, in `preserved`
        self._left_out: set[int] = set()

    def without(self, generators: Iterable[Any]) -> OwnGenerators:
        """Leave out some generators, which are seeded by others."""
        self._left_out = {id(generator) for generator in generators}
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_own_generators, (self._owners,)

    def by_path(self) -> dict[str, Any]:
        """All of them, by the path to each."""
        found: dict[str, Any] = {}
        known = set(self._left_out)
        for name, owner in self._owners.items():
            for path, generator in find_generators(owner, name).items():
                if id(generator) not in known:
                    known.add(id(generator))
                    found[path] = generator
        return found

    def unseedable(self) -> list[str]:
        """The paths of those that cannot be seeded."""
        return [path for path, generator in self.by_path().items() if not can_be_seeded(generator)]

    def unsearched(self) -> list[str]:
        """The paths of what was not searched whole; none if the search is complete."""
        paths: dict[int, str] = {}
        for name, owner in self._owners.items():
            find_generators(owner, name, unsearched=paths)
        return list(paths.values())

    def seed(self, seed: int, epoch: int, index: int) -> None:
        """Seed each by (seed, epoch, index) and its position among them."""
        place = os.getpid(), epoch
        if place != self._found_at:
            self._found = [generator for generator in self.by_path().values() if can_be_seeded(generator)]
            self._found_at = place
        if not self._found:
            return
        if self._kept == []:
            self._kept = [(generator, get_generator_state(generator)) for generator in self._found]
        for position, generator in enumerate(self._found):
            seed_generator(generator, mix(seed, epoch, index, position))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A block after which the generators are what they were, as if another process had run it."""
        self._kept = []
        try:
            yield
        finally:
            kept, self._kept = self._kept, None
            for generator, state in kept or ():
                set_generator_state(generator, state)


WHOLE_EPOCH = -1
"""In the place of a sample's index in the seed of the generators of a loader with an order of its own."""


def own_generators(loader: Any, besides: Any = None) -> OwnGenerators:
    """Those of a loader: of its dataset, its `collate_fn`, its samplers, and of itself if it is no `DataLoader`.

    Generators that are attributes of `besides` are left out: their states are its own.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) or getattr(batches, "sampler", None)
    owners = {"train_dataset": getattr(loader, "dataset", None), "collate_fn": getattr(loader, "collate_fn", None)}
    owners |= {"sampler": sampler, "batch_sampler": batches}
    owners |= {} if isinstance(loader, DataLoader) else {"loader": loader}
    return OwnGenerators(**owners).without(vars(besides).values() if besides is not None else ())


def _restore_own_generators(owners: dict[str, Any]) -> OwnGenerators:
    return OwnGenerators(**owners)
