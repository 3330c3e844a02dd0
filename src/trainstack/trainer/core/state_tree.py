"""Copies of states, and the leaves in which two states differ."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from trainstack._tensor_bytes import bytes_of
from trainstack._tensor_classes import inner_tensors, is_sharded, map_inner, plain_parts
from trainstack.checkpointing.difference import differences

Path = tuple[Any, ...]
"""The keys that lead to a leaf through nested dicts."""

SMALL = 2**16
"""Largest size in bytes of a leaf, or of the plain values of a dict, whose old value is kept: 64 KiB, so that counters
and settings are kept, and averages of parameters are not."""

ITEM = 16
"""Bytes that an item of a container counts in addition to tensors, arrays and text: about a pointer and a number."""


_NESTED = (dict, OrderedDict)


def leaves(state: Any, containers: Collection[Path]) -> dict[Path, Any]:
    """Return the leaves of nested dicts by path: values that are not dicts at one of `containers`, or empty dicts."""
    found: dict[Path, Any] = {}

    def add(value: Any, path: Path) -> None:
        if type(value) not in _NESTED or path not in containers or (not value and path):
            found[path] = value
            return
        for key, item in value.items():
            add(item, (*path, key))

    add(state, ())
    return found


def small_containers(state: Mapping[str, Any]) -> set[Path]:
    """Return the paths of the nested dicts in `state` whose plain values are small together.

    Tensors in them count separately, and so does each item of the result of one `get_state`.
    """
    found = set[Path]()

    def measure(value: Any, path: Path) -> int:
        size, of_user = 0, path == _owner(path)
        for key, item in value.items():
            if type(item) in _NESTED:
                inner = measure(item, (*path, key))
                size += 0 if of_user else inner
            elif not isinstance(item, Tensor | np.ndarray):
                inner = ITEM if of_user else size_of(item)
                size += inner if inner <= SMALL else ITEM
            if size > SMALL:
                return ITEM  # the dict is one large leaf
        found.add(path)
        return size

    measure(state, ())
    return found


def tensors_in(value: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and arrays in nested containers."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from tensors_in(item)


def size_of(value: Any) -> int:
    """Return the bytes of `value` and its items; if they are more than `SMALL`, any number above `SMALL`."""
    total = 0
    for size in _sizes_in(value):
        total += size
        if total > SMALL:
            break
    return total


def _sizes_in(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor | np.ndarray):
        # A sharded tensor always counts as large, so that all processes get the same result.
        yield value.nbytes if _has_bytes(value) and not is_sharded(value) else SMALL + 1
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield len(key) if isinstance(key, str | bytes) else 0
            yield from _sizes_in(item)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _sizes_in(item)
    else:
        yield ITEM + (len(value) if isinstance(value, str | bytes | bytearray) else 0)


def _has_bytes(value: Tensor | np.ndarray[Any, Any]) -> bool:
    return isinstance(value, np.ndarray) or _has_memory(value)


def _has_memory(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def copied(value: Any, *, on_host: bool = False) -> Any:
    """Return a deep copy, with tensors detached from their graphs and, with `on_host`, on the CPU.

    An object that cannot be copied, such as a lock, is the same object in the copy.
    """
    try:
        return _deep_copy(value, on_host)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # the `__reduce__` of a user's class may raise any error
        if type(value) in _NESTED:
            return type(value)((key, copied(item, on_host=on_host)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(copied(item, on_host=on_host) for item in value)
        return value


def _deep_copy(value: Any, on_host: bool = False) -> Any:
    memo: dict[int, Any] = {}
    for item in tensors_in(value):
        if isinstance(item, Tensor) and is_lazy(item):  # has no values to copy
            memo[id(item)] = item
        elif isinstance(item, Tensor):
            memo[id(item)] = map_inner(item, lambda one: _copied_tensor(one, on_host))
    return copy.deepcopy(value, memo)


def _copied_tensor(tensor: Tensor, on_host: bool) -> Tensor:
    detached = tensor.detach()
    return detached.to("cpu", copy=True) if on_host else detached.clone()


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same types and bits; the device of a tensor does not count."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor) and is_lazy(one):
        return False
    if isinstance(one, Tensor) and inner_tensors(one) is not None:
        parts = [list(plain_parts(side)) for side in (one, other)]
        return len(parts[0]) == len(parts[1]) and all(map(same, *parts))
    if isinstance(one, Tensor) and one.layout is torch.strided and not one.is_quantized:
        if one.dtype is not other.dtype or one.shape != other.shape or other.layout is not torch.strided:
            return False
        if one.is_set_to(other):
            return True
        if one.is_meta or other.is_meta:
            return one.is_meta and other.is_meta
        return torch.equal(_bytes(one), _bytes(other.to(one.device)))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return not any(True for _ in differences(one, other))


def _bytes(tensor: Tensor) -> Tensor:
    return bytes_of(tensor.detach().resolve_conj().resolve_neg())


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of `tensors` that have memory."""
    parts = (part for tensor in tensors for part in plain_parts(tensor))
    return {t.untyped_storage().data_ptr() for t in parts if _is_plain(t) or _has_memory(t)} - {0}


