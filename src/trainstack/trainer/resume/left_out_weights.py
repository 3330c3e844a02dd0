"""Frozen weights that checkpoints leave out: noted when a run begins, compared and put back when it resumes."""

from __future__ import annotations

from dataclasses import replace

from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.trainer.context import RunContext
from trainstack.trainer.resume.restoring import start_from_weights
from trainstack.trainer.resume.saving import Saver


def note_initial_weights(context: RunContext, saver: Saver) -> dict[str, str]:
    """Keep the digests of the weights that a run begins with, if checkpoints leave frozen ones out; returns them.

    Those of rank 0 count, since all ranks get its parameters. All ranks call it.
    """
    digests = saver.run_on_rank_zero(context.frozen.get_digests, "comparing the frozen weights")
    if not context.checkpointer.keeps_frozen:
        context.frozen.begin(digests)
    return digests


def with_left_out_weights(context: RunContext, checkpoint: Checkpoint, saver: Saver) -> Checkpoint:
    """`checkpoint` with the module's own tensors in the place of those that it leaves out. All ranks call it.

    Raises:
        CheckpointMismatchError: the module has other values of them.
    """
    left_out = (checkpoint.metadata or {}).get(LEFT_OUT)
    if not left_out and (checkpoint.is_empty or context.checkpointer.keeps_frozen):
        return checkpoint
    if left_out:
        start_from_weights(context, saver.load_weights, saver.fetch, resumed=True, left_out=True)
    digests = note_initial_weights(context, saver)
    if not left_out:
        return checkpoint
    context.frozen.check(left_out, digests)
    state = context.frozen.complete(checkpoint.module_interface_state or {}, left_out)
    return replace(checkpoint, module_interface_state=state)
