"""What one checkpoint holds, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Checkpoint:
    """The states from which a run continues; `Checkpoint()` means that nothing was loaded.

    The states are trees of dicts, lists, tuples, numbers, strings, tensors and numpy arrays.
    A checkpoint that is being saved borrows the tensors of its owners; one that was loaded owns its
    tensors, which lie on the CPU and require no gradient.

    Attributes:
        module_interface_state: `ModuleInterface.get_state()`, by default the module's `state_dict`.
        trainer_state: counters, optimizers and schedulers.
        trainer_backend_state: one entry for each layer of the backend stack.
        rng_state: the states of the random number generators.
        history_state: the metrics recorded so far.
        callback_states: one entry for each callback that has a state.
        plan: the training plan as plain values, kept readable in the manifest. Holds no tensors.
        global_step: optimizer updates done so far.
        metadata: whatever else should be readable in the manifest. Holds no tensors.
    """

    module_interface_state: dict[str, Any] | None = None
    trainer_state: dict[str, Any] | None = None
    trainer_backend_state: dict[str, Any] | None = None
    rng_state: dict[str, Any] | None = None
    history_state: dict[str, Any] | None = None
    callback_states: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    global_step: int | None = None
    metadata: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is no module, trainer or backend state to restore."""
        states = (self.module_interface_state, self.trainer_state, self.trainer_backend_state)
        return all(state is None for state in states)
