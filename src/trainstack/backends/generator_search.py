"""Search for the random generators that objects reach, with the path to each."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from gc import get_referents
from itertools import chain, islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from trainstack.backends.generators import get_generator_state, kinds_of_generators

DEEP, WIDE, MANY = 8, 100, 10_000
"""Limits of the search: levels below a root, items of a container, and objects below a root. They bound its time: large
datasets hold many objects, and few of them lead to a generator."""

_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, type(None), ModuleType, CodeType)
_LEAVES += (torch.Tensor, np.ndarray, np.generic, torch.dtype, torch.device)  # type: ignore[assignment]
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)
_CALLABLES = (type, FunctionType, MethodType, BuiltinFunctionType)
_TENSORS_AND_PARTS = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "trainstack"} - {"__main__"})


class FoundGenerators:
    """The result of a search.

    Attributes:
        by_path: the generators, each once, under the first path to it.
        without_state: the generators whose state cannot be read, such as `random.SystemRandom`, by path.
        unsearched: paths of objects that were not searched completely, because of the limits.
    """

    def __init__(self) -> None:
        self.by_path: dict[str, Any] = {}
        self.without_state: dict[str, Any] = {}
        self.unsearched: list[str] = []

    def describe_unsearched(self) -> str:
        """The first three of the paths in `unsearched`, and the number of the others; "" if there are none."""
        more = len(self.unsearched) - 3
        return ", ".join(self.unsearched[:3]) + (f" and {more} more" if more > 0 else "")


def find_generators(*roots: Any, **named: Any) -> FoundGenerators:
    """Find the generators that `roots` and `named` reach. The paths below a named root begin with its name.

    The search follows attributes, containers, modules, functions with their closures, classes, the global variables
    that functions and methods name, and global generators in the scope of a module's class. It omits the global
    generators of torch, numpy and Python, and objects of trainstack. Objects of the same structure give the same paths
    in the same order in all processes. No code of the objects runs: no property, no `__getattr__`, no `__iter__`.
    """
    search = _Search()
    for name, root in (*(("", root) for root in roots), *named.items()):
        search.search(name, root)
    return search.found


class _Node(NamedTuple):
    parent: _Node | None
    label: str | tuple[Any, int]  # of an item of a dict: its key and its position
    value: Any
    level: int

    def path(self) -> str:
        node: _Node | None = self
        labels = list[str]()
        while node is not None:
            labels.append(node.label if isinstance(node.label, str) else _describe_key(*node.label))
            node = node.parent
        return "".join(reversed(labels)).removeprefix(".")


def _describe_key(key: Any, position: int) -> str:
    """The key, or its position if the text of the key may differ between processes or takes long to make."""
    plain = type(key) in (str, int, float, bool, bytes, type(None))
    return f"[{key!r}]" if plain else f"[key {position}]"


class _Search:
    def __init__(self) -> None:
        self.found = FoundGenerators()
        self._kinds = kinds_of_generators()
        numpys, pythons = getattr(np.random.mtrand, "_rand", None), getattr(random, "_inst", None)
        self._global = (torch.default_generator, *torch.cuda.default_generators, numpys, pythons)
        self._seen: dict[int, Any] = {id(one): one for one in self._global}  # holds them, so that no id is used twice
        self._noted = set[int]()
        self._is_leaf, self._is_of_user = dict[type, bool](), dict[type, bool]()
        self._scopes = set[str]()
        self._objects_left = self._items_left = 0

    def search(self, name: str, root: Any) -> None:
        self._objects_left, self._items_left = MANY, 50 * MANY  # items cost less: most are plain values
        ahead = [_Node(None, name, root, 0)]
        for node in ahead:  # breadth first; `ahead` grows in the loop
            value = node.value
            if id(value) in self._seen or self._leaf(type(value)):
                continue
            if issubclass(type(value), self._kinds):
                self._seen[id(value)] = value
                self._add(node.path(), value)
            elif node.level >= DEEP or self._objects_left < 1 or self._items_left < 1:
                self._note(node, self._may_own([value]))
            else:
                self._seen[id(value)] = value
                before = len(ahead)
                ahead += self._expand(node)
                # Containers of plain values do not count, because the layers of a large network have thousands.
                self._objects_left -= len(ahead) > before or type(value) not in (dict, list, tuple, FunctionType)

    def _expand(self, node: _Node) -> Iterator[_Node]:
        rest = _rest_of(node.value)
        if rest:
            self._items_left -= len(rest)
            self._note(node, self._may_own(rest))
        for label, inner in self._parts(node):
            self._items_left -= 1
            if not self._leaf(type(inner)):
                is_global = isinstance(label, str) and label.startswith("global ")
                is_class = issubclass(type(inner), type)
                yield _Node(None if is_global else node, label, inner, node.level + (not is_class))

    def _add(self, path: str, generator: Any) -> None:
        try:
            get_generator_state(generator)
        except Exception:  # a class of the user may raise any error
            places = self.found.without_state
        else:
            places = self.found.by_path
        count, free = 1, path
        while free in places:
            count += 1
            free = f"{path}-{count}"
        places[free] = generator

    def _note(self, node: _Node, may_own: bool) -> None:
        if may_own and id(node.value) not in self._noted:
            self._noted.add(id(node.value))
            self.found.unsearched.append(node.path())

    def _leaf(self, kind: type) -> bool:
        """Whether objects of `kind` are not searched: plain values, and trainstack's own objects."""
        known = self._is_leaf.get(kind)
        if known is None:
            own = _package(kind) == "trainstack" and not issubclass(kind, nn.Module | Dataset)
            known = self._is_leaf[kind] = own or issubclass(kind, _LEAVES)
        return known

    def _user(self, kind: type) -> bool:
        """Whether a class is the user's, not of an installed package."""
        known = self._is_of_user.get(kind)
        if known is None:
            known = self._is_of_user[kind] = is_of_user(kind)
        return known

    def _may_own(self, values: list[Any]) -> bool:
        """Whether `values` may contain a generator: a generator, an object of the user's, or a container with one.

        Objects of installed packages, such as tables, count as free of generators. Otherwise the list of unsearched
        paths would name nearly every dataset.
        """
        containers = [value for value in values if type(value) in (dict, *_SEQUENCES, *_SETS)]
        inner = list(islice(chain.from_iterable(map(_contents, containers)), MANY))
        self._items_left -= len(inner)
        kinds = {*map(type, values), *map(type, inner)}
        return any(issubclass(kind, self._kinds) or self._user(kind) for kind in kinds)

    def _parts(self, node: _Node) -> Iterator[tuple[Any, Any]]:
        value = node.value
        kind = type(value)
        if issubclass(kind, dict):
            items = list(islice(dict.items(value), WIDE))
            yield from (((key, position), item) for position, (key, item) in enumerate(items))
        elif issubclass(kind, _SEQUENCES):
            yield from ((f"[{position}]", item) for position, item in enumerate(islice(_contents(value), WIDE)))
        elif issubclass(kind, _SETS):
            yield from self._of_set(node)
        elif kind is MappingProxyType:
            yield from (("", inner) for inner in get_referents(value))
        elif issubclass(kind, type):
            yield from self._of_class(value)
            return
        elif kind is FunctionType:
            yield from self._of_function(value)
        elif kind in (MethodType, BuiltinFunctionType):
            yield ".__self__", value.__self__
            yield ".__func__", getattr(value, "__func__", None)
            return
        elif issubclass(kind, partial):
            yield from ((f"({position})", item) for position, item in enumerate(value.args))
            yield from ((f"({key}=)", item) for key, item in value.keywords.items())
            yield ".func", value.func
        elif issubclass(kind, nn.Module):
            yield from self._of_module(value)
            return
        yield from ((f".{name}", item) for name, item in _attributes(value))
        if id(kind) not in self._seen:
            yield "", kind

    def _of_set(self, node: _Node) -> Iterator[tuple[str, Any]]:
        """The only item that may hold generators. If there are several, their order may differ between processes."""
        items = [item for item in islice(_contents(node.value), MANY) if not self._leaf(type(item))]
        if len(items) == 1:
            yield "{}", items[0]
        else:
            self._note(node, self._may_own(items))

    def _of_module(self, root: nn.Module) -> Iterator[tuple[str, Any]]:
        """The attributes and hooks of a module and its parts, and global generators in the scopes of their classes."""
        parts = list(_named_parts(root))
        for path, part in parts:
            self._seen[id(part)] = part
            for key, item in _attributes(part):
                if key not in _OF_EVERY_MODULE:
                    yield f"{path}.{key}", item
                elif key not in _TENSORS_AND_PARTS and isinstance(item, dict):
                    yield from ((f"{path}.{key}[{place}]", hook) for place, hook in enumerate(list(item.values())))
        kinds = dict.fromkeys(type(part) for _, part in parts)
        yield from (("", kind) for kind in kinds)
        for scope in dict.fromkeys(str(base.__module__) for kind in kinds for base in kind.__mro__):
            if scope.partition(".")[0] not in ("torch", "trainstack", "builtins") and scope not in self._scopes:
                self._scopes.add(scope)
                yield from self._generators_in("global ", _attributes(sys.modules.get(scope)))

    def _of_function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        yield from held_by_function(function)
        yield from self._globals_named(function.__code__, function.__globals__, "global ")

    def _of_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Generators in attributes of a class, its methods, and its bases, except those of Python, torch and numpy."""
        for base in kind.__mro__:
            if _package(base) in _LIBRARIES or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            for name, item in list(vars(base).items()):
                yield from ((f".{name}", function) for function in functions_of(item))
                yield from self._one_level(f".{name}", item)

    def _globals_named(self, code: CodeType, variables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        """Generators in global variables that `code` names, one level deep, and the user's functions and classes."""
        for name in code.co_names:
            value = variables.get(name)
            kind = type(value)
            if kind is FunctionType or issubclass(kind, type):
                if is_scope_of_user(str(value.__module__)):
                    yield f"{prefix}{name}", value
            elif issubclass(kind, ModuleType):
                if prefix == "global " and is_scope_of_user(str(vars(value).get("__name__"))):
                    yield from self._globals_named(code, vars(value), f"{prefix}{name}.")
            else:
                yield from self._one_level(f"{prefix}{name}", value)
        for inner in code.co_consts:
            if type(inner) is CodeType:
                yield from self._globals_named(inner, variables, prefix)

    def _one_level(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """`value` if it is a generator, otherwise the generators among its items or attributes."""
        kind = type(value)
        if issubclass(kind, self._kinds):
            yield path, value
        elif issubclass(kind, dict):
            items = enumerate(islice(dict.items(value), MANY))
            yield from self._generators_in(path, ((_describe_key(key, n), item) for n, (key, item) in items))
        elif issubclass(kind, _SEQUENCES):
            items = enumerate(islice(_contents(value), MANY))
            yield from self._generators_in(path, ((f"[{n}]", item) for n, item in items))
        elif self._user(kind):
            yield from self._generators_in(path, ((f".{name}", item) for name, item in _attributes(value)))

    def _generators_in(self, path: str, items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(f"{path}{label}", item) for label, item in items if issubclass(type(item), self._kinds)]


def _contents(container: Any) -> Iterator[Any]:
    """The items of a builtin container, without calling methods that a subclass overrides."""
    if isinstance(container, dict):
        return iter(dict.values(container))
    kind = next(kind for kind in (*_SEQUENCES, *_SETS) if isinstance(container, kind))
    items: Iterator[Any] = kind.__iter__(container)
    return items


def _rest_of(value: Any) -> list[Any]:
    """The items of a container beyond the limit of the search."""
    if not issubclass(type(value), (dict, *_SEQUENCES)):
        return []
    return list(islice(_contents(value), WIDE, MANY))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes and slots of an object, without a call of its code."""
    found = list[tuple[str, Any]]()
    kind = type(value)
    if issubclass(kind, threading.local):
        found += threading.local.__getattribute__(value, "__dict__").items()
    for base in kind.__mro__:
        of_base = vars(base)
        held = of_base.get("__dict__")
        if isinstance(held, GetSetDescriptorType | MemberDescriptorType):
            attributes = held.__get__(value, kind)
            found += list(islice(attributes.items(), MANY)) if isinstance(attributes, dict) else ()
        for name, member in list(of_base.items()) if "__slots__" in of_base else ():
            if type(member) is MemberDescriptorType:
                try:
                    found.append((name, member.__get__(value, kind)))
                except AttributeError:  # an empty slot
                    continue
    return found


def _named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like `named_modules`, without calling methods that a module overrides."""
    seen, ahead = set[int](), [("", module)]
    while ahead:
        path, part = ahead.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield path, part
            children = dict(_attributes(part)).get("_modules") or {}
            ahead += [(f"{path}.{name}", child) for name, child in reversed(children.items()) if child is not None]


def held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The values in the closure and the defaults of a function, with labels. Its attributes are not among them."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"({name})", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    yield from ((f"(default {position})", item) for position, item in enumerate(function.__defaults__ or ()))
    yield from ((f"({name}=)", item) for name, item in (function.__kwdefaults__ or {}).items())


def functions_of(member: Any) -> list[Any]:
    """The functions behind a member of a class."""
    kind = type(member)
    if kind is FunctionType:
        return [member]
    if issubclass(kind, staticmethod | classmethod):
        return [member.__func__]
    if kind is property:
        return [member.fget]
    return [member.func] if kind is cached_property else []


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def is_of_user(kind: type) -> bool:
    """Whether the user defines the class, and not Python, torch, numpy, trainstack or an installed package."""
    return not issubclass(kind, (*_LEAVES, *_CALLABLES)) and is_scope_of_user(str(kind.__module__))


def is_scope_of_user(scope: str) -> bool:
    """Whether a module, given by its name, is the user's."""
    if scope.partition(".")[0] in _LIBRARIES:
        return False
    return "site-packages" not in str(getattr(sys.modules.get(scope), "__file__", None))
