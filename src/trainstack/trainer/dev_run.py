"""A run of a few steps that touches every part and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstack.trainer.arguments import TrainerArguments


def for_dev_run(args: TrainerArguments) -> TrainerArguments:
    """`args` for as many steps, and validation batches a loader, as `fast_dev_run` says; unchanged without it.

    They are an epoch, unless the data have fewer: then it takes more than one, and the last may be cut short.
    Nothing is resumed, saved, exported or written, except that a private run keeps its ledger, in a folder of its own.
    """
    if not args.fast_dev_run:
        return args
    steps = int(args.fast_dev_run)
    never = args.validate_every == 0 and type(args.validate_every) is int
    return replace(
        args,
        epochs=1,
        max_steps=steps,
        max_train_steps_per_epoch=steps,  # so that the epoch ends, and what is called there is tried out
        max_val_steps_per_epoch=steps,
        validate_every=0 if never else None,
        sanity_val_steps=0,
        log_every=1,
        stats_args=None,
        writers=["stdout"] if "stdout" in args.writers else [],
        report=False,
        resume=False,
        save_on_exception=False,
        checkpointer_args=replace(args.checkpointer_args, checkpoint=False),
        output_dir=Path(args.output_dir) / "fast_dev_run",
    )
