"""Checks of weights, buffers and optimizer states for inf, nan and differences between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._tensor_classes import inner_tensors, is_sharded, plain_parts
from trainstack.backends import TrainerBackend, Workload
from trainstack.backends.fast_paths import fast_largest
from trainstack.checkpointing.encoding import SPARSE_LAYOUTS, is_storable
from trainstack.errors import ConfigurationError, NonFiniteError, PeerError
from trainstack.trainer.core.agreement import Difference, find_difference, format_ranks
from trainstack.trainer.core.fingerprints import checksums

_MOST_AT_ONCE = 1 << 20
"""Elements that are converted to float32 at once if their dtype has no norm: 4 MiB."""


def are_finite(stack: TrainerBackend, tensors: Sequence[Tensor], *, fast_paths: bool = True) -> list[bool]:
    """Return for each tensor whether all its stored values are finite.

    All results are read in one transfer a device. No copy of the size of a tensor is made, because checkpoints are
    written when devices are nearly full.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        for part in _float_parts(tensor.detach()):
            groups.setdefault((part.device, part.dtype), []).append((index, part))
    owners, flags = list[int](), list[Tensor]()
    for group in groups.values():
        largest = fast_largest([part for _, part in group], enabled=fast_paths)
        flags += torch.isfinite(torch.stack(list(largest))).unbind()
        owners += [index for index, _ in group]
    finite = [True] * len(tensors)
    for index, good in zip(owners, stack.read(flags), strict=True):
        finite[index] &= bool(good)
    return finite


def is_quantized_wrapper(tensor: Tensor) -> bool:
    """Whether `tensor` is a wrapper around other tensors, such as the quantized weights of torchao."""
    return inner_tensors(tensor) is not None and not is_sharded(tensor)


def _float_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield dense real floating-point tensors with the values of `tensor`; none for integers, which are finite."""
    if inner_tensors(tensor) is not None:
        for part in plain_parts(tensor):
            yield from _float_parts(part)
    elif tensor.layout is torch.sparse_coo:
        yield from _float_parts(tensor.coalesce().values())  # adds up the values at one place
    elif tensor.layout in SPARSE_LAYOUTS:
        yield from _float_parts(tensor.values())
    elif tensor.is_nested and tensor.layout is torch.strided:
        for part in tensor.unbind():
            yield from _float_parts(part)
    elif tensor.is_nested:
        # Memory between its rows may be uninitialized, so it is not read. The result is 1, or inf if a value is not
        # finite.
        yield torch.isfinite(tensor).all().float().reciprocal()
    elif tensor.layout is not torch.strided:
        yield from _float_parts(tensor.to_dense())
    elif tensor.is_complex():
        yield from _float_parts(torch.view_as_real(tensor.resolve_conj()))  # the absolute value may overflow
    elif not tensor.is_floating_point() or not tensor.numel():
        return
    elif tensor.element_size() > 1:
        yield tensor
    else:  # torch 2.13.0: float8 has no norm
        for part in _pieces(tensor):
            yield torch.linalg.vector_norm(part.float(), float("inf"))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of `tensor` with at most `_MOST_AT_ONCE` elements each."""
    if tensor.numel() <= _MOST_AT_ONCE:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for half in tensor.chunk(2, longest):
        yield from _pieces(half)


def nonfinite_buffers(stack: TrainerBackend, module: nn.Module) -> frozenset[str]:
    """Return the names of buffers that hold inf or nan already, so that these values do not indicate an error."""
    buffers = dict(module.named_buffers())
    finite = are_finite(stack, list(buffers.values()))
    return frozenset(name for name, good in zip(buffers, finite, strict=True) if not good)


def check_finite_weights(
    stack: TrainerBackend,
    work: Workload,
    exempt: frozenset[str],
    optimizer_states: Sequence[Mapping[str, Any]],
    step: int,
    outcome: str = "No checkpoint was written.",
) -> None:
    """Check trained parameters, buffers and states of optimizers for inf and nan.

    Args:
        stack: backend that reads the device.
        work: has the module and the optimizers.
        exempt: names of buffers that may hold inf or nan. Entries that an optimizer lists in its attribute
            `nonfinite_state` may hold them too.
        optimizer_states: states of each optimizer, by the names of parameters.
        step: number of global steps done.
        outcome: sentence for the message on the consequence.

    Raises:
        NonFiniteError: a value is inf or nan; it names the first such tensor.
    """
    held = [*_weights(work, exempt), *_optimizer_values(work, optimizer_states)]
    finite = are_finite(stack, [tensor for _, tensor in held], fast_paths=work.fast_paths)
    if any(is_sharded(parameter) for parameter in work.parameters):  # this rank has checked only its shards
        counts = work.world.comm.sum([float(not good) for good in finite], "looking for inf and nan")
        finite = [not count for count in counts]
    place = next((place for (place, _), good in zip(held, finite, strict=True) if not good), None)
    if place is not None:
        what, more = (repr(place[0]), "") if len(place) == 1 else _describe_entry(work, *place)
        raise NonFiniteError(
            f"{what} holds inf or nan after global step {step}. {outcome} Look for division by zero "
            "or log(0) in the forward pass, or write nonfinite='skip' to skip steps whose gradients are not "
            f"finite.{more}"
        )


