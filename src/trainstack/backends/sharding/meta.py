"""`initialize_meta` initializes a module that was built on the meta device, one part after the other."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._tensor_classes import is_sharded, shard_like
from trainstack.backends.processes.packing import broadcast_coalesced
from trainstack.backends.processes.world import World
from trainstack.backends.sharding.init_calls import InitCall, Slot, find_slots, init_calls, swapped
from trainstack.errors import ModuleContractError


def initialize_meta(module: nn.Module, world: World, *, stored: bool = True) -> None:
    """Allocate and initialize the tensors of `module` that are on the meta device. All processes call it.

    Rank 0 makes the values of one group of tensors after the other, on the CPU. A group contains the tensors that
    common calls initialize, such as those of one layer. All ranks receive the values, and each keeps its shards. So a
    rank never holds more than its shards and one group. The calls use the global generators in the order of one process
    that builds the module on the CPU, so the values and all later random numbers are the same.

    Args:
        module: after `place`; its sharded tensors may be on the meta device.
        world: of this process.
        stored: False if the tensors in the state dict will be loaded later. They are set to zeros, and no random number
            is drawn for them.

    Raises:
        ModuleContractError: no call initializes a tensor; the message has its name.
    """
    slots = find_slots(module)
    if not any(slot.is_meta for slot in slots):
        return
    _refuse_plain_tensors(module)
    with _generators_kept():
        calls = init_calls(module, slots)
    homes = _homes(slots, calls)
    if any(is_sharded(places[0].tensor) for places in homes.values()):
        _allocate_shards(module, homes.values(), world)
    left_out = set() if stored else set(module.state_dict())
    groups = _groups(calls)
    run = _Run(groups, calls) if world.is_main else None
    for group in groups:
        first = [slot for slot in group.slots if homes[id(slot.tensor)][0] is slot]
        is_loaded = all(slot.path in left_out for slot in first)
        values = [torch.zeros(one.tensor.shape, dtype=one.tensor.dtype) for one in first]
        if not is_loaded:
            if run is not None:
                values = run.make(group, first)
            broadcast_coalesced(world, values)
        while first:
            _place(homes[id(first[-1].tensor)], values.pop(), world)
            first.pop()
    _share_generator(world)


def _homes(slots: Sequence[Slot], calls: Sequence[InitCall]) -> dict[int, list[Slot]]:
    """The slots of each tensor on the meta device, by its id. The first slot is initialized and represents all."""
    known = {slot for call in calls for slot in call.written}
    homes: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.is_meta:
            homes.setdefault(id(slot.tensor), []).append(slot)
    for places in homes.values():
        places.sort(key=lambda slot: slot not in known)
    unknown = [places[0] for places in homes.values() if places[0] not in known]
    if unknown:
        _refuse_unknown(unknown)
    return homes


@dataclass(slots=True, eq=False)
class _Group:
    """Tensors that are initialized together, and the numbers of the calls that initialize them."""

    slots: list[Slot] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def _groups(calls: Sequence[InitCall]) -> list[_Group]:
    """Groups of slots, in the order of their first calls. Slots that one call touches are in one group."""
    group_of: dict[Slot, _Group] = {}
    for number, call in enumerate(calls):
        meta = [slot for slot in call.touched if slot.is_meta]
        joined = list({id(one): one for one in (group_of.get(slot) for slot in meta) if one is not None}.values())
        group = joined[0] if joined else _Group()
        for other in joined[1:]:
            group.slots += other.slots
            group.calls += other.calls
        group.slots += [slot for slot in meta if slot not in group_of]
        group.calls.append(number)
        group_of.update(dict.fromkeys(group.slots, group))
    found = list({id(group): group for group in group_of.values()}.values())
    for group in found:
        group.calls.sort()
    return sorted(found, key=lambda group: group.calls[0])


class _Run:
    """Makes calls by groups, with the random numbers that they would get in their original order."""

    def __init__(self, groups: Sequence[_Group], calls: Sequence[InitCall]) -> None:
        self._calls = calls
        self._states: list[Any] | None = None
        order = [number for group in groups for number in group.calls]
        if order != sorted(order):
            self._states = self._dry_run()

    def _dry_run(self) -> list[Any]:
        """The random states before each call and after the last. The values of these calls are discarded."""
        states = [_generators()]
        for call in self._calls:
            _make(call, {})
            states.append(_generators())
        return states

    def make(self, group: _Group, slots: Sequence[Slot]) -> list[Tensor]:
        """The values of `slots`, all of which are in `group`."""
        values: dict[Slot, Tensor] = {}
        for number in group.calls:
            if self._states is not None:
                _set_generators(self._states[number])
            _make(self._calls[number], values)
        if self._states is not None:
            _set_generators(self._states[-1])
        return [values[slot] for slot in slots]


def _make(call: InitCall, values: dict[Slot, Tensor]) -> None:
    """Make `call` with allocated tensors in its slots. `values` has the results so far, and gets the new ones."""
    tensors = {}
    for slot in call.touched:
        if slot in values:
            made = values[slot]
        elif slot.is_meta or is_sharded(slot.tensor):
            made = torch.zeros(slot.tensor.shape, dtype=slot.tensor.dtype)
        else:  # it has values, which the call must not change
            made = slot.tensor.detach().to("cpu", copy=True)
        tensors[slot] = slot.wrap(made)
    with swapped(tensors), torch.no_grad():
        call.run()
        for slot in tensors:
            if slot.is_meta:
                values[slot] = _checked(slot)


def _checked(slot: Slot) -> Tensor:
    made = slot.held.detach()
    if made.shape != slot.tensor.shape or made.is_meta:
        raise ModuleContractError(
            f"{slot.path} has the shape {tuple(slot.tensor.shape)}, and reset_parameters of its owner, "
            f"{type(slot.owner).__name__}, made one of {tuple(made.shape)} on {made.device}. Fill it in place."
        )
    return made.to("cpu", slot.tensor.dtype)


def _place(places: Sequence[Slot], values: Tensor, world: World) -> None:
    """Copy `values`, or this process's shard of them, to the tensor of `places`."""
    held = places[0].held
    if is_sharded(held):
        with torch.no_grad():  # with gradients torch 2.13.0 returns a view that must not be changed in place
            held.to_local().copy_(shard_like(values, held).to_local())  # type: ignore[attr-defined]
        return
    same_strides = torch.empty_like(places[0].tensor.detach(), device=world.device)
    made = places[0].wrap(same_strides.copy_(values))
    for slot in places:
        setattr(slot.owner, slot.name, made)  # by `__setattr__`, because an RNN keeps a separate list of its weights


