"""Frozen weights that are not in checkpoints: note them when a run begins, compare and restore them in a resume."""

from __future__ import annotations

from dataclasses import replace

from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.trainer.context import RunContext
from trainstack.trainer.resume.restoring import start_from_weights
from trainstack.trainer.resume.saving import Saver


def note_initial_weights(context: RunContext, saver: Saver) -> dict[str, str]:
    """Return the digests of the initial weights, and keep them if checkpoints omit frozen weights.

    Rank 0 computes them, because all ranks get its parameters. All ranks call this together.
    """
    digests = saver.run_on_rank_zero(context.frozen.get_digests, "comparing the frozen weights")
    if not context.checkpointer.keeps_frozen:
        context.frozen.begin(digests)
    return digests


def with_left_out_weights(context: RunContext, checkpoint: Checkpoint, saver: Saver) -> Checkpoint:
    """`checkpoint`, completed by the module's tensors for the frozen weights that it omits. All ranks call this.

    Raises:
        CheckpointMismatchError: the values of these tensors have changed.
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
