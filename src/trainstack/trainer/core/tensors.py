"""Checks of weights and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends import Communicator, TrainerBackend, Workload
from trainstack.errors import ModuleContractError, NonFiniteError, PeerError


def finite_tensors(stack: TrainerBackend, work: Workload) -> frozenset[str]:
    """The names of what must stay finite: the parameters that are trained, and the buffers that are finite now."""
    trained = {id(p) for p in work.optimized_params}
    names = {name for name, p in work.module.named_parameters() if id(p) in trained}
    buffers = dict(work.module.named_buffers())
    finite = stack.read([torch.isfinite(_dense(buffer)).all() for buffer in buffers.values()])
    return frozenset(names | {name for name, good in zip(buffers, finite, strict=True) if good})


def _dense(tensor: Tensor) -> Tensor:
    """The values that a sparse tensor holds; another one as it is."""
    if tensor.layout is torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()


def check_finite_weights(
    stack: TrainerBackend,
    module: nn.Module,
    watched: frozenset[str],
    step: int,
    outcome: str = "No checkpoint was written.",
) -> None:
    """Refuse to keep weights or buffers that became inf or nan; the message says the `outcome`.

    Raises:
        NonFiniteError: naming the first of them.
    """
    everything = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    named = {name: tensor.detach() for name, tensor in everything.items() if name in watched}
    finite = stack.read([torch.isfinite(_dense(tensor)).all() for tensor in named.values()])
    first = next((name for name, good in zip(named, finite, strict=True) if not good), None)
    if first is not None:
        raise NonFiniteError(
            f"{first!r} holds inf or nan after global step {step}. {outcome} Look for division by "
            "zero or log(0) in the forward pass, or write nonfinite='skip' to leave out steps whose gradients are not "
            "finite."
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


def samples_in(batch: Any) -> int:
    """How many samples a collated batch holds.

    That is the length of the first tensor or array found in it; of a list of strings, numbers or dicts, its length.

    Raises:
        ModuleContractError: nothing in it tells; `batch_weight` must be overridden.
    """
    if type(batch) in (list, tuple) and batch and type(batch[0]) is Tensor and batch[0].dim():
        return batch[0].shape[0]
    if is_dataclass(batch):
        batch = {f.name: getattr(batch, f.name) for f in fields(batch)}
    if isinstance(batch, Mapping) and batch:
        return samples_in(next(iter(batch.values())))
    shape = getattr(batch, "shape", None)
    if shape is not None and len(shape) > 0:
        return int(shape[0])
    if isinstance(batch, list | tuple) and batch:
        first = batch[0]
        if isinstance(first, str | bytes | int | float) or (isinstance(batch, list) and isinstance(first, dict)):
            return len(batch)
        if getattr(first, "shape", None) == ():
            return len(batch)
        # A list or tuple of tensors inside a batch: one tensor a sample, or several inputs? That cannot be told.
        if not (isinstance(first, list | tuple) and first and getattr(first[0], "shape", ())):
            return samples_in(first)
    raise ModuleContractError(
        f"cannot tell how many samples a batch of type {type(batch).__name__} holds. Override "
        "ModuleInterface.batch_weight(batch) and return the number that the loss is a mean over."
    )
