"""`MemoryPlan`: an estimate of the memory that one process needs, computed without an allocation."""

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
    """Memory of one process in bytes. Make one with `plan_memory`.

    Attributes:
        parameters: parameters of the module; of sharded ones, the shard of this process.
        gradients: gradients of the trained parameters, sharded like these.
        optimizer: states of the optimizers after their first step; None if unknown.
        buffers: buffers of the module, which are never sharded.
        gathered: peak of temporarily gathered memory of a sharded module: the parameters outside of all units, two
            units, and the gradients of one unit. With several micro-batches a step, the gradients of all units.
        activations: memory that the forward pass of one micro-batch saves for the backward pass; None if unknown.
        unknown: reasons for values that are None, by the name of the attribute.
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
        """The sum of all known values."""
        parts = (self.parameters, self.gradients, self.optimizer, self.buffers, self.gathered, self.activations)
        return sum(part or 0 for part in parts)

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of label and value, for a table."""
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
        """Return all values as plain Python values, `total` included."""
        return asdict(self) | {"unknown": dict(self.unknown), "total": self.total}


def format_bytes(size: int) -> str:
    """Format `size` in the largest unit that is at most `size`, with three significant digits."""
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
    """Estimate the memory that one process needs. It allocates nothing: the module may be on the meta device.

    Args:
        module: module with whole or sharded parameters.
        optimizers: optimizers of its parameters; None if unknown.
        shards: number of processes that share each parameter by rows, as `fsdp` does; 1 for none.
        rank: rank of the process among these; rank 0 has the most rows.
        units: modules whose parameters are gathered together.
        accumulation: micro-batches a step.
        step: function that runs the forward pass of one micro-batch and returns its outputs. None skips the estimate of
            the activations.
        reasons: reasons for missing arguments, by the name of the value in the plan.
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
    """Return the number of processes that share the parameters of `module`."""
    found = next((one for one in module.parameters() if is_sharded(one)), None)
    if found is None:
        return 1
    mesh, placements = found.device_mesh, found.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(position) for position, one in enumerate(placements) if one.is_shard())


def _part(tensor: Tensor, shards: int, rank: int) -> int:
    """Return the bytes of the rows that process `rank` holds; `fsdp` divides rows as `torch.chunk` does."""
    whole = tensor.numel() * tensor.element_size()
    if shards == 1 or not tensor.dim() or not tensor.shape[0]:
        return whole
    rows = -(-tensor.shape[0] // shards)
    own = max(0, min(rows, tensor.shape[0] - rank * rows))
    return whole // tensor.shape[0] * own


def _bytes_of_states(optimizer: Optimizer, shards: int, rank: int) -> int:
    """Return the bytes of the states; only those with the shape of the parameter are sharded like it."""
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
    """Return the bytes that a forward pass saves for its backward pass, without parameters and buffers."""
    known = {_memory(one) for one in (*module.parameters(), *module.buffers())}
    kept = dict[int, tuple[Tensor, int]]()

    def note(tensor: Tensor) -> Tensor:
        if _memory(tensor) not in known:
            kept[_memory(tensor)] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    try:
        with reading_ones(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = step()  # kept until the block ends: its graph owns the saved tensors
    except Exception as error:
        raise ValueError(f"a step on tensors without values failed: {type(error).__name__}: {error}") from error
    del result
    return sum(size for _, size in kept.values())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # torch 2.13.0: a storage on the meta device has no address
