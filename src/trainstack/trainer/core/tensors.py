"""Checks of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends import Communicator, TrainerBackend, Workload
from trainstack.checkpointing.encoding import is_storable
from trainstack.checkpointing.format import SPARSE_LAYOUTS
from trainstack.errors import ConfigurationError, NonFiniteError, PeerError


def is_finite(tensor: Tensor) -> Tensor:
    """Whether all values that `tensor` stores are finite: 0-dim, on its device, not read."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()  # values at one place add up
    elif tensor.layout in SPARSE_LAYOUTS:
        tensor = tensor.values()
    elif tensor.is_quantized:
        tensor = tensor.int_repr()
    elif tensor.is_nested and tensor.layout is torch.strided:
        tensor = tensor.to_padded_tensor(0.0)
    elif tensor.layout not in (torch.strided, torch.jagged):
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch 2.13.0: float8 has no `isfinite`
    return torch.isfinite(tensor).all()


def nonfinite_buffers(stack: TrainerBackend, module: nn.Module) -> frozenset[str]:
    """The names of buffers that hold inf or nan now, so that it means nothing there."""
    buffers = dict(module.named_buffers())
    finite = stack.read([is_finite(buffer) for buffer in buffers.values()])
    return frozenset(name for name, good in zip(buffers, finite, strict=True) if not good)


def check_finite_weights(
    stack: TrainerBackend,
    work: Workload,
    exempt: frozenset[str],
    optimizer_states: Sequence[Mapping[str, Any]],
    step: int,
    outcome: str = "No checkpoint was written.",
) -> None:
    """Refuse to keep parameters that are trained, buffers or states of optimizers that became inf or nan.

    One read of the device answers for all of them. Buffers named in `exempt` may hold anything, and so may the entries
    that an optimizer names in its attribute `nonfinite_state`.

    Args:
        stack: reads the device.
        work: has the module and the optimizers.
        exempt: see above.
        optimizer_states: what the `state_dict` of each optimizer returned.
        step: global steps that were made.
        outcome: what the message says of the consequence.

    Raises:
        NonFiniteError: naming the first of them.
    """
    held = [*_weights(work, exempt), *_optimizer_values(work, optimizer_states)]
    finite = stack.read([is_finite(tensor) for _, tensor in held])
    place = next((place for (place, _), good in zip(held, finite, strict=True) if not good), None)
    if place is not None:
        what, more = (repr(place[0]), "") if len(place) == 1 else _describe_entry(work, *place)
        raise NonFiniteError(
            f"{what} holds inf or nan after global step {step}. {outcome} Look for division by zero "
            "or log(0) in the forward pass, or write nonfinite='skip' to leave out steps whose gradients are not "
            f"finite.{more}"
        )


Place = tuple[Any, ...]
"""The name of a parameter or buffer; or the number of an optimizer, and the keys that lead to an entry of its state."""


def _weights(work: Workload, exempt: frozenset[str]) -> Iterator[tuple[Place, Tensor]]:
    trained = set(map(id, work.optimized_params))
    for name, parameter in work.module.named_parameters():
        if id(parameter) in trained:
            yield (name,), parameter
    for name, buffer in work.module.named_buffers():
        if name not in exempt:
            yield (name,), buffer


def _optimizer_values(work: Workload, states: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Place, Tensor]]:
    for position, (optimizer, state) in enumerate(zip(work.optimizers, states, strict=False)):
        allowed = set(getattr(optimizer, "nonfinite_state", ()))
        for place, tensor in _float_tensors(state.get("state") or {}, (position,)):
            if not allowed.intersection(place[1:]):
                yield place, tensor


def _float_tensors(value: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    """Tensors that could hold inf or nan and numbers that do, in nested containers, with the keys that lead there."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _float_tensors(item, (*place, key))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _float_tensors(item, (*place, position))
    elif isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        yield place, value
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, torch.tensor(value)


def _describe_entry(work: Workload, position: int, index: Any, *keys: Any) -> tuple[str, str]:
    """An entry of an optimizer's state in words, and what to write if it may hold inf."""
    optimizer = work.optimizers[position]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in work.module.named_parameters()}
    known = isinstance(index, int) and index < len(parameters)
    owner = names.get(id(parameters[index]), f"parameter {index}") if known else str(index)
    entry, kind = keys[0] if keys else index, type(optimizer).__name__
    more = f" If {kind} keeps inf or nan there on purpose, write optimizer.nonfinite_state = {{{entry!r}}}."
    return f"the state {entry!r} of {owner!r} in optimizer {position} ({kind})", more


def check_storable_buffers(module: nn.Module) -> None:
    """Refuse, before the first step, buffers that a checkpoint cannot hold.

    Raises:
        ConfigurationError: naming the first of them.
    """
    for name, buffer in module.named_buffers():
        if not is_storable(buffer) and name in module.state_dict():
            layout = str(buffer.layout).removeprefix("torch.")
            raise ConfigurationError(
                f"the buffer {name!r} is a {'quantized ' * buffer.is_quantized}{'nested ' * buffer.is_nested}tensor of "
                f"layout {layout} on {buffer.device.type}, which a checkpoint cannot store. Register it with "
                "persistent=False and make it in __init__, or store a dense tensor."
            )


def refuse_diverged(stack: TrainerBackend, module: nn.Module, comm: Communicator, step: int) -> None:
    """Refuse to keep the main process's weights for everybody's where they are not everybody's.

    Raises:
        PeerError: the weights differ between processes, on all of them.
    """
    if comm.size == 1:
        return
    sums = [p.detach().double().sum() for p in module.parameters()]
    by_rank = comm.gather(stack.read([torch.stack(sums).sum()])[0] if sums else 0.0)
    # 1e-6 leaves room for another order of addition. A sum of sums may agree for weights that differ: a cheap check.
    if max(by_rank) - min(by_rank) > 1e-6 * (max(map(abs, by_rank)) or 1.0):
        raise PeerError(
            f"after global step {step} the weights are not the same on all processes: their sums by rank are "
            f"{by_rank}. No checkpoint was written. A step may leave parameters out of the loss on some processes "
            "(write backend_options={'ddp': {'find_unused_parameters': True}}), or a hook changes weights on one "
            "process only."
        )
