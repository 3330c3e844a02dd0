"""Training processes that are started, watched and killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from trainstack.errors import LaunchError
from trainstack.trainer import Trainer, seed_everything
from trainstack.verifying.comparison import fingerprints, untracked_state

POLL_INTERVAL_S = 0.002
_UNTRACKED = "forgotten.json"
_PROGRESS = struct.Struct("qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's part of one attempt.

    Attributes:
        call: pickled `(module_factory, (args,))`.
        folder: of the attempt, for word of it.
        rank, nproc: the place of this process.
        port: where several processes meet; None where the process stands alone.
    """

    call: bytes
    folder: Path
    rank: int
    nproc: int
    port: int | None

    @property
    def output(self) -> Path:
        """What all processes print."""
        return self.folder / "output.txt"

    @property
    def done(self) -> Path:
        """There once this process has trained to the end; how it exits after that means nothing."""
        return self.folder / f"done-{self.rank}"


def read_progress(folder: Path) -> tuple[int, int] | None:
    """The step that the training began from and the last one finished; None before it begins."""
    try:
        data = (folder / "progress").read_bytes()
    except FileNotFoundError:
        return None
    return _PROGRESS.unpack(data) if len(data) == _PROGRESS.size else None


def read_untracked(folder: Path) -> tuple[str, ...]:
    """What the training of this folder changed in its module, and did not save."""
    return tuple(json.loads((folder / _UNTRACKED).read_text()))


def work(job: Job) -> None:
    """Train to the end, unless killed."""
    os.setsid()  # so that all that this process starts can be killed with it
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.port is not None:
        os.environ.update(  # as torchrun sets them
            RANK=str(job.rank),
            LOCAL_RANK=str(job.rank),
            WORLD_SIZE=str(job.nproc),
            LOCAL_WORLD_SIZE=str(job.nproc),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job.port),
        )
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // job.nproc))
    factory, (args,) = pickle.loads(job.call)
    seed_everything(args.seed)
    trainer = Trainer(factory(), args)
    _ = trainer.plan  # makes it ready: from here on it is training
    before = fingerprints(trainer.module)
    with _record_progress(trainer, job.folder) if job.rank == 0 else nullcontext():
        trainer.train()
    if job.rank == 0:
        names = untracked_state(trainer.module, before, trainer.module.get_state())
        (job.folder / _UNTRACKED).write_text(json.dumps(names))
    trainer.close()
    job.done.touch()


@contextmanager
def _record_progress(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Write down how far `trainer` is, so that it can be read after a kill."""
    file = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
    first, over = trainer.global_steps_finished, threading.Event()

    def tell() -> None:
        while True:
            os.pwrite(file, _PROGRESS.pack(first, trainer.global_steps_finished), 0)
            if over.wait(POLL_INTERVAL_S):
                return

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.pwrite(file, _PROGRESS.pack(first, trainer.global_steps_finished), 0)


class Trial:
    """A training that is under way in new processes; all of them are killed at once.

    Attributes:
        began_from: the global step that it began from.
    """

    def __init__(self, jobs: list[Job], context: Any, deadline: float) -> None:
        self._jobs, self._deadline = jobs, deadline
        self._processes = [context.Process(target=work, args=(job,)) for job in jobs]
        self.began_from = 0

    def begin(self) -> None:
        """Start the processes, and wait until they train.

        Raises:
            LaunchError: one of them failed, or they did not come so far in time.
        """
        for process in self._processes:
            process.start()
        while (progress := read_progress(self._jobs[0].folder)) is None:
            self.is_over(POLL_INTERVAL_S)
            self._check_deadline()
        self.began_from = progress[0]

    def is_over(self, within_s: float | None = None) -> bool:
        """Whether all processes have trained to the end, after waiting for that, by default as long as may be.

        Raises:
            LaunchError: one of them failed, or they did not end in time.
        """
        until = self._deadline if within_s is None else time.monotonic() + within_s
        while running := [process for process in self._processes if process.is_alive()]:
            left = until - time.monotonic()
            if left <= 0:
                break
            connection.wait([process.sentinel for process in running], left)
        for job, process in zip(self._jobs, self._processes, strict=True):
            if not process.is_alive() and not job.done.exists():
                self._fail(f"ended with exit code {process.exitcode}")
        if within_s is None and running:
            self._check_deadline()
        return not running

    def is_over_by(self, moment: float, step: int, lag: float) -> bool:
        """Whether it ends within `moment` seconds, and within `lag` seconds after `step` is finished.

        Raises:
            LaunchError: as for `is_over`.
        """
        until, over = time.monotonic() + moment, False
        while not over and time.monotonic() < until and self._step() < step:
            over = self.is_over(POLL_INTERVAL_S)
        return over or self.is_over(max(0.0, min(lag, until - time.monotonic())))

    def kill(self) -> int:
        """SIGKILL all that still runs; returns the last step that was finished."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # before it had a group of its own
        for process in self._processes:
            if process.pid is not None:
                process.join()
        return self._step()

    def _step(self) -> int:
        return (read_progress(self._jobs[0].folder) or (0, 0))[1]

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            self._fail("was not through in time; write a longer timeout_s, or fewer steps,")

    def _fail(self, how: str) -> None:
        self.kill()
        job = self._jobs[0]
        said = job.output.read_text(errors="replace").strip() if job.output.exists() else ""
        said = said[-3000:] or "(nothing)"
        raise LaunchError(
            f"verify_resume: the process of {job.folder.name} {how} and said:\n{said}\n"
            f"All of it is in {job.folder.parent}"
        )


@contextmanager
def start_trial(call: bytes, folder: Path, nproc: int | None, context: Any, timeout_s: float) -> Iterator[Trial]:
    """A training in `nproc` processes that find each other, or in one that stands alone; none is left at the end."""
    folder.mkdir(parents=True)
    port, size = None, nproc or 1
    if nproc is not None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])  # free, until a process takes it
    jobs = [Job(call=call, folder=folder, rank=rank, nproc=size, port=port) for rank in range(size)]
    made = Trial(jobs, context, time.monotonic() + timeout_s)
    try:
        made.begin()
        yield made
    finally:
        made.kill()
