"""`restore_after` undoes what a trial, such as the search for a learning rate, has changed in a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.modes import get_modes, set_modes
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state import RunState
from trainstack.trainer.module_checks import check_initialized


@contextmanager
def restore_after(context: RunContext, work: Workload, seed: int, what: str) -> Iterator[RunState]:
    """A block that may train: weights, buffers, gradients, optimizers, layers, modes and random numbers are restored.

    What the module logs in it is forgotten, and a checkpoint that it asks for waits. What a step changes beside these,
    such as a counter of the module's own, stays.

    The run is at a step boundary. `seed` is that of the random numbers in the block, `what` names it in errors. Yields
    counters to advance there.
    """
    module, state, busy = context.module, copy.copy(context.state), context.busy
    check_initialized((*module.named_parameters(), *module.named_buffers()), what)
    layers = copy.deepcopy(context.stack.get_state())
    snapshot, modes = ModuleSnapshot(module, parameters=True), get_modes(module)
    snapshot.keep()
    with ExitStack() as restored:
        restored.callback(set_modes, module, modes)
        restored.callback(context.stack.update_state, layers)
        for optimizer in work.optimizers:
            restored.callback(_snapshot_of(optimizer).restore)
        restored.callback(snapshot.restore)
        for parameter in (*work.parameters, *work.optimized_params):
            parameter.grad = None  # kept; the backward passes of the block must not add to it
        context.busy = True
        try:
            with context.sink.mute(state), isolated_rng(seed, context.world.device):
                yield state
        finally:
            context.busy = busy


def _snapshot_of(optimizer: Optimizer) -> _StateSnapshot | _StateDictSnapshot:
    kind = type(optimizer)
    own = kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict
    return _StateSnapshot(optimizer) if own else _StateDictSnapshot(optimizer)


class _StateSnapshot:
    """Groups and state of an optimizer by their objects, which schedulers and user code may hold.

    `load_state_dict` would replace groups and tensors by others, cast the state to the dtype of its parameter, and
    refuse groups that were added.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._tensors = optimizer, list[tuple[Tensor, Tensor]]()
        self._groups = [(group, self._kept(group)) for group in optimizer.param_groups]
        self._state = [(parameter, state, self._kept(state)) for parameter, state in optimizer.state.items()]

    def _kept(self, values: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._tensors.append((value, value.detach().clone()))
            elif name == "params":
                value = (value, list(value))
            else:
                value = copy.deepcopy(value)
            kept[name] = value
        return kept

    def restore(self) -> None:
        """Make the optimizer what it was."""
        optimizer = self._optimizer
        optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, kept in self._groups:
            parameters, members = kept["params"]
            parameters[:] = members
            group.clear()
            group.update(kept, params=parameters)
        optimizer.state.clear()
        for parameter, state, kept in self._state:
            state.clear()
            state.update(kept)
            optimizer.state[parameter] = state
        for tensor, before in self._tensors:
            tensor.data.copy_(before)


class _StateDictSnapshot:
    """What an optimizer with methods of its own says is its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._state = optimizer, copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        """Give it back."""
        self._optimizer.load_state_dict(self._state)
