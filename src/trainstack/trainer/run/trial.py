"""`restore_after` undoes what a trial, such as the search for a learning rate, has changed in a run."""

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
    context: RunContext, work: Workload, seed: int, what: str, *, trains: bool = True
) -> Iterator[RunState]:
    """A block that may train: all that a checkpoint keeps is restored, and gradients and modes besides.

    What the module logs in it is forgotten, and a checkpoint that it asks for waits. Attributes that `get_state` does
    not return keep what the block wrote to them; a warning names them.

    Args:
        context: of the run, which is at a step boundary.
        work: of the run.
        seed: of the random numbers in the block.
        what: names the block in errors and warnings.
        trains: whether the block may change parameters, gradients and optimizers, which are copied then.

    Yields:
        Counters to advance there.
    """
    module, state, busy = context.module, copy.copy(context.state), context.busy
    if trains:
        check_initialized((*module.named_parameters(), *module.named_buffers()), what)
    marks = fingerprints(module, parts=True)
    snapshot, modes = ModuleSnapshot(module, parameters=trains), get_modes(module)
    snapshot.keep()
    registered = (*module.parameters(), *module.buffers())  # which the snapshot restores, under the same objects
    kept = RunSnapshot(context, work, shared=registered, keeps_moments=trains)
    with ExitStack() as restored:
        restored.callback(_warn_of_changes, context, marks, what)
        restored.callback(_restore_datasets, context, DatasetSnapshot(module), what)
        restored.callback(set_modes, module, modes)
        restored.callback(kept.restore)
        restored.callback(snapshot.restore)
        if trains:
            for parameter in (*work.parameters, *work.optimized_params):
                parameter.grad = None  # kept; the backward passes of the block must not add to it
        context.busy = True
        try:
            with context.sink.mute(state), isolated_rng(seed, context.world.device):
                yield state
        finally:
            context.busy = busy


def _warn_of_changes(context: RunContext, before: dict[str, str], what: str) -> None:
    """Name the attributes that are not what they were, although all states are."""
    changed = changed_attributes(context.module, before)
    if changed:
        name = type(context.module).__name__
        context.log.warning(
            f"{what} ran steps to try them out and left a trace: {', '.join(f'{name}.{one}' for one in changed)}. All "
            "that get_state returns was put back. Return these from get_state as well, and take them back in "
            "update_state, if they have an influence on the training."
        )


def _restore_datasets(context: RunContext, datasets: DatasetSnapshot, what: str) -> None:
    left = datasets.restore()
    if left:
        context.log.warning(
            f"{what} fetched samples to try steps out, and changed attributes of datasets: {', '.join(left)}. They "
            "keep the new values. Make the dataset in get_train_dataloader, or let no sample depend on them."
        )
