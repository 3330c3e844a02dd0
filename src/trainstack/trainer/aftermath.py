"""What is done after an exception: what there is may be kept for a look at it."""

from __future__ import annotations

import threading

from trainstack.errors import CheckpointError
from trainstack.trainer.context import RunContext
from trainstack.trainer.saving import TakeCheckpoint


def save_after(error: BaseException, context: RunContext, take: TakeCheckpoint, within_s: float) -> None:
    """Write what the main process has under a name of its own; says what came of it and raises nothing.

    The weights are mostly those of the last finished step, but nothing is certain after an exception. The other
    processes may be gone, so none is asked; and the device may wait for them for ever, so no more than `within_s`
    seconds are spent on it.
    """
    log = context.log
    if not context.world.is_main or not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return  # what could not be written cannot be written now

    def save() -> None:
        try:
            checkpoint = take(after=error)
            step = context.state.global_step
            path = context.checkpointer.save_aside(checkpoint, f"exception-{step:09d}")
        except Exception as failure:
            log.warning(f"could not save after the exception: {type(failure).__name__}: {failure}")
        else:
            if path is not None:
                log.warning(
                    f"saved {path} after the exception, for a look at it; it is resumed from only if it is named."
                )

    thread = threading.Thread(target=save, name="trainstack-after-exception", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        log.warning(f"could not save after the exception within {within_s:g} s; the device may be stuck.")
