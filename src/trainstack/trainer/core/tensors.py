"""Checks of weights."""

from __future__ import annotations

import torch
from torch import nn

from trainstack.backends import Communicator, TrainerBackend, Workload
from trainstack.errors import NonFiniteError, PeerError


def finite_tensors(stack: TrainerBackend, work: Workload) -> frozenset[str]:
    """The names of what must stay finite: the parameters that are trained, and the buffers that are finite now."""
    trained = {id(p) for p in work.optimized_params}
    names = {name for name, p in work.module.named_parameters() if id(p) in trained}
    buffers = dict(work.module.named_buffers())
    finite = stack.read([torch.isfinite(buffer).all() for buffer in buffers.values()])
    return frozenset(names | {name for name, good in zip(buffers, finite, strict=True) if good})


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
    finite = stack.read([torch.isfinite(tensor).all() for tensor in named.values()])
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
