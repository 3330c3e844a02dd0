"""One process fails, comes late or diverges."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.patience import patience
from tests.helpers.workers import RANK
from trainstack.backends.processes import watchdog


def failure(directory: str, how: str, culprit: int = 1) -> Any:
    """One rank fails in some way, in the third step."""

    class Fails(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if culprit == RANK and global_step == 3:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raise":
                    raise ZeroDivisionError("rank one divides by zero")
            return super().train_step(global_step, batch, device)

        def on_end_train_step(self, global_step: int) -> None:
            if culprit == RANK and global_step == 3 and how == "hook":
                raise LookupError("rank one finds nothing")

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            if culprit == RANK and how == "validation":
                raise LookupError("rank one finds nothing")

    trainer = ts.Trainer(Fails(numbers(64), validate=True), arguments(directory, backend="ddp"))
    start = time.monotonic()
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"error": None}


def caught() -> Any:
    """All processes raise the same and catch it; then they train for longer than a watchdog waits."""
    watchdog.PAUSE_S = watchdog.GRACE_S = 0.1

    class Slow(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            time.sleep(0.2)
            return super().train_step(global_step, batch, device)

    trainer, said = ts.Trainer(Slow(numbers(32)), arguments("unused", backend="ddp")), ""
    try:
        trainer.test()
    except ts.ModuleContractError as error:
        said = str(error)
    trainer.train()
    return {"said": said, "steps": trainer.global_steps_finished}


def failure_behind(culprit: int) -> Any:
    """One rank fails at the end of a common exchange; the other has left it, and waits in the next one."""
    watchdog.PAUSE_S = watchdog.GRACE_S = 0.1
    comm = ts.build_trainer_backend("ddp").open("cpu").comm
    try:
        with comm.fail_together(lambda: "first"):
            comm.gather(None)
            if culprit == RANK:
                time.sleep(0.5)
                raise ZeroDivisionError("divides by zero")
        with comm.fail_together(lambda: "second"):
            comm.gather(None)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def background_failure(directory: str) -> Any:
    """The disk of rank 0 fails under a checkpoint that is written in the background; nothing else asks for it."""
    from trainstack.checkpointing import filesystem

    in_step_4 = threading.Event()

    sync_file = filesystem.sync_file

    def fail(handle: Any) -> None:
        if "checkpoint-0" not in handle.name:
            return sync_file(handle)
        in_step_4.wait(patience(10))
        raise OSError("the disk is gone")

    class Waits(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 0 and global_step == 4:
                in_step_4.set()
                deadline = time.monotonic() + patience(10)
                while trainer._ready().loop.next_due_step and time.monotonic() < deadline:
                    time.sleep(0.001)
            return super().train_step(global_step, batch, device)

    filesystem.sync_file = fail
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, async_save=True)
    trainer = ts.Trainer(Waits(numbers(400)), arguments(directory, backend="ddp", checkpointer_args=saving))
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": trainer.global_steps_finished}
    return {"error": None}


def adopted_failure(how: str) -> Any:
    """In a group that exists already, rank 1 fails and stays alive, as a notebook does; then all train again in it."""
    dist.init_process_group("gloo")

    class Fails(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and global_step == 3 and how == "train_step":
                raise ZeroDivisionError("rank one divides by zero")
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and how == "validate":
                raise ZeroDivisionError("rank one divides by zero")
            return super().val_step(global_step, batch, device)

        def get_optimizers_schedulers(self, *given: Any) -> Any:
            if RANK == 1 and how == "get_optimizers":
                raise ZeroDivisionError("rank one divides by zero")
            return super().get_optimizers_schedulers(*given)

    trainer, said = ts.Trainer(Fails(validate=True), arguments("unused", backend="ddp")), "nothing"
    start = time.monotonic()
    try:
        trainer.validate() if how == "validate" else trainer.train()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    dist.barrier()  # the group is intact; the failed rank has waited here for the other one
    trainer.close()
    module = Classifier(validate=True)
    again = ts.Trainer(module, arguments("unused", backend="ddp"))
    again.train()
    again.close()
    return {"said": said, "seconds": seconds, "weights": weights(module).tolist(), "group": dist.is_initialized()}


def late(how: str, seconds: float = 60.0) -> Any:
    """Rank 1 does not reach a collective in time, for one of several reasons. If it sleeps, rank 0 wakes it."""
    woken = []

    @contextmanager
    def until_woken() -> Iterator[None]:
        def wake(number: int, frame: Any) -> None:
            woken.append(number)
            raise InterruptedError

        signal.signal(signal.SIGUSR2, wake)
        trainer.world.comm.put("sleeper", str(os.getpid()))
        with suppress(InterruptedError):
            yield

    class Late(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if RANK == 1 and global_step == 3 and how == "train_step":
                with until_woken():
                    time.sleep(seconds)
            if RANK == 1 and global_step == 3 and how == "killed":
                time.sleep(1.5)  # within this time the watchdog records the place of this rank
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(global_step, batch, device)

        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1 and global_step == 3 and how == "collective":
                trainer.gather(torch.zeros(1))

        def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
            if RANK == 1 and how == "on_end_val_epoch":
                with until_woken():
                    time.sleep(seconds)

    options = {"ddp": {"timeout_s": 3.0}}
    trainer = ts.Trainer(Late(validate=True), arguments("unused", backend="ddp", backend_options=options))
    start = time.monotonic()
    try:
        if how != "main alone" or RANK == 0:
            trainer.train()
    except Exception as error:
        said, lasted = f"{type(error).__name__}: {error}", time.monotonic() - start
        if how in ("train_step", "on_end_val_epoch") and RANK == 0:
            (sleeper,) = trainer.world.comm.get_if_all(["sleeper"]) or []
            os.kill(int(sleeper), signal.SIGUSR2)
        return {"error": said, "seconds": lasted, "woken": bool(woken)}
    return {"error": None}


def diverged(directory: str) -> Any:
    """A hook changes the weights of one process."""

    class Drifts(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if RANK == 1:
                with torch.no_grad():
                    self.net[0].weight += 1.0

    saving = ts.DefaultCheckpointerArguments()
    trainer = ts.Trainer(Drifts(numbers(16)), arguments(directory, backend="ddp", checkpointer_args=saving))
    try:
        trainer.train()
    except ts.PeerError as error:
        return {"error": str(error)}
    return {"error": None}
