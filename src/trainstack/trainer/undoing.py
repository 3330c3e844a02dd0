"""A block after which a run is what it was before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainstack.backends import Workload
from trainstack.trainer.context import RunContext
from trainstack.trainer.run_state import RunState
from trainstack.trainer.seeding import isolated_rng


@contextmanager
def undone(context: RunContext, work: Workload, seed: int) -> Iterator[RunState]:
    """A block that may train: weights, buffers, optimizers, layers, modes and random numbers are put back after it.

    Gradients are dropped, and what the module logs is forgotten. What a step changes beside these, such as a counter of
    the module's own, stays.

    Args:
        context: of a run at a step boundary.
        work: its workload.
        seed: of the random numbers in the block.

    Yields:
        Counters to advance in the block.
    """
    module, layers = context.module, copy.deepcopy(context.stack.get_state())
    tensors = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]
    optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in work.optimizers]
    modes = [(part, part.training) for part in module.modules()]
    state = copy.copy(context.state)
    try:
        with context.sink.muted(state), isolated_rng(seed, context.world.device):
            yield state
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for parameter in module.parameters():
            parameter.grad = None
        for optimizer, saved in zip(work.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        context.stack.update_state(layers)
        for part, training in modes:
            part.training = training
