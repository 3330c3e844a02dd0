"""Errors in a step, and a process that dies."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.conformance.adapter import Adapter, NotOfferedError, Verdict
from tools.conformance.case import case, describe, passed, wrong
from tools.conformance.process import ProcessFailedError, in_processes
from tools.conformance.saved import files_of, loaded
from tools.conformance.task import Net, make_task, weights


@case("non-finite step")
def nonfinite_step(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """The loss of step 3 of 6 is nan: the trainer raises or skips the step; it neither ends normally with weights of
    nan nor leaves a newest checkpoint of nan."""
    passes = 0

    def spy(net: Net, x: Tensor) -> Any:
        nonlocal passes
        passes += 1
        return (lambda outputs: outputs * float("nan")) if passes == 3 else None

    task = make_task(folder / "run", save=True)
    task.model.spy = spy
    try:
        adapter.train(task)
    except (Exception, SystemExit) as error:
        raised = type(error).__name__
    else:
        raised = ""
        if not weights(task.model).isfinite().all():
            return wrong(f"{'trains on to the end' if passes == 6 else 'stops, but only'} with weights of nan")
    saved = adapter.checkpoints(folder / "run")
    if saved and not loaded(adapter, saved[-1], folder / "loaded").isfinite().all():
        return wrong(f"raises {raised}, after it has saved weights of nan")
    return passed()


@case("kill -9")
def killed(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """A process is killed in step 5 of 6, another in the middle of writing the checkpoint of step 4 (the kernel ends it
    at a file size, with no chance to clean up): started again, each continues from its newest complete checkpoint."""
    for how, left in (("in step 5", 2), ("while it saved step 4", 3)):
        where = str(folder / how.replace(" ", "-"))
        try:
            in_processes(1, name, "failures:train_and_die", folder=where, saving=left == 3)
        except ProcessFailedError as error:
            if error.signal not in (signal.SIGKILL, signal.SIGXFSZ):
                return wrong(f"killed {how}: {error}")
        else:
            return wrong(f"was to be killed {how}, and lived")
        task = make_task(Path(where), save=True, resume="newest")
        try:
            adapter.train(task)
        except NotOfferedError:
            raise
        except Exception as error:
            return wrong(f"killed {how}, it cannot continue: {describe(error)}")
        if len(task.rates) == left - 1:
            return wrong(f"killed {how}, it continues from the incomplete checkpoint")
        if len(task.rates) != left:
            return wrong(f"killed {how}, it takes {len(task.rates)} more steps instead of {left}")
    return passed()


def train_and_die(adapter: Adapter, folder: str, saving: bool) -> None:
    """In a separate process."""
    passes = 0

    def spy(net: Net, x: Tensor) -> None:
        nonlocal passes
        passes += 1
        if passes == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if passes == 4 and saving:
            die_while_writing(Path(folder), adapter)

    task = make_task(Path(folder), save=True)
    task.model.spy = spy
    adapter.train(task)


def die_while_writing(folder: Path, adapter: Adapter) -> None:
    """Let the kernel end this process when a file grows to half the size of the largest file of a checkpoint."""
    newest = adapter.checkpoints(folder)[-1]
    largest = max(path.stat().st_size for path in files_of(newest))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))
