"""A run over processes that stop together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import trainstack as ts
from tests.helpers import stop_run
from tests.helpers.modules import Classifier, arguments
from tests.helpers.workers import RANK


def left_behind(directory: str, **options: Any) -> Any:
    """The result of `stop_run` in this rank; with "error" where anything but its last step ended it."""
    error = None
    try:
        stop_run.main(Path(directory), **options)
    except BaseException as ended:
        error = repr(ended)
    left = json.loads(Path(directory, f"{RANK}.json").read_text())
    return left | {"error": error}


def told_early(directory: str, ranks: list[int]) -> dict[str, Any]:
    """Some ranks get SIGUSR1 while they build their optimizers."""

    class Told(Classifier):
        def get_optimizers_schedulers(self, *given: Any) -> Any:
            if RANK in ranks:
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().get_optimizers_schedulers(*given)

    trainer = ts.Trainer(Told(), arguments(directory, backend="ddp", report=True))
    try:
        trainer.train()
    except ts.Preempted as stop:
        handler = signal.getsignal(signal.SIGUSR1)
        return {"code": stop.code, "said": str(stop), "handler": getattr(handler, "name", str(handler))}
    return {"code": None, "said": "", "handler": ""}
