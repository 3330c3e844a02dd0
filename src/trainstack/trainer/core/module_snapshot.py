"""`ModuleSnapshot` saves the buffers and parameters of a module by owner and name, and restores them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainstack._tensor_bytes import bytes_of
from trainstack._tensor_classes import is_sharded

_Registry = dict[str, Any]


class ModuleSnapshot:
    """Copy of a module's values, to be restored after a step that must not change the module.

    After a step a name may refer to another object: `self.running = 0.9 * self.running + ...` assigns a new tensor to
    the buffer. Therefore the snapshot keeps owners and names, and for each tensor the object and a copy of its value.
    `restore` restores all three. It removes names that were added and adds names that were removed.

    Args:
        module: module whose submodules are the owners.
        parameters: also keep parameters, their gradients and the registered submodules, not only buffers. Gradients are
            kept without a copy: set `.grad` to None before a backward pass adds to them.
    """

    def __init__(self, module: nn.Module, *, parameters: bool = False) -> None:
        self._module, self._parameters = module, parameters
        self._owners: list[nn.Module] = []
        self._registries: list[tuple[_Registry, _Registry]] = []
        self._transient: list[tuple[set[str], set[str]]] = []
        self._values: dict[int, _Value] = {}
        self._settings: list[tuple[nn.Parameter, bool, Tensor | None]] = []

    def keep(self) -> None:
        """Save the current values, in place of the earlier ones.

        Copies reuse the memory of the earlier copies. For a module without buffers the cost is one loop over its
        submodules.
        """
        self._owners = owners = _submodules(self._module)
        before, self._values, self._registries, self._transient = self._values, {}, [], []
        for owner in owners:
            # torch 2.13.0: `_buffers` also has the entries that are None, and each name of a tensor with two names.
            # `named_buffers` omits both.
            if owner._buffers:
                self._keep_registry(owner._buffers, before)
                self._transient.append((owner._non_persistent_buffers_set, set(owner._non_persistent_buffers_set)))
            if self._parameters:
                self._keep_registry(owner._parameters, before)
                self._registries.append((owner._modules, dict(owner._modules)))
        if self._parameters:
            self._settings = [(p, p.requires_grad, p.grad) for p in self._module.parameters()]

    def _keep_registry(self, registry: _Registry, before: dict[int, _Value]) -> None:
        self._registries.append((registry, dict(registry)))
        for tensor in registry.values():
            if tensor is not None and id(tensor) not in self._values:
                value = before.get(id(tensor))
                self._values[id(tensor)] = value if value is not None and value.keep() else _Value(tensor)

    def restore(self) -> None:
        """Restore the values of the last call of `keep`."""
        for owner in self._owners:
            owner._buffers.clear()  # an owner without buffers may have new ones
            owner._non_persistent_buffers_set.clear()
        for registry, entries in self._registries:
            registry.clear()
            registry.update(entries)
        for names, kept in self._transient:
            names.update(kept)
        for parameter, requires_grad, _ in self._settings:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None  # torch checks an assigned gradient against the current shape of the parameter
        for value in self._values.values():
            value.restore()
        for parameter, _, gradient in self._settings:
            parameter.grad = gradient


class _Value:
    """One tensor: the object, its memory and a copy of its value."""

    __slots__ = ("copy", "memory", "plain", "restorable", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # `.data` shares the memory. Its shape stays the same if the tensor is resized or gets other memory, and a write
        # to it does not increase the version counter that autograd compares.
        self.tensor, self.memory = tensor, tensor.data
        has_storage = tensor.layout is torch.strided and not is_sharded(tensor)
        without_values = has_storage and tensor.numel() > 0 == tensor.untyped_storage().nbytes()
        self.copy = tensor.data.new_empty(0) if without_values else self.memory.clone()
        self.plain = (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and not without_values
        )
        self.restorable = not without_values

    def keep(self) -> bool:
        """Copy the current value into the existing copy; return False if it does not fit."""
        if not self.plain or self._moved:
            return False
        self.copy.copy_(self.memory)
        return True

    def restore(self) -> None:
        if not self.restorable:
            return
        if self.tensor.layout is torch.sparse_coo:  # in-place copies fail if the number of its values has changed
            self.tensor.data = self.copy.clone()
            return
        if self.plain and self._moved:
            self.tensor.data = self.memory
        # Unchanged values are not written: the memory may be read-only or belong to an expanded tensor.
        if not (self.plain and torch.equal(bytes_of(self.memory), bytes_of(self.copy))):
            self.memory.copy_(self.copy)

    @property
    def _moved(self) -> bool:
        """Whether the tensor now has another memory, shape or dtype."""
        return self.tensor.dtype is not self.memory.dtype or not self.tensor.is_set_to(self.memory)


def _submodules(module: nn.Module) -> list[nn.Module]:
    """Return the modules of `module.modules()`; faster, because no generators are nested (torch 2.13.0)."""
    found, seen = [module], {id(module)}
    for owner in found:
        for child in owner._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found
