"""`MemoryPlan`, the bytes that one process needs, known before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack._tensor_classes import is_sharded
from trainstack.trainer.core.optimizer_memory import reading_ones, state_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one process. Make one with `plan_memory`.

    Attributes:
        parameters: of the module; this process's part of those that are sharded.
        gradients: of the parameters that are trained, likewise.
        optimizer: states of the optimizers after their first step; None if it is not known.
        buffers: of the module, whole.
        gathered: the most that lies there whole for a while, of a sharded module: parameters outside of all units, two
            units, and the gradients of one. With several micro-batches a step, the gradients of all.
        activations: what one micro-batch keeps for its backward pass; None if it is not known.
        unknown: why a number is None, by its name.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    buffers: int
    gathered: int = 0
    activations: int | None = None
    unknown: Mapping[str, str]

    @property
    def total(self) -> int:
        """The sum of all that is known."""
        parts = (self.parameters, self.gradients, self.optimizer, self.buffers, self.gathered, self.activations)
        return sum(part or 0 for part in parts)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as label and value, for a table."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "gathered": self.gathered,
            "activations": self.activations,
        }
        shown = [(name, size) for name, size in parts.items() if size != 0]
        rows = [
            (name, f"not estimated: {self.unknown[name]}" if size is None else format_bytes(size))
            for name, size in shown
        ]
        return [*rows, ("in all", format_bytes(self.total))]

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values, `total` included."""
        return asdict(self) | {"unknown": dict(self.unknown), "total": self.total}


def format_bytes(size: int) -> str:
    """`size` in the largest unit of which there is one, with three digits."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, int(math.log(size, 1024))) if size else 0
    return f"{size / 1024**power:.3g} {units[power]}" if power else f"{size} bytes"


def plan_memory(
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None = None,
    *,
    shards: int = 1,
    rank: int = 0,
    units: Iterable[nn.Module] = (),
    accumulation: int = 1,
    step: Callable[[], Any] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> MemoryPlan:
    """Compute what one process needs. Nothing is allocated: the module may be on the meta device.

    Args:
        module: the module, with whole or sharded parameters.
        optimizers: over its parameters; None if they are not known.
        shards: the number of processes among which each parameter is divided, by rows, as `fsdp` does; 1 for none.
        rank: of the process among these; rank 0 has the most.
        units: the modules whose parameters are gathered together.
        accumulation: micro-batches a step.
        step: runs one forward pass of a micro-batch and returns its outputs; for the activations. None leaves them out.
        reasons: why something is not given, by the names of the numbers.
    """
    named = list(module.parameters())
    trained = [one for one in named if one.requires_grad]
    gathered = _gathered(module, list(units), accumulation) if shards > 1 else 0
    reasons = {"optimizer": "no optimizer is given", "activations": "no batch is given", **(reasons or {})}
    unknown = dict[str, str]()
    optimizer = activations = None
    try:
        if optimizers is None:
            raise ValueError(reasons["optimizer"])
        optimizer = sum(_bytes_of_states(one, shards, rank) for one in optimizers)
    except ValueError as error:
        unknown["optimizer"] = str(error)
    try:
        if step is None:
            raise ValueError(reasons["activations"])
        activations = _saved_bytes(module, step)
    except ValueError as error:
        unknown["activations"] = str(error)
    return MemoryPlan(
        parameters=sum(_part(one, shards, rank) for one in named),
        gradients=sum(_part(one, shards, rank) for one in trained),
        optimizer=optimizer,
        buffers=sum(one.numel() * one.element_size() for one in module.buffers()),
        gathered=gathered,
        activations=activations,
        unknown=unknown,
    )


def shard_count(module: nn.Module) -> int:
    """Among how many processes the parameters of `module` are divided."""
    found = next((one for one in module.parameters() if is_sharded(one)), None)
    if found is None:
        return 1
    mesh, placements = found.device_mesh, found.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(position) for position, one in enumerate(placements) if one.is_shard())


def _part(tensor: Tensor, shards: int, rank: int) -> int:
    """Bytes of a process's rows of a tensor; all but the last processes that have any get equally many."""
    whole = tensor.numel() * tensor.element_size()
    if shards == 1 or not tensor.dim() or not tensor.shape[0]:
        return whole
    rows = -(-tensor.shape[0] // shards)
    own = max(0, min(rows, tensor.shape[0] - rank * rows))
    return whole // tensor.shape[0] * own


def _bytes_of_states(optimizer: Optimizer, shards: int, rank: int) -> int:
    """States of the parameter's shape are divided as it is; torch keeps others whole on each process."""
    return sum(
        _part(state, shards if state.shape == parameter.shape else 1, rank)
        for parameter, state in state_tensors(optimizer)
    )


def _gathered(module: nn.Module, units: Sequence[nn.Module], accumulation: int) -> int:
    sizes = sorted((sum(map(_whole, unit.parameters())) for unit in units), reverse=True)
    inside = {id(one) for unit in units for one in unit.parameters()}
    outside = sum(_whole(one) for one in module.parameters() if id(one) not in inside)
    if accumulation > 1:
        gradients = sum(_whole(one) for one in module.parameters() if one.requires_grad)
    else:
        gradients = max([outside, *sizes[:1]])
    return outside + sum(sizes[:2]) + gradients


def _whole(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _saved_bytes(module: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of the memory that a forward pass keeps for its backward pass, parameters and buffers left out."""
    known = {_memory(one) for one in (*module.parameters(), *module.buffers())}
    kept = dict[int, tuple[Tensor, int]]()

    def note(tensor: Tensor) -> Tensor:
        if _memory(tensor) not in known:
            kept[_memory(tensor)] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    try:
        with reading_ones(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = step()
    except Exception as error:
        raise ValueError(f"a step on tensors without values failed: {type(error).__name__}: {error}") from error
    del result
    return sum(size for _, size in kept.values())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # torch 2.13.0: a storage on the meta device has no address
