"""What is done after an exception: what there is may be kept for a look at it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from trainstack.errors import CheckpointError
from trainstack.trainer.run import Run
from trainstack.trainer.snapshot import take_checkpoint

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer


def save_after(error: BaseException, trainer: Trainer, run: Run, within_s: float) -> None:
    """Write what the main process has under a name of its own; says what came of it and raises nothing.

    The weights are mostly those of the last finished step, but nothing is certain after an exception. The other
    processes may be gone, so none is asked; and the device may wait for them for ever, so no more than `within_s`
    seconds are spent on it.
    """
    if not trainer.is_main_process or not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return  # what could not be written cannot be written now

    def save() -> None:
        try:
            checkpoint = take_checkpoint(trainer, None, None, after=error)
            step = trainer.state.global_step
            path = trainer.checkpointer.save_aside(checkpoint, f"exception-{step:09d}")
        except Exception as failure:
            run.log.warning(f"could not save after the exception: {type(failure).__name__}: {failure}")
        else:
            if path is not None:
                run.log.warning(
                    f"saved {path} after the exception, for a look at it; it is resumed from only if it is named."
                )

    thread = threading.Thread(target=save, name="trainstack-after-exception", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        run.log.warning(f"could not save after the exception within {within_s:g} s; the device may be stuck.")
