"""Which calls give the tensors of a module their first values, and which tensors each of them reads or writes."""

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
    """The place of one tensor in a module: a parameter or a buffer.

    Attributes:
        owner: the part that holds it.
        registry: `"_parameters"` or `"_buffers"` (torch 2.13.0).
        name: in the part.
        path: in the module, for messages.
        tensor: what lay there when the slot was found; its shape is that of the whole tensor also if it is sharded.
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
        """What lies there now."""
        found: Tensor = getattr(self.owner, self.registry)[self.name]
        return found

    def put(self, tensor: Tensor) -> None:
        """Put `tensor` there for a while, past the part's `__setattr__`."""
        getattr(self.owner, self.registry)[self.name] = tensor

    def wrap(self, values: Tensor) -> Tensor:
        """`values` as what lies there is: a parameter with the same attributes, or a buffer."""
        if self.registry == "_buffers":
            return values
        made = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        vars(made).update({} if is_sharded(self.tensor) else vars(self.tensor))
        return made

    def empty(self, device: str | torch.device) -> Tensor:
        """A plain tensor of the whole shape."""
        return self.wrap(torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=device))


def find_slots(module: nn.Module) -> list[Slot]:
    """All places of strided tensors in `module`; a tied tensor has several."""
    return [
        Slot(part, registry, name, f"{path}.{name}" if path else name, tensor, tensor.is_meta)
        for path, part in module.named_modules()
        for registry in ("_parameters", "_buffers")
        for name, tensor in getattr(part, registry).items()
        if tensor is not None and tensor.layout is torch.strided
    ]


@dataclass(frozen=True, slots=True, eq=False)
class InitCall:
    """A call that initializes `part`, or parts of it.

    Attributes:
        part: the module that is initialized.
        run: makes the call.
        touched: the slots that it reads or writes.
        written: those of them that it writes.
    """

    part: nn.Module
    run: Callable[[], Any]
    touched: Sequence[Slot]
    written: Sequence[Slot]


def init_calls(module: nn.Module, slots: Sequence[Slot]) -> list[InitCall]:
    """The calls that initialize tensors on the meta device, in the order in which one process makes them.

    A constructor makes its children first. Then it initializes tensors of its own, by `reset_parameters()`. A part
    with `_init_weights(part)` is called last, with each part below that no other has initialized in this way; models of
    transformers have one. The calls are tried out with tensors that have no values, so nothing is computed.
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
    """The slots that `call` touches, and those that it writes; all `own` ones where it needs values."""
    stand_ins = {slot: slot.empty("meta") for slot in below}
    notes = _Notes({_memory(tensor): slot for slot, tensor in stand_ins.items()})
    with swapped(stand_ins), torch.no_grad():
        try:
            with dispatch_to(notes.see):
                call()
        except Exception:  # it read a value, or chose by one
            return own, own
        for slot, tensor in stand_ins.items():
            if slot.held is not tensor or _memory(tensor) not in notes.slots:  # assigned anew
                notes.touched[slot] = notes.written[slot] = None
    return list(notes.touched), list(notes.written)


@contextmanager
def swapped(tensors: Mapping[Slot, Tensor]) -> Iterator[None]:
    """A block in which these tensors lie in the slots."""
    before = {slot: slot.held for slot in tensors}
    for slot, tensor in tensors.items():
        slot.put(tensor)
    try:
        yield
    finally:
        for slot, tensor in before.items():
            slot.put(tensor)


class _Notes:
    """Notes which slots operations read and write, by the memory of the tensors in them."""

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
    """Which memory a tensor has; torch 2.13.0: a storage on the meta device has no address."""
    with suppress(RuntimeError):  # NotImplementedError of a sparse tensor among them
        return int(tensor.untyped_storage()._cdata)
    return 0