Place = tuple[Any, ...]
"""The name of a parameter or buffer; or the number of an optimizer, and the keys that lead to an entry of its state.
The first key is the name of a parameter, unless the optimizer has a custom form of state."""


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
        own = state.get("state_dict")
        made = {**(state.get("state") or {}), **(state.get("shared") or {})}
        entries = own.get("state") if isinstance(own, Mapping) else made
        for place, tensor in _float_tensors(entries or {}, (position,)):
            if not allowed.intersection(place[1:]):
                yield place, tensor


def _float_tensors(value: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    """Yield tensors of floats and numbers that are not finite, in nested containers, with their keys."""
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
    """Describe an entry of an optimizer's state, and how to allow inf or nan in it."""
    optimizer = work.optimizers[position]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in work.module.named_parameters()}
    known = isinstance(index, int) and index < len(parameters)  # otherwise the optimizer has a custom form of state
    owner = names.get(id(parameters[index]), f"parameter {index}") if known else str(index)
    entry, kind = keys[0] if keys else index, type(optimizer).__name__
    more = f" If {kind} keeps inf or nan there on purpose, write optimizer.nonfinite_state = {{{entry!r}}}."
    return f"the state {entry!r} of {owner!r} in optimizer {position} ({kind})", more


def check_storable_buffers(module: nn.Module) -> None:
    """Check before the first step that a checkpoint can hold all buffers.

    Raises:
        ConfigurationError: it cannot; the message names the first such buffer.
    """
    for name, buffer in module.named_buffers():
        if not is_storable(buffer) and name in module.state_dict():
            layout = str(buffer.layout).removeprefix("torch.")
            raise ConfigurationError(
                f"the buffer {name!r} is a {'quantized ' * buffer.is_quantized}{'nested ' * buffer.is_nested}tensor of "
                f"layout {layout} on {buffer.device.type}, which a checkpoint cannot store. Register it with "
                "persistent=False and create it in __init__, or store a dense tensor."
            )


def refuse_diverged(work: Workload, step: int, outcome: str = "No checkpoint was written.") -> None:
    """Check that the weights are equal on all ranks, bit for bit, before those of rank 0 are saved. Collective.

    Args:
        work: has the module, its optimizers and the ranks.
        step: number of global steps done.
        outcome: sentence for the message on the consequence.

    Raises:
        PeerError: a parameter differs between ranks; all ranks raise it, with the name, the ranks and the likely cause.
    """
    comm = work.world.comm
    if comm.size == 1:
        return
    named = {name: one for name, one in work.module.named_parameters() if not is_sharded(one)}
    sums = checksums(named.values())
    found = find_difference(comm, {name: f"{one:x}" for name, one in zip(named, sums, strict=True)})
    if found is None:
        return
    more = f" (and {_quoted(found.others)})" if found.others else ""
    held = {id(parameter) for parameter in work.optimized_params}
    held_by_none = [name for name in (found.name, *found.others) if name in named and id(named[name]) not in held]
    raise PeerError(
        f"after global step {step} the weights are not the same on all processes: {found.name!r}{more} differs on "
        f"{format_ranks(found.ranks)} from rank 0. {outcome} {_cause_of_difference(work, named, found, held_by_none)}"
    )


def _cause_of_difference(
    work: Workload, named: Mapping[str, nn.Parameter], found: Difference, held_by_none: Sequence[str]
) -> str:
    parameter = named.get(found.name)
    if parameter is None:
        return "Rank 0 has no parameter of that name: add parameters on all ranks."
    if found.name in held_by_none and parameter.requires_grad:
        return (
            f"{_quoted(held_by_none)} {'are' if len(held_by_none) > 1 else 'is'} in no optimizer of the trainer. "
            f"Under {work.world.size} processes their gradients are not summed if the module steps them itself. "
            "Return their optimizer from get_optimizers_schedulers, or sum the gradients with torch.distributed."
        )
    if not parameter.requires_grad:
        return (
            "It does not require gradients, so no step of the trainer changed it: a hook or train_step did, with "
            "values that depend on the rank. Write the same values on all ranks."
        )
    if work.gradients_reduced_by is None:
        return "No layer of the backend sums gradients over the processes: write backend='ddp'."
    return (
        "Its gradients are summed, so the weights or the summed gradients were changed on some ranks only: by a hook "
        "under `if rank == 0`, by random numbers or data of the rank in a hook, or by a setting of the optimizer that "
        "was changed on one rank. If the loss on some ranks does not depend on all parameters, write "
        "backend_options={'ddp': {'find_unused_parameters': True}}."
    )


def _quoted(names: Sequence[str], most: int = 3) -> str:
    """Format the first of `names` in quotes, for a message."""
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
