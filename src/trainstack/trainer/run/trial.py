"""`restore_after` restores the states of a run after trial steps, such as the search for a learning rate."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trainstack.backends import Workload
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.modes import get_modes, set_modes
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state import RunState
from trainstack.trainer.core.untracked import changed_attributes, fingerprints
from trainstack.trainer.data.dataset_snapshot import DatasetSnapshot
from trainstack.trainer.module_checks import check_initialized
from trainstack.trainer.resume.run_snapshot import RunSnapshot


@contextmanager
def restore_after(
    context: RunContext, work: Workload, seed: int, label: str, *, trains: bool = True
) -> Iterator[RunState]:
    """A block that may train. At its end the states of a checkpoint, gradients and modes are restored.

    Metrics that the module logs in the block are dropped, and a requested checkpoint is delayed. Attributes that
    `get_state` does not return are not restored; a warning names the changed ones.

    Args:
        context: the context of the run, which is at a step boundary.
        work: the workload of the run.
        seed: the seed of the random numbers in the block.
        label: names the block in errors and warnings.
        trains: whether the block may change parameters, gradients and optimizers. They are copied then.

    Yields:
        copies of the counters, which the block may advance.
    """
    module, state, busy = context.module, copy.copy(context.state), context.busy
    if trains:
        check_initialized((*module.named_parameters(), *module.named_buffers()), label)
    marks = fingerprints(module)
    snapshot, modes = ModuleSnapshot(module, parameters=trains), get_modes(module)
    snapshot.keep()
    registered = (*module.parameters(), *module.buffers())  # `snapshot` restores these in place
    kept = RunSnapshot(context, work, shared=registered, keeps_moments=trains)
    with ExitStack() as restored:  # calls in reverse order: states first, so that the warnings see restored states
        restored.callback(_warn_of_changes, context, marks, label)
        restored.callback(_restore_datasets, context, DatasetSnapshot(module), label)
        restored.callback(set_modes, module, modes)
        restored.callback(kept.restore)
        restored.callback(snapshot.restore)
        if trains:
            for parameter in (*work.parameters, *work.optimized_params):
                parameter.grad = None  # the backward passes of the block must not add to it; `kept` restores it
        context.busy = True
        try:
            with context.sink.mute(state), isolated_rng(seed, context.world.device):
                yield state
        finally:
            context.busy = busy


def _warn_of_changes(context: RunContext, before: dict[str, str], label: str) -> None:
    """Warn of attributes that have changed although all states are restored."""
    changed = changed_attributes(context.module, before)
    if changed:
        name = type(context.module).__name__
        context.log.warning(
            f"{label} ran trial steps that changed {', '.join(f'{name}.{one}' for one in changed)}. Only the result of "
            "get_state was restored. If these attributes influence the training, return them from get_state and load "
            "them in update_state."
        )


def _restore_datasets(context: RunContext, datasets: DatasetSnapshot, label: str) -> None:
    left = datasets.restore()
    if left:
        context.log.warning(
            f"{label} ran trial steps that fetched samples and changed attributes of datasets: {', '.join(left)}. They "
            "keep the new values. Create the dataset in get_train_dataloader, or let no sample depend on them."
        )
