"""Attributes of optimizers that user code defines, such as a count of the steps."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import pickle
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends.generators import get_generator_state, kinds_of_generators, set_generator_state
from trainstack.backends.optimizer_state import PLAIN, move_tensors
from trainstack.checkpointing.encoding import StateEncoder, type_name
from trainstack.errors import UnsupportedStateError
from trainstack.trainer.core.state_tree import SMALL, copied, lies_in, memory_of, same, size_of, tensors_in

_LIBRARIES = ("torch", "apex", "trainstack")
_MUTABLE = (MutableMapping, MutableSet, MutableSequence)  # restored in place, because other objects may hold them


@functools.cache
def _of_torch() -> frozenset[str]:
    """The attributes of each optimizer, and those that schedulers and scalers of torch 2.13.0 add."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"step", "grad_scale", "found_inf"}


def own_attributes(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer of a user's class, without those of `torch.optim.Optimizer`."""
    if type(optimizer).__module__.partition(".")[0] in _LIBRARIES:
        return {}
    return {name: value for name, value in vars(optimizer).items() if name not in _of_torch()}


def _is_storable(value: Any) -> bool:
    try:
        StateEncoder().encode(value)
    except UnsupportedStateError:
        return False
    return True


def _is_large(value: Any) -> bool:
    """Whether `value` is a large container without tensors, which is probably a log, such as a list of all rates."""
    return isinstance(value, _MUTABLE) and next(tensors_in(value), None) is None and size_of(value) > SMALL


def _has_parameters(value: Any) -> bool:
    return any(isinstance(one, nn.Parameter) for one in tensors_in(value))


class OptimizerAttributes:
    """Saves and restores the attributes that the class of an optimizer adds.

    It saves tensors, and attributes that have changed since the optimizer was made: numbers, text, and containers of
    them up to 64 KiB. It does not save tensors that share memory with the module or with the state of the optimizer.

    Args:
        optimizer: the optimizer before its first step.
        module: the module with the parameters.
        is_part: whether the optimizer is the part of one rank. Its tensors are then not saved.
    """

    def __init__(self, optimizer: Any, module: nn.Module, *, is_part: bool = False) -> None:
        self._optimizer, self._module, self._is_part = optimizer, module, is_part
        self._made, self._fingerprints, self._named = dict[str, Any](), dict[str, str](), set[str]()
        for name, value in own_attributes(optimizer).items():
            if not _is_storable(value):
                self._fingerprints[name] = _fingerprint(value)
            elif next(tensors_in(value), None) is None:
                self._made[name] = copied(value)

    def get_state(self, in_state: Iterable[Any] = ()) -> dict[str, Any]:
        """Return `{"values": {name: value}, "on_host": [names]}`, or an empty dict.

        "on_host" names the values whose tensors are on the CPU while the parameters are on another device.

        Args:
            in_state: the values of the state dict. Attributes among them are omitted.
        """
        known = {id(value) for value in in_state if not isinstance(value, PLAIN)}
        mine = own_attributes(self._optimizer).items()
        values = {name: value for name, value in mine if id(value) not in known and self._is_kept(name, value)}
        device = self._device()
        on_host = [
            name
            for name, value in values.items()
            if device.type != "cpu" and all(t.device.type == "cpu" for t in tensors_in(value) if isinstance(t, Tensor))
        ]
        return {"values": values, **({"on_host": on_host} if on_host else {})} if values else {}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `get_state`."""
        device = self._device()
        for name, value in state.get("values", {}).items():
            on_host = name in state.get("on_host", ())
            moved = move_tensors(value, Tensor.cpu if on_host else lambda one: one.to(device))
            mine = vars(self._optimizer)
            if type(mine.get(name)) is type(moved) and isinstance(moved, _MUTABLE):
                _refill(mine[name], moved)
            else:
                mine[name] = moved

    def find_lost(self) -> list[str]:
        """The attributes that have changed and are not saved, with their types. Each is returned once."""
        lost = []
        for name, value in own_attributes(self._optimizer).items():
            if _is_storable(value) and not _is_large(value):
                continue
            before, now = self._fingerprints.setdefault(name, ""), _fingerprint(value)
            if before != now and name not in self._named:
                self._named.add(name)
                lost.append(f"{name} ({type_name(value)})")
        return lost

    def _is_kept(self, name: str, value: Any) -> bool:
        if not _is_storable(value) or _is_large(value):
            return False
        tensors = [one for one in tensors_in(value) if isinstance(one, Tensor)]
        if not tensors:
            return name not in self._made or not same(self._made[name], value)
        state = (one for one in tensors_in(self._optimizer.state) if isinstance(one, Tensor))
        memory = memory_of([*self._module.parameters(), *self._module.buffers(), *state, *self._parameters()])
        is_own = not any(one.requires_grad or lies_in(one, memory) for one in tensors)
        return is_own and not self._is_part and not _has_parameters(value)

    def _parameters(self) -> Iterable[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters()), torch.device("cpu"))


def _fingerprint(value: Any) -> str:
    """A hash of an object without the values of tensors and arrays, or its `id` if it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # a class may raise anything in its `__reduce__`
        return str(id(value))
    return hashlib.sha256(file.getvalue()).hexdigest()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        return type_name(value) if isinstance(value, Tensor | np.ndarray | nn.Module | Optimizer) else None


class AttributeSnapshot:
    """A copy of the attributes that the class of an optimizer adds, to restore them.

    Args:
        optimizer: the optimizer.
        on_host: copy tensors to the host's memory.
        with_tensors: whether to copy the values of tensors.
    """

    def __init__(self, optimizer: Any, on_host: bool, with_tensors: bool) -> None:
        self._optimizer = optimizer
        self._kept = own_attributes(optimizer)
        plain = {
            name: value for name, value in self._kept.items() if _is_storable(value) and not _has_parameters(value)
        }
        self._values = {name: _with_same_tensors(value) for name, value in plain.items()}
        self._tensors = [
            (one, copied(one, on_host=on_host)) for one in tensors_in(plain) if with_tensors and isinstance(one, Tensor)
        ]
        others = (value for value in self._kept.values() if isinstance(value, kinds_of_generators()))
        self._generators = [(one, get_generator_state(one)) for one in others]

    def restore(self) -> None:
        """Restore the attributes. Attributes that were added later are deleted."""
        mine = vars(self._optimizer)
        for name in own_attributes(self._optimizer).keys() - self._kept.keys():
            del mine[name]
        for name, value in self._kept.items():
            if name in self._values:
                _refill(value, self._values[name])
            mine[name] = value
        for tensor, before in self._tensors:
            tensor.data.copy_(before)
        for generator, state in self._generators:
            set_generator_state(generator, state)


def _with_same_tensors(value: Any) -> Any:
    return copy.deepcopy(value, {id(one): one for one in tensors_in(value) if isinstance(one, Tensor)})


def _refill(container: Any, items: Any) -> None:
    """Replace the items of a container in place, because other objects may hold it."""
    if isinstance(container, MutableMapping | MutableSet):
        container.clear()
        container.update(items) if isinstance(container, MutableMapping) else container.__ior__(items)
    elif isinstance(container, deque):
        container.clear()
        container.extend(items)
    elif isinstance(container, MutableSequence):
        container[:] = items
    elif isinstance(container, np.ndarray):
        container[...] = items