def _allocate_shards(module: nn.Module, homes: Any, world: World) -> None:
    """Allocate the shards of this process for all tensors on the meta device. Tied tensors remain tied."""
    module._apply(  # type: ignore[no-untyped-call]
        lambda one: torch.empty_like(one, device=world.device) if one.is_meta else one
    )
    for first, *others in homes:
        for slot in others:
            slot.put(first.held)


def _refuse_unknown(slots: Sequence[Slot]) -> None:
    first = slots[0]
    more, were, them = (f" and {len(slots) - 1} more tensors", "were", "them") if len(slots) > 1 else ("", "was", "it")
    raise ModuleContractError(
        f"{first.path}{more} {were} built on the meta device, and no call initializes {them}. Write a method "
        f"reset_parameters(self) in {type(first.owner).__name__} that fills its parameters and buffers in place, or "
        "_init_weights(self, part) in a module around it. Or build this part without torch.device('meta')."
    )


def _refuse_plain_tensors(module: nn.Module) -> None:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ModuleContractError(
                    f"{path + '.' if path else ''}{name} is a tensor on the meta device and neither a parameter nor a "
                    "buffer. Register it: self.register_buffer(name, tensor, persistent=False), and fill it in "
                    "reset_parameters."
                )


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_generators(state: Any) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


@contextmanager
def _generators_kept() -> Iterator[None]:
    state = _generators()
    try:
        yield
    finally:
        _set_generators(state)


def _share_generator(world: World) -> None:
    """Give all processes rank 0's random state of torch, because only rank 0 has drawn numbers."""
    if world.size > 1:
        state = torch.get_rng_state().to(world.device)
        world.comm.broadcast_(state)
        torch.set_rng_state(state.cpu())