def lies_in(value: Any, memory: set[int]) -> bool:
    """Whether `value` is a tensor in one of the storages of `memory_of`."""
    if not isinstance(value, Tensor):
        return False
    parts = plain_parts(value)
    return all((_is_plain(p) or _has_memory(p)) and p.untyped_storage().data_ptr() in memory for p in parts)


class _Packed:
    """Copy of small tensors of one dtype and device as one tensor, because a copy of each would take much longer."""

    def __init__(self, tensors: Mapping[Path, Tensor]) -> None:
        self.shapes = {path: tensor.shape for path, tensor in tensors.items()}
        self._copy = _joined(tensors.values())

    def changed(self, found: Mapping[Path, Any]) -> dict[Path, Tensor]:
        """Return the tensors that have another value in `found` or are missing there."""
        now: list[Any] = [found.get(path) for path in self.shapes]
        known = [one for one in now if _is_plain(one) and one.dtype is self._copy.dtype]
        if [one.shape for one in known] == list(self.shapes.values()) and same(_joined(known), self._copy):
            return {}
        changed, first = dict[Path, Tensor](), 0
        for (path, shape), other in zip(self.shapes.items(), now, strict=True):
            part = self._copy[first : first + shape.numel()].view(shape)
            first += shape.numel()
            if not (_is_plain(other) and same(part, other.detach())):
                changed[path] = part.clone()
        return changed


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _is_plain(value: Any) -> bool:
    known = type(value) in (Tensor, Parameter) and value.layout is torch.strided  # excludes lazy classes
    return known and not (value.is_meta or value.is_quantized)


class OldState:
    """The current leaves of a state, to be restored in a later state.

    Large leaves and leaves that cannot be copied are omitted. Otherwise an epoch, and each checkpoint in it, would hold
    a second copy of averages and caches. If such an omitted leaf is missing in the later state, the whole result of
    that `get_state` is not restored. An example is `EMA`: its state has no averages of parameters that a hook has
    frozen since.

    Args:
        state: nested dicts.
        is_weight: whether a leaf is the value of a parameter. These are kept only if `drop_unchanged_weights` finds
            that they have changed.
    """

    def __init__(self, state: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> None:
        self._containers = small_containers(state)
        found = leaves(state, self._containers)
        self._paths = set(found)
        self._values: dict[Path, Any] = {}
        self._others: list[Path] = []  # weights that cannot be packed
        kinds: dict[Any, dict[Path, Tensor]] = {}
        for path, leaf in found.items():
            if _is_plain(leaf) and is_weight(leaf):
                if leaf.nbytes <= SMALL:
                    kinds.setdefault((leaf.dtype, leaf.device), {})[path] = leaf
            elif size_of(leaf) <= SMALL:
                with suppress(Exception):  # leaves that cannot be copied are omitted
                    self._values[path] = _deep_copy(leaf)
                self._others += [path] if is_weight(leaf) else []
        self._packed = [_Packed(kind) for kind in kinds.values()]

    @property
    def has_weights(self) -> bool:
        """Whether values of parameters are kept, changed or not."""
        return bool(self._packed or self._others)

    def drop_unchanged_weights(self, state: Mapping[str, Any]) -> None:
        """Drop the parameters that have the same value in `state`."""
        found = leaves(state, self._containers)
        for path in self._others:
            if path in found and path in self._values and same(self._values[path], found[path]):
                del self._values[path]
        for packed in self._packed:
            self._values |= packed.changed(found)
        self._packed, self._others = [], []

    def differing(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the leaves of `state` to be replaced by these, in a form for a checkpoint; None if there are none."""
        found = leaves(state, self._containers)
        kept = self._values.keys() | {path for packed in self._packed for path in packed.shapes}
        lost = {_owner(path) for path in self._paths - kept - found.keys()}
        values = {p: v for p, v in self._values.items() if p not in found or not same(v, found[p])}
        for packed in self._packed:
            values |= packed.changed(found)
        old = [[list(path), value] for path, value in values.items() if _owner(path) not in lost]
        added = [list(path) for path in found if path not in self._paths and _owner(path) not in lost]
        return {"values": old, "added": added} if old or added else None


def _owner(path: Path) -> Path:
    """Return the path of the `get_state` result that contains `path`."""
    return path[:1] if path[:1] == ("module",) else path[:2]


def with_old_values(state: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[Any, Any]:
    """Apply the result of `OldState.differing` to `state`: insert old values, remove leaves that were added later.

    Containers are copied; unchanged leaves are those of `state`.
    """
    root: dict[Any, Any] = _without_leaves(state)
    for path in (old or {}).get("added", ()):
        _remove(root, list(path))
    for path, value in (old or {}).get("values", ()):
        here = root
        for key in path[:-1]:
            here = here.setdefault(key, {})
        if not (type(value) in _NESTED and not value and here.get(path[-1])):
            here[path[-1]] = copied(value)
    return root


def _without_leaves(value: Any) -> Any:
    if type(value) not in _NESTED:
        return value
    return type(value)((key, _without_leaves(item)) for key, item in value.items())


def _remove(container: Any, path: list[Any]) -> None:
    key, *rest = path
    if type(container) not in _NESTED or key not in container:
        return
    if rest:
        _remove(container[key], rest)
    if not rest or (type(container[key]) in _NESTED and not container[key]):
        del container[key]
