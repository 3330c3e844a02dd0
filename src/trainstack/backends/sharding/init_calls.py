"""Find the calls that initialize the tensors of a module, and the tensors that each of them reads or writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._dispatch import dispatch_to
from trainstack._tensor_classes import is_sharded


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The position of one tensor in a module: a parameter or a buffer.

    Attributes:
        owner: the submodule that holds it.
        registry: `"_parameters"` or `"_buffers"` (torch 2.13.0).
        name: in the submodule.
        path: in the module, for messages.
        tensor: the tensor when the slot was found. Its shape is that of the whole tensor, even if it is sharded.
        is_meta: whether it was on the meta device then.
    """

    owner: nn.Module
    registry: str
    name: str
    path: str
    tensor: Tensor
    is_meta: bool

    @property
    def held(self) -> Tensor:
        """The current tensor."""
        found: Tensor = getattr(self.owner, self.registry)[self.name]
        return found

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor temporarily, without `__setattr__` of the submodule."""
        getattr(self.owner, self.registry)[self.name] = tensor

    def wrap(self, values: Tensor) -> Tensor:
        """`values` in the form of the slot: a parameter with the same attributes, or a buffer."""
        if self.registry == "_buffers":
            return values
        made = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        vars(made).update({} if is_sharded(self.tensor) else vars(self.tensor))
        return made

    def empty(self, device: str | torch.device) -> Tensor:
        """A plain, uninitialized tensor of the whole shape."""
        return self.wrap(torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=device))


def find_slots(module: nn.Module) -> list[Slot]:
    """The slots of all strided tensors in `module`; a tied tensor has several."""
    return [
        Slot(part, registry, name, f"{path}.{name}" if path else name, tensor, tensor.is_meta)
        for path, part in module.named_modules()
        for registry in ("_parameters", "_buffers")
        for name, tensor in getattr(part, registry).items()
        if tensor is not None and tensor.layout is torch.strided
    ]


@dataclass(frozen=True, slots=True, eq=False)
class InitCall:
    """A call that initializes `part` or submodules of it.

    Attributes:
        part: the module that is initialized.
        run: makes the call.
        touched: the slots that it reads or writes.
        written: the slots that it writes.
    """

    part: nn.Module
    run: Callable[[], Any]
    touched: Sequence[Slot]
    written: Sequence[Slot]


def init_calls(module: nn.Module, slots: Sequence[Slot]) -> list[InitCall]:
    """The calls that initialize tensors on the meta device, in the order in which one process makes them.

    A constructor makes its children first, and then initializes its tensors by `reset_parameters()`. A method
    `_init_weights(part)`, as in models of transformers, is called last, with each submodule that no other such method
    has initialized. The function tries the calls with tensors without values, so nothing is computed.
    """
    of_part: dict[int, list[Slot]] = {}
    for slot in slots:
        of_part.setdefault(id(slot.owner), []).append(slot)
    found = []
    for part, call in _in_order(module, set(), set()):
        below = [slot for one in part.modules() for slot in of_part.get(id(one), ())]
        if any(slot.is_meta for slot in below):
            touched, written = _try_out(call, below, of_part.get(id(part), ()))
            if any(slot.is_meta for slot in written):
                found.append(InitCall(part, call, touched, written))
    return found


def _in_order(module: nn.Module, seen: set[int], done: set[int]) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _in_order(child, seen, done)
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if _takes(reset, 0):
        yield module, reset
    visit: Any = getattr(module, "_init_weights", None)
    if _takes(visit, 1):
        for part in _children_first(module, set()):
            if id(part) not in done:
                done.add(id(part))
                yield part, partial(visit, part)
    elif _takes(visit, 0):
        yield module, visit


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(child, seen)
    yield module


def _takes(function: Any, count: int) -> bool:
    if not callable(function) or isinstance(function, nn.Module):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


def _try_out(
    call: Callable[[], Any], below: Sequence[Slot], own: Sequence[Slot]
) -> tuple[Sequence[Slot], Sequence[Slot]]:
    """The slots that `call` touches, and those that it writes; for both all of `own` if the call needs values."""
    stand_ins = {slot: slot.empty("meta") for slot in below}
    notes = _Notes({_memory(tensor): slot for slot, tensor in stand_ins.items()})
    with swapped(stand_ins), torch.no_grad():
        try:
            with dispatch_to(notes.see):
                call()
        except Exception:  # it read a value, or branched on one, which tensors on the meta device do not have
            return own, own
        for slot, tensor in stand_ins.items():
            if slot.held is not tensor or _memory(tensor) not in notes.slots:  # the call assigned a new tensor
                notes.touched[slot] = notes.written[slot] = None
    return list(notes.touched), list(notes.written)


@contextmanager
def swapped(tensors: Mapping[Slot, Tensor]) -> Iterator[None]:
    """A block in which the slots hold these tensors."""
    before = {slot: slot.held for slot in tensors}
    for slot, tensor in tensors.items():
        slot.put(tensor)
    try:
        yield
    finally:
        for slot, tensor in before.items():
            slot.put(tensor)


class _Notes:
    """Records the slots that operations read and write, by the memory of their tensors."""

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        self.slots = slots
        self.touched: dict[Slot, None] = {}
        self.written: dict[Slot, None] = {}

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                slot = self.slots.get(_memory(tensor)) if isinstance(tensor, Tensor) else None
                if slot is not None:
                    self.touched[slot] = None
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        self.written[slot] = None
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """The identity of a tensor's memory. torch 2.13.0: a storage on the meta device has no address, only `_cdata`."""
    with suppress(RuntimeError):  # includes the NotImplementedError of a sparse tensor
        return int(tensor.untyped_storage()._cdata)
    return 0
