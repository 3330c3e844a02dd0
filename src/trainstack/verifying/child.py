"""What runs in a process that is to be killed: the user's training, and word of how far it is."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from trainstack.trainer import Trainer, seed_everything
from trainstack.verifying.forgotten import forgotten, marks_of

LOOK_EVERY_S = 0.002
_FORGOTTEN = "forgotten.json"
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


def read_forgotten(folder: Path) -> tuple[str, ...]:
    """What the training of this folder changed in its module, and did not save."""
    return tuple(json.loads((folder / _FORGOTTEN).read_text()))


def work(job: Job) -> None:
    """Train to the end, unless killed."""
    os.setsid()  # so that all that this process starts can be killed with it
    output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    if job.port is not None:
        _take_place(job.rank, job.nproc, job.port)
    factory, (args,) = pickle.loads(job.call)
    seed_everything(args.seed)
    trainer = Trainer(factory(), args)
    _ = trainer.plan  # makes it ready: from here on it is training
    before = marks_of(trainer.module)
    with _telling(trainer, job.folder) if job.rank == 0 else nullcontext():
        trainer.train()
    if job.rank == 0:
        names = forgotten(trainer.module, before, trainer.module.get_state())
        (job.folder / _FORGOTTEN).write_text(json.dumps(names))
    trainer.close()
    job.done.touch()


def _take_place(rank: int, nproc: int, port: int) -> None:
    """The variables of torchrun."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // nproc))


@contextmanager
def _telling(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Write down how far `trainer` is, so that it can be read after a kill."""
    file = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
    first, over = trainer.global_steps_finished, threading.Event()

    def tell() -> None:
        while True:
            os.pwrite(file, _PROGRESS.pack(first, trainer.global_steps_finished), 0)
            if over.wait(LOOK_EVERY_S):
                return

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.pwrite(file, _PROGRESS.pack(first, trainer.global_steps_finished), 0)
