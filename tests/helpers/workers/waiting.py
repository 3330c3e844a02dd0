"""Rank 0 writes its files slowly, or dies while it writes them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK
from trainstack.checkpointing import filesystem


def slow_files(directory: str, how: str, seconds: float, timeout_s: float, **changes: Any) -> dict[str, Any]:
    """Train with one save, in which rank 0 sleeps for `seconds`, is killed or is stopped."""
    sync, state = filesystem.sync_file, {"slow": False}

    def slowed(handle: Any) -> None:
        if state["slow"]:
            state["slow"] = False
            if how == "killed":
                time.sleep(seconds)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
        sync(handle)

    filesystem.sync_file = slowed
    saving = ts.DefaultCheckpointerArguments(checkpoint=how != "export")
    options = {"ddp": {"timeout_s": timeout_s}}
    made = arguments(directory, backend="ddp", backend_options=options, checkpointer_args=saving, **changes)
    trainer = ts.Trainer(Classifier(numbers(24)), made)
    began = time.monotonic()
    try:
        trainer.train(max_steps=1)
        state["slow"] = RANK == 0
        began = time.monotonic()
        if how == "export":
            trainer.export(os.path.join(directory, "export"))
        elif how == "path":
            trainer.save_checkpoint(path=os.path.join(directory, "elsewhere"))
        else:
            trainer.train(max_steps=2)
        return {"error": None, "seconds": time.monotonic() - began}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    finally:
        filesystem.sync_file = sync
